"""A model of one multiprocessor that runs its warpgroups' main loops: cycles per pass, and what they wait for.

It is a model: nothing in it was measured by this project. It runs one warp of two computing warpgroups, and of a third
that feeds them where that computes too, on one sub-partition:
one instruction per cycle, in order, with the stall counts and scoreboards of the machine code; one tensor core that
works on one wgmma at a time; TMA copies that take a latency and share a link into the multiprocessor. Use it for ratios
and for where the waiting is. Its calibration is one published figure: FlashMLA's loop comes out at 78 % of the tensor
core's rate, where DeepSeek publishes 660 of a throttled 865 TFLOP/s, 76 %.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence

from benchmarks.gpu.sass.counts import WARPS, columns, global_bytes, is_global, left_in_registers, tensor_cycles
from benchmarks.gpu.sass.disassembly import Instruction
from benchmarks.gpu.sass.loops import is_arrival, is_product, is_wait

_GUIDE = "CUDA programming guide, throughput of cc 9.0"
ASSUMPTIONS: Mapping[str, tuple[float, str, str]] = {
    "SHFL": (23, "cycles", "assumed"),
    "LDSM": (33, "cycles", "assumed"),
    "LDS": (29, "cycles", "assumed"),
    "STSM": (18, "cycles", "assumed"),
    "STS": (14, "cycles", "assumed"),
    "MUFU": (18, "cycles", "assumed"),
    "LDG": (280, "cycles", "assumed: a hit in the L2 cache, as pages asked for ahead are; 38 in the L1 cache"),
    "LDC": (30, "cycles", "assumed"),
    "MEMBAR": (30, "cycles", "assumed"),
    "FENCE": (30, "cycles", "assumed"),
    "R2UR": (12, "cycles", "assumed"),
    "UTMA": (20, "cycles", "assumed"),
    "other": (14, "cycles", "assumed: any other instruction with a scoreboard"),
    "operands read": (10, "cycles", "assumed: until an instruction's operands may be overwritten"),
    "barrier of a warpgroup": (20, "cycles", "assumed"),
    "mbarrier": (22, "cycles", "assumed: a successful try"),
    "wgmma drain": (30, "cycles", "assumed: from the last product to its result"),
    "producer": (60, "cycles", "assumed: from a stage's release to the TMA instruction"),
    "another block": (260, "cycles", "180 to 213 are published; and the producer of the other block"),
    "exp2 per warp": (8, "cycles", f"{_GUIDE}: 16 per cycle"),
    "shared memory": (128, "bytes per cycle", f"{_GUIDE}; one port for operands, TMA and stores"),
    "TMA latency": (700, "cycles", "calibrated with FlashMLA's published rate"),
    "L2 to multiprocessor": (40, "bytes per cycle", "as above; DeepGEMM's heuristic says 46.6"),
    "memory of an H200": (19.9, "bytes per cycle", "4.8 TB/s, 132 multiprocessors at 1.83 GHz"),
    "latency of memory": (900, "cycles", "assumed"),
}
"""What the model takes as given: value, unit and source. Names in capitals begin opcodes."""

_PASSES = 7
"""Passes to settle and as many to measure, times the stages of the ring, which is full at the start."""
_MOST_CYCLES = 400_000


class ModelError(RuntimeError):
    """A loop does not fit its protocol, or two warpgroups wait for each other forever."""


def assumed(name: str) -> float:
    """Returns the value of an assumption."""
    return ASSUMPTIONS[name][0]


@dataclasses.dataclass(frozen=True)
class Load:
    """A TMA copy, or several that arrive together.

    Attributes:
      full: mbarrier at which it arrives.
      free: mbarrier that says its place may be overwritten.
      bytes: that are written to shared memory.
      by_others: how many of them another block fetches and sends by multicast. They do not count on the link: what
        binds it is assumed to be the L2 cache's side.
      asked: `free` is where a warpgroup of the roles starts the copy, once in each pass.
    """

    full: str
    free: str
    bytes: float
    by_others: float = 0
    asked: bool = False

    @property
    def fetched(self) -> float:
        """Bytes that this block fetches."""
        return self.bytes - self.by_others


@dataclasses.dataclass(frozen=True)
class Role:
    """What one computing warpgroup does in a pass, by the names of its mbarriers in program order."""

    waits: tuple[str, ...]
    arrives: tuple[str, ...]
    before: tuple[str, ...] = ()
    """mbarriers at which it arrives and waits once before its first pass."""
    passed: tuple[str, ...] = ()
    """mbarriers at which it does not wait in its first pass, since what they guard has not been used yet."""
    fetches: bool = False
    """Whether what it loads from global memory into registers are pages, which come over the link as copies do."""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How warpgroups and the producer hand each other shared memory.

    Attributes:
      roles: of the two computing warpgroups. Equal ones run the same code.
      loads: of a pass, in the producer's order.
      ahead: passes that the producer may be ahead: stages of a ring, or 1 where a stage is a pass's.
      arrivals: of an mbarrier's phase, where more than one.
    """

    roles: tuple[Role, ...]
    loads: tuple[Load, ...]
    ahead: int = 1
    arrivals: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Link:
    """How fast TMA copies arrive: latency in cycles, bytes per cycle; which warp the tensor core takes next."""

    latency: float
    bytes_per_cycle: float
    round_robin: bool = True


