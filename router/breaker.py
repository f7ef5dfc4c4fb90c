"""Leaves an instance alone that fails requests though it says that it is well."""

import dataclasses

_REST_S = 1.0, 30.0
_FAILURES = 3


@dataclasses.dataclass
class Breaker:
    """Opens after three failures in a row, for a second and then twice as long each time; then one request may try.

    Requests are told apart by identity: those that were sent before it opened say nothing of the one that tries. Times
    are seconds of a monotonic clock.
    """

    failures: int = 0
    opens_until: float = 0.0
    rest_s: float = _REST_S[0]
    trial: object | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last requests have failed."""
        return self.failures >= _FAILURES

    def allows(self, now: float) -> bool:
        """Returns whether a request may be sent."""
        return not self.is_open or (now >= self.opens_until and self.trial is None)

    def send(self, request: object) -> None:
        """Notes that a request is sent: while the breaker is open, the only one."""
        if self.is_open:
            self.trial = request

    def answer(self, request: object) -> None:
        """Notes that a request gets its first tokens. The one that tried closes the breaker; a failure opens it again.

        Its end may be minutes away, and one request at a time is little.
        """
        if request is self.trial:
            self.failures, self.trial = _FAILURES - 1, None

    def succeed(self) -> None:
        """Notes that a request was answered to its end: the next rest is a short one."""
        self.failures, self.opens_until, self.rest_s, self.trial = 0, 0.0, _REST_S[0], None

    def fail(self, request: object, now: float) -> None:
        """Notes that a request has failed."""
        if self.is_open and request is not self.trial:
            return
        self.failures += 1
        if self.is_open:
            self.opens_until = now + self.rest_s
            self.rest_s = min(2 * self.rest_s, _REST_S[1])

    def end(self, request: object) -> None:
        """Notes that a request has ended. One that tried makes room for the next, also where it says nothing."""
        if request is self.trial:
            self.trial = None
