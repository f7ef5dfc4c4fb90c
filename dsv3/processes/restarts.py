"""How often a process that dies is started anew; imports no jax."""

import dataclasses
import time
from collections import deque


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """An engine is started anew at most `most` times within `within_s` seconds; the next death ends the server.

    A start may take `slack` times as long as the first one did, and `least_s` seconds in any case.
    """

    most: int = 5
    within_s: float = 600.0
    slack: float = 3.0
    least_s: float = 300.0


class Deaths:
    """Counts the deaths of the last `policy.within_s` seconds."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._times: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._times)

    def note(self) -> bool:
        """Notes one more; returns whether they are too many."""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > self.policy.within_s:
            self._times.popleft()
        return len(self._times) > self.policy.most