@dataclasses.dataclass(frozen=True)
class Modelled:
    """Cycles of a pass, the tensor core's busy cycles in it, and cycles of waiting by cause for each warpgroup."""

    cycles: float
    tensor_cycles: float
    waiting: tuple[dict[str, float], ...]

    @property
    def utilisation(self) -> float:
        return self.tensor_cycles / self.cycles


def simulate(paths: Sequence[Sequence[Instruction]], protocol: Protocol, link: Link) -> Modelled:
    """Runs the main loops of two warpgroups side by side.

    Args:
      paths: the usual path of each role; one for all where roles are equal.
      protocol: names the mbarriers on them.
      link: of the multiprocessor.

    Raises:
      ModelError: waits or arrivals on a path are not as many as the protocol names; or nothing moves any more.
    """
    if len(paths) == 1:
        paths = [paths[0]] * len(protocol.roles)
    if len(paths) != len(protocol.roles):
        raise ModelError(f"{len(paths)} main loops for {len(protocol.roles)} warpgroups")
    return _Multiprocessor(paths, protocol, link).run()


class _Warp:
    """One warp of a warpgroup, on its way through prologue and loop."""

    def __init__(self, number: int, path: Sequence[Instruction], role: Role) -> None:
        self.number = number
        self.path = path
        self.role = role
        self.names = _named_barriers(path, role)
        self.next_issue = 0.0
        self.at = 0
        self.passes = 0
        self.scoreboards = [0.0] * 6
        self.queue: collections.deque[tuple[int, float, dict]] = collections.deque()
        self.open: dict | None = None
        self.groups: list[dict] = []
        self.waited: collections.Counter[str] = collections.Counter()
        self.waiting: collections.Counter[str] = collections.Counter()
        self.before = [*role.before]
        self.delayed: tuple[int, int] | None = None


def _named_barriers(path: Sequence[Instruction], role: Role) -> dict[int, str]:
    names: dict[int, str] = {}
    for kind, wanted, what in ((is_wait, role.waits, "waits"), (is_arrival, role.arrives, "arrivals")):
        found = [index for index, instruction in enumerate(path) if kind(instruction)]
        if len(found) != len(wanted):
            raise ModelError(f"the loop has {len(found)} {what} at mbarriers, its protocol names {wanted}")
        names |= dict(zip(found, wanted, strict=True))
    return names


