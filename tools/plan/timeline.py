"""Simulates the schedule of a compiled step with estimated durations: the timeline of compute, links and waits.

The order is the compiled program's own; only durations are estimates (`tools.plan.roofline`). One compute lane runs the
instructions in order. A collective occupies its links from its start; its done waits for it. A stage's time is divided
evenly over its matrix products, which include everything between them.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from tools.plan import hlo
from tools.plan.deployment import Rates
from tools.plan.hlo import Collective, collective_in, is_matrix_work, stage_label
from tools.plan.roofline import HOOK_S, TRANSFER_S

COMPUTE, NODE_LINK, CROSS_LINK = LANES = ("compute", "inside the node", "between nodes")
_PRODUCTS_OF_EXPERTS = 2  # gate and up together, then down


@dataclasses.dataclass(frozen=True)
class Block:
    """Work that occupies a lane from `start` to `end`, in seconds, for one micro-batch (None: unknown)."""

    lane: str
    label: str
    start: float
    end: float
    micro_batch: int | None = None


def block_name(block: Block) -> str:
    """Returns stage and micro-batch, such as "experts 1"."""
    return block.label if block.micro_batch is None else f"{block.label} {block.micro_batch}"


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step: its seconds, and the seconds and blocks of one of its MoE `layers`.

    `exposed` are the seconds per step that the device waits, by the collective's role. `micro_batches` interleave in
    a layer.
    """

    step: float
    layer: float
    layers: int
    micro_batches: int
    blocks: tuple[Block, ...]
    exposed: Mapping[str, float]


@dataclasses.dataclass
class _Clock:
    """The state of a simulated computation: its time, when links are free, and the collectives under way."""

    now: float = 0.0
    free: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys((NODE_LINK, CROSS_LINK), 0.0))
    ready: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    was_done: bool = False
    blocks: list[Block] = dataclasses.field(default_factory=list)
    exposed: dict[str, float] = dataclasses.field(default_factory=dict)

    def wait(self, until: float, role: str) -> None:
        self.exposed[role] = self.exposed.get(role, 0.0) + max(0.0, until - self.now)
        self.now = max(self.now, until)

    def work(self, seconds: float, label: str, micro_batch: int | None) -> None:
        self.was_done = False
        if seconds:
            self.blocks.append(Block(COMPUTE, label, self.now, self.now + seconds, micro_batch))
            self.now += seconds


