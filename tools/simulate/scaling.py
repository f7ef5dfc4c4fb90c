"""How many instances of a role shall run: up on queue seconds or use, down where the rest could bear it.

The rule is that of planner.md's sources in short: Dynamo's planner adds an instance where all are over the bound, and
removes one only if what the others would have then stays below a share of the bound (a flat bound gave 2 to 1 to 2).
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Pressure:
    """What one instance has before it: seconds of prompts to compute, and the share of its cache or slots in use."""

    queue_s: float
    use: float


@dataclasses.dataclass(frozen=True)
class Rule:
    """Looks every `period_s`; a new instance serves after `start_s`. Between `least` and `most` instances run.

    One more where the mean queue is above `queue_s` or the mean use above `use`. One fewer where for `calm` looks in a
    row the others could take its share and stay below `sensitivity` of both. Raises ValueError for what cannot be.
    """

    queue_s: float = 2.0
    use: float = 0.8
    sensitivity: float = 0.8
    period_s: float = 10.0
    start_s: float = 60.0
    calm: int = 6
    least: int = 1
    most: int = 64

    def __post_init__(self) -> None:
        for name in ("queue_s", "use", "sensitivity", "period_s", "calm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")
        if self.start_s < 0 or not 1 <= self.least <= self.most:
            raise ValueError(
                f"least: {self.least} is not from 1 to most, {self.most}, or start_s {self.start_s} is below 0"
            )

    def wants(self, pressures: Sequence[Pressure]) -> int:
        """Returns 1 for one more, -1 for one fewer that may be, 0 for as many; `pressures` are of those that serve."""
        count = len(pressures)
        if not count:
            return 1
        queue = sum(each.queue_s for each in pressures) / count
        use = sum(each.use for each in pressures) / count
        if queue > self.queue_s or use > self.use:
            return 1
        if count == 1:
            return 0
        more = count / (count - 1) / self.sensitivity
        return -1 if queue * more <= self.queue_s and use * more <= self.use else 0
