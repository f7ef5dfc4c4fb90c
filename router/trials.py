"""How often a request is tried: until it is answered, has gone on too often, or two instances have died under it."""

import dataclasses
import time

from dsv3.server.answers.errors import ENGINE_DIED, ApiError, unavailable
from router.instance import Broken

MAX_DEATHS = 2
"""Instances that may die with a request on them before it is taken for the cause."""
INSTANCES_DIED = "instances_died"
FATAL = (INSTANCES_DIED, ENGINE_DIED)
"""Codes of errors that say that nobody else should have the request."""


class Refused(Exception):
    """The instance has no room for the request now."""


@dataclasses.dataclass
class Trials:
    """What has become of a request so far. Times are seconds of a monotonic clock."""

    max_resumes: int
    patience_s: float
    resumes: int = 0
    deaths: int = 0
    since: float = dataclasses.field(default_factory=time.monotonic)

    def refused(self, now: float) -> None:
        """Notes that an instance would not have it; raises ApiError 503 where that has gone on for too long."""
        if now - self.since > self.patience_s:
            raise unavailable("no instance has taken the request", "no_instance")

    def broke(self, failure: Broken, *, has_died: bool, now: float) -> None:
        """Notes that an instance has not answered to the end; raises ApiError where nobody else is to be asked."""
        if failure.error is not None and failure.error.body.code == ENGINE_DIED:
            raise failure.error
        if not failure.has_arrived:
            self.refused(now)
            return
        self.resumes, self.deaths, self.since = self.resumes + 1, self.deaths + has_died, now
        if self.deaths >= MAX_DEATHS:
            text = f"{self.deaths} instances have died with this request; it is not tried again"
            raise ApiError(500, text, kind="server_error", code=INSTANCES_DIED)
        if self.resumes > self.max_resumes:
            raise failure.error or broken_off()


def broken_off() -> ApiError:
    """502: the answer ends here."""
    text = "the instance has not answered to the end"
    return ApiError(502, text, kind="server_error", code="instance_failed")