class _Multiprocessor:
    """One sub-partition, the tensor core and the producer."""

    def __init__(self, paths, protocol: Protocol, link: Link) -> None:
        self.protocol, self.link = protocol, link
        self.warps = [_Warp(n, p, r) for n, (p, r) in enumerate(zip(paths, protocol.roles, strict=True))]
        self.now = 0
        self.tensor_free, self.tensor_busy, self.last = 0.0, 0.0, 0
        self.exp2_free = 0.0
        self.phases: dict[str, list[float]] = collections.defaultdict(list)
        self.arrived: collections.Counter[str] = collections.Counter()
        self.load, self.load_pass, self.loads_after, self.link_free = 0, 0, 0.0, 0.0
        for warp in self.warps:
            for name in warp.before:
                self._arrive(name)
            for name in warp.role.passed:
                self.phases[name].append(0.0)

    def run(self) -> Modelled:
        start, passes = None, _PASSES * self.protocol.ahead
        while (slowest := min(warp.passes for warp in self.warps)) < 2 * passes:
            if self.now > _MOST_CYCLES:
                raise ModelError(f"no end after {self.now} cycles; waiting: {[dict(w.waiting) for w in self.warps]}")
            if start is None and slowest >= passes:
                start = (self.now, self.tensor_busy, [dict(warp.waiting) for warp in self.warps])
            self._produce()
            self._multiply()
            self._issue()
            self.now += 1
        assert start is not None
        since, busy, waiting = start
        per_pass = tuple(
            {name: (count - before.get(name, 0)) / passes for name, count in warp.waiting.items()}
            for warp, before in zip(self.warps, waiting, strict=True)
        )
        return Modelled((self.now - since) / passes, (self.tensor_busy - busy) / passes, per_pass)

    def _produce(self) -> None:
        """Starts the producer's next copy once its place is free and the copy before it has been issued."""
        load, ahead = self.protocol.loads[self.load], self.protocol.ahead
        if self.load_pass < ahead and not load.asked:
            arrival = 0.0
        else:
            released = self._phase(load.free, self.load_pass - (0 if load.asked else ahead))
            if released is None:
                return
            released += assumed("another block") if load.by_others else 0
            ready = max(released, self.loads_after) + assumed("producer")
            if ready > self.now:
                return
            self.loads_after, arrival = self.now, self._over_link(load.fetched, self.link.latency)
        self.phases[load.full].append(arrival)
        self.load += 1
        if self.load == len(self.protocol.loads):
            self.load, self.load_pass = 0, self.load_pass + 1

    def _over_link(self, size: float, latency: float) -> float:
        """Returns when bytes that are asked for now have come over the link, behind all that were asked for before."""
        self.link_free = max(self.link_free, self.now + latency) + size / self.link.bytes_per_cycle
        return self.link_free

    def _multiply(self) -> None:
        """Gives a free tensor core its next product."""
        if self.tensor_free > self.now:
            return
        order = sorted(self.warps, key=self._turn)
        for warp in order:
            if warp.queue and warp.queue[0][0] <= self.now:
                _, cycles, group = warp.queue.popleft()
                self.tensor_free, self.last = self.now + cycles, warp.number
                self.tensor_busy += cycles
                group["left"] -= 1
                group["end"] = max(group["end"], self.tensor_free + assumed("wgmma drain"))
                return

    def _turn(self, warp: _Warp) -> tuple[float, float]:
        if self.link.round_robin:
            return (warp.number == self.last, warp.number)
        return (warp.queue[0][0] if warp.queue else float("inf"), warp.number)

    def _issue(self) -> None:
        count = len(self.warps)
        for offset in range(count):
            warp = self.warps[(offset + self.now) % count]
            if warp.next_issue <= self.now and self._ready(warp):
                self._execute(warp)
                return

    def _ready(self, warp: _Warp) -> bool:
        """Whether a warp can issue its next instruction; counts what it waits for otherwise."""
        cause = self._obstacle(warp, warp.path[warp.at])
        if cause is not None:
            warp.waiting[cause] += 1
        return cause is None

    def _obstacle(self, warp: _Warp, instruction: Instruction) -> str | None:
        if warp.before:
            if not self._passed(warp, warp.before[0]):
                return warp.before[0]
            warp.waited[warp.before.pop(0)] += 1
        if any((instruction.waits >> b) & 1 and warp.scoreboards[b] > self.now for b in range(6)):
            return "scoreboard"
        if instruction.op.startswith("MUFU") and self.exp2_free > self.now + assumed("exp2 per warp"):
            return "exp2"
        if instruction.op.startswith("WARPGROUP.DEPBAR"):
            return None if self._retire(warp, instruction) else "wgmma"
        if instruction.op.startswith("BAR.SYNC") and warp.delayed != (warp.passes, warp.at):
            warp.delayed, warp.next_issue = (warp.passes, warp.at), self.now + assumed("barrier of a warpgroup")
            warp.waiting["barrier of a warpgroup"] += int(assumed("barrier of a warpgroup")) - 1
            return "barrier of a warpgroup"
        if is_wait(instruction) and not self._passed(warp, warp.names[warp.at]):
            return warp.names[warp.at]
        return None

    def _passed(self, warp: _Warp, name: str) -> bool:
        at = self._phase(name, warp.waited[name])
        return at is not None and at <= self.now

    def _retire(self, warp: _Warp, instruction: Instruction) -> bool:
        """Whether all groups of products are complete but those that the instruction lets go on."""
        match = re.search(r"gsb0, (0x[0-9a-f]+)", instruction.args)
        may_go_on = int(match[1], 16) if match else 0
        pending = warp.groups[: len(warp.groups) - may_go_on]
        if any(group["left"] or group["end"] > self.now for group in pending):
            return False
        warp.groups = warp.groups[len(pending) :]
        return True

    def _execute(self, warp: _Warp) -> None:
        instruction = warp.path[warp.at]
        if is_product(instruction):
            self._enqueue(warp, instruction)
        elif is_wait(instruction):
            warp.waited[warp.names[warp.at]] += 1
        elif is_arrival(instruction):
            self._arrive(warp.names[warp.at])
        self._set_scoreboards(warp, instruction)
        warp.next_issue = self.now + max(1, instruction.stall)
        warp.at += 1
        if warp.at == len(warp.path):
            warp.at, warp.passes = 0, warp.passes + 1

    def _enqueue(self, warp: _Warp, product: Instruction) -> None:
        if warp.open is None:
            warp.open = {"left": 0, "end": 0.0}
        warp.open["left"] += 1
        warp.queue.append((self.now, product_cycles(product), warp.open))
        if "gsb0" in product.args:
            warp.groups.append(warp.open)
            warp.open = None

    def _set_scoreboards(self, warp: _Warp, instruction: Instruction) -> None:
        latency = _latency(instruction)
        if warp.role.fetches and is_global(instruction):
            latency = self._over_link(WARPS * global_bytes(instruction), latency) - self.now
        if instruction.op.startswith("MUFU"):
            self.exp2_free = max(self.exp2_free, self.now) + assumed("exp2 per warp")
            latency = self.exp2_free - self.now + assumed("MUFU") - assumed("exp2 per warp")
        written, read = instruction.sets
        if written is not None:
            warp.scoreboards[written] = max(warp.scoreboards[written], self.now + latency)
        if read is not None:
            until_read = latency if instruction.op.startswith(_FENCES) else assumed("operands read")
            warp.scoreboards[read] = max(warp.scoreboards[read], self.now + until_read)

    def _arrive(self, name: str) -> None:
        self.arrived[name] += 1
        if self.arrived[name] == self.protocol.arrivals.get(name, 1):
            self.arrived[name] = 0
            self.phases[name].append(self.now)

    def _phase(self, name: str, number: int) -> float | None:
        """Returns when phase `number` of an mbarrier ended, or None."""
        ended = self.phases[name]
        return ended[number] if number < len(ended) else None


def product_cycles(product: Instruction) -> float:
    """Returns the tensor core's cycles, or those of reading operands from shared memory where that takes longer."""
    n = columns(product)
    return tensor_cycles(product) if left_in_registers(product) else max(n / 2, 16 + n / 4)


def _latency(instruction: Instruction) -> float:
    if is_wait(instruction):
        return assumed("mbarrier")
    if is_global(instruction):
        return assumed("LDG")
    return next(
        (value for name, (value, _, _) in ASSUMPTIONS.items() if instruction.op.startswith(name)), assumed("other")
    )


_FENCES = ("BAR", "MEMBAR", "FENCE", "ERRBAR", "CCTL")
