"""A front's eyes on the engine: what it does in its steps, how loaded its experts are, and profiles.

The engine is asked to show itself only when somebody looks, and at most once per second and front. Who looks waits for
nothing: he gets what was seen last, so that a slow step delays no picture.
"""

import asyncio
import time
from typing import Literal

from dsv3.engine.look import Look, StepNote
from dsv3.server.answers.errors import unavailable
from dsv3.server.engine.client import EngineClient

_LOOK_EVERY_S = 0.9
_FORGET_S = 10.0
_PROFILE_WAIT_S = 30.0


class Onlooker:
    """A front's eyes on the engine: what was seen last, and whether a profile is on its way."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._engine.on_seen = self._take
        self._asked_at = self._seen_at = float("-inf")
        self._look: Look | None = None
        self._profile: asyncio.Future[list[StepNote]] | None = None

    def look(self) -> Look | None:
        """Returns what was seen in the last seconds, None where nothing was; asks the engine for what comes next."""
        now = time.monotonic()
        if now - self._asked_at > _LOOK_EVERY_S:
            self._asked_at = now
            self._engine.watch("look")
        return self._look if now - self._seen_at < _FORGET_S else None

    async def start_profile(self) -> None:
        """Has the engine begin a profile; raises ApiError as `stop_profile` does."""
        await self._ask("start_profile")

    async def stop_profile(self) -> list[StepNote]:
        """Returns the steps of the profile, which ends; ApiError 503 where the engine does not answer in time."""
        return await self._ask("stop_profile")

    async def _ask(self, what: Literal["start_profile", "stop_profile"]) -> list[StepNote]:
        if self._engine.state != "ready":
            raise unavailable(self._engine.reason, "engine_unavailable", retry_after=5)
        if self._profile is not None:
            raise unavailable("another request begins or ends a profile just now", "profile_busy")
        self._profile = asyncio.get_running_loop().create_future()
        self._engine.watch(what)
        try:
            return await asyncio.wait_for(self._profile, _PROFILE_WAIT_S)
        except TimeoutError:
            raise unavailable("the engine has not answered; its step takes long", "profile_timeout") from None
        finally:
            self._profile = None

    def _take(self, seen: Look | list[StepNote]) -> None:
        if isinstance(seen, Look):
            self._look, self._seen_at = seen, time.monotonic()
        elif self._profile is not None and not self._profile.done():
            self._profile.set_result(seen)
