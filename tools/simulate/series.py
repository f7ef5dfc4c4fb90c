"""Looks at a fleet at even times, for a picture of its day."""

import dataclasses

from tools.simulate.fleet import Fleet


@dataclasses.dataclass(frozen=True)
class Look:
    """The fleet at a time: nodes and mean use of cache or slots by role, and totals so far."""

    at: float
    nodes: dict[str, int]
    use: dict[str, float]
    queue_s: float
    in_flight: int
    arrived: int
    output_tokens: int


class Series:
    """Looks every `period` seconds of virtual time."""

    def __init__(self, fleet: Fleet, period: float) -> None:
        self.looks: list[Look] = []
        self._fleet, self._period = fleet, period
        fleet.clock.at(0.0, self._look)

    def _look(self) -> None:
        fleet = self._fleet
        nodes: dict[str, int] = {}
        use: dict[str, float] = {}
        queue = 0.0
        for pool, group in fleet.pools:
            role, up = group.times.role, [place.instance for place in pool.places if place.is_up]
            nodes[role] = fleet.nodes(pool, group)
            use[role] = sum(max(each.use) for each in up) / len(up)
            if role != "decode":
                queue = max(each.waiting_tokens / each.times.prompt_rate for each in up)
        record, now = fleet.record, fleet.clock.now
        self.looks.append(Look(now, nodes, use, queue, fleet.in_flight, record.count, record.output_tokens))
        fleet.clock.at(now + self._period, self._look)