class ScheduleSimulator:
    """Simulates a module with given durations of stages and rates of links.

    `transfers` are seconds by the role of a collective, in place of its bytes over the links' rates.
    """

    def __init__(
        self,
        module: hlo.Module,
        found: Iterable[Collective],
        stages: Mapping[str, float],
        rates: Rates,
        transfers: Mapping[str, float] | None = None,
    ) -> None:
        self._module, self._stages, self._rates, self._transfers = module, stages, rates, transfers or {}
        self._collectives = {(c.computation, c.started): c for c in found}
        self._layer = layer_loop(module)
        body = module[self._layer.called[0]] if self._layer else module[module.entry]
        in_layer = _products(module, body)
        self.micro_batches = max(1, in_layer.get("experts", 0) // _PRODUCTS_OF_EXPERTS)
        self._products = {label: count / self.micro_batches for label, count in in_layer.items()}
        self._products = _products_elsewhere(module) | self._products
        self._layer_clock = _Clock()

    def simulate(self) -> Timeline:
        """Returns the timeline of the whole step."""
        clock = self._run(self._module[self._module.entry])
        layer = self._layer_clock
        layers = (self._layer.trips or 1) if self._layer else 0
        blocks = merge_blocks(layer.blocks)
        return Timeline(clock.now, layer.now, layers, self.micro_batches, blocks, clock.exposed)

    def _run(self, computation: hlo.Computation) -> _Clock:
        clock = _Clock()
        for index, instruction in enumerate(computation.instructions):
            if (collective := self._collectives.get((computation.name, index))) is not None:
                self._start(clock, collective)
            elif instruction.opcode.endswith("-done"):
                self._finish(clock, instruction)
            elif instruction.opcode == "while" and instruction.trips is not None:
                self._loop(clock, instruction)
            elif is_matrix_work(self._module, instruction):
                label = stage_label(instruction) or "other"
                seconds = self._stages.get(label, 0.0) / self._products.get(label, 1)
                clock.work(seconds, label, instruction.micro_batch)
        return clock

    def _start(self, clock: _Clock, collective: Collective) -> None:
        ends = [clock.now + TRANSFER_S]
        link = self._rates.combine_link if collective.role == "combine" else self._rates.dispatch_link
        given = self._transfers.get(collective.role)
        for lane, nbytes, rate in (
            (NODE_LINK, collective.node_bytes, self._rates.node_link),
            (CROSS_LINK, collective.cross_bytes, link),
        ):
            if nbytes:
                start = max(clock.now, clock.free[lane])
                end = start + given if given else max(start, clock.now + TRANSFER_S) + nbytes / rate
                clock.blocks.append(Block(lane, collective.role, start, end, collective.micro_batch))
                clock.free[lane] = end
                ends.append(end)
        if collective.done == collective.started:
            clock.wait(max(ends), collective.role)
        else:
            clock.ready[collective.name] = max(ends), collective.role

    def _finish(self, clock: _Clock, instruction: hlo.Instruction) -> None:
        """Waits for a collective; arrays that arrive together cost one receiving kernel."""
        for name in instruction.operands:
            if name in clock.ready:
                until, role = clock.ready.pop(name)
                clock.wait(until, role)
                if not clock.was_done:
                    clock.work(HOOK_S, "receive", instruction.micro_batch)
                clock.was_done = True

    def _loop(self, clock: _Clock, loop: hlo.Instruction) -> None:
        if not any(has_work(self._module, name) for name in loop.called):
            return
        inner = self._run(self._module[loop.called[0]])
        trips, stages = loop.trips or 1, {(block.lane, block.label, block.micro_batch) for block in inner.blocks}
        # A stage may be a loop of its own, such as attention over groups of heads.
        if loop is not self._layer and len(stages) == 1 and not inner.exposed:
            [(_, label, within)] = stages
            # XLA shares the bodies of equal loops, whose instructions keep the names of the first loop.
            clock.work(trips * inner.now, label, within if loop.micro_batch is None else loop.micro_batch)
            return
        clock.now += trips * inner.now
        for role, seconds in inner.exposed.items():
            clock.exposed[role] = clock.exposed.get(role, 0.0) + trips * seconds
        if loop is self._layer:
            self._layer_clock = inner


def layer_loop(module: hlo.Module) -> hlo.Instruction | None:
    """Returns the loop over the MoE layers: the entry's loop of known trip count with the most expert products."""
    loops = _loops(module[module.entry])
    weighed = [(_products(module, module[loop.called[0]]).get("experts", 0), n) for n, loop in enumerate(loops)]
    experts, number = max(weighed, default=(0, 0))
    return loops[number] if experts else None


def has_work(module: hlo.Module, name: str) -> bool:
    """Returns whether a computation has matrix work or collectives; searches and sorts belong to other stages."""
    return any(is_matrix_work(module, i) or collective_in(module, i) for i in module[name].instructions)


def _products(module: hlo.Module, computation: hlo.Computation) -> dict[str, int]:
    """Counts the products of each stage, in loops once per iteration."""
    counts = _straight_products(module, computation)
    for loop in _loops(computation):
        for label, count in _products(module, module[loop.called[0]]).items():
            counts[label] = counts.get(label, 0) + (loop.trips or 1) * count
    return counts


def _straight_products(module: hlo.Module, computation: hlo.Computation) -> dict[str, int]:
    """Counts the products of each stage outside of loops."""
    counts: dict[str, int] = {}
    for instruction in computation.instructions:
        if instruction.opcode != "while" and is_matrix_work(module, instruction):
            label = stage_label(instruction) or "other"
            counts[label] = counts.get(label, 0) + 1
    return counts


def _loops(computation: hlo.Computation) -> list[hlo.Instruction]:
    """Lists the loops whose trip count the compiler knows."""
    return [i for i in computation.instructions if i.opcode == "while" and i.trips is not None]


def _products_elsewhere(module: hlo.Module) -> dict[str, float]:
    """Counts each stage's products outside of the MoE layers: in one iteration over dense layers, or in the entry."""
    entry = module[module.entry]
    counts: dict[str, float] = dict(_straight_products(module, entry))
    for loop in _loops(entry):
        counts |= _products(module, module[loop.called[0]])
    return counts


def merge_blocks(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Returns the blocks by start, with adjacent blocks of one lane, label and micro-batch merged."""
    result: list[Block] = []
    last: dict[str, int] = {}
    for block in blocks:
        before = last.get(block.lane)
        if before is not None and _continues(result[before], block):
            result[before] = dataclasses.replace(result[before], end=max(block.end, result[before].end))
        else:
            last[block.lane] = len(result)
            result.append(block)
    return tuple(result)


def _continues(before: Block, block: Block) -> bool:
    same = (before.label, before.micro_batch) == (block.label, block.micro_batch)
    return same and block.start <= before.end + 1e-12
