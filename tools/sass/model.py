"""A model of one multiprocessor that runs its warpgroups' main loops: cycles per pass, and what they wait for.

It is a model: nothing in it was measured by this project. It runs one warp of two computing warpgroups, and of a third
that feeds them where that computes too, on one sub-partition: one instruction per cycle, in order, with the stall
counts and scoreboards of the machine code; one tensor core that works on one wgmma at a time; TMA copies that take a
latency and share a link into the multiprocessor. Use it for ratios and for where the waiting is. Its calibration is one
published figure: FlashMLA's loop comes out at 78 % of the tensor core's rate, where DeepSeek publishes 660 of a
throttled 865 TFLOP/s, 76 %.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from tools.sass.counts import assumed, global_bytes, is_global, latency, product_cycles
from tools.sass.disassembly import SassInstruction
from tools.sass.loops import is_arrival, is_product, is_wait

_FENCES = ("BAR", "MEMBAR", "FENCE", "ERRBAR", "CCTL")
_PASSES = 7
"""Passes to settle and as many to measure, times the stages of the ring, which is full at the start."""
_MOST_CYCLES = 400_000


class ModelError(RuntimeError):
    """A loop does not fit its protocol, or two warpgroups wait for each other forever."""


@dataclasses.dataclass(frozen=True)
class Load:
    """A TMA copy, or several that arrive together.

    Attributes:
      full: mbarrier at which it arrives.
      free: mbarrier that says its place may be overwritten.
      bytes: that are written to shared memory.
      fetched: of these, what this block fetches; another block sends the others by multicast. They do not count on the
        link: what binds it is assumed to be the L2 cache's side.
      asked: `free` is where a warpgroup of the roles starts the copy, once in each pass.
    """

    full: str
    free: str
    bytes: float
    fetched: float
    asked: bool = False


@dataclasses.dataclass(frozen=True)
class Role:
    """What one computing warpgroup does in a pass, by the names of its mbarriers in program order."""

    waits: tuple[str, ...]
    arrives: tuple[str, ...]
    before: tuple[str, ...] = ()
    """mbarriers at which it arrives and waits once before its first pass."""
    fetches: bool = False
    """Whether what it loads from global memory into registers are pages, which come over the link as copies do. It
    writes them where it waits for room; in its first pass it does not wait, since nothing has been used yet."""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How warpgroups and the producer hand each other shared memory.

    Attributes:
      roles: of the computing warpgroups. Equal ones run the same code.
      loads: of a pass, in the producer's order.
      ahead: passes that the producer may be ahead: stages of a ring, or 1 where a stage is a pass's.
      arrivals: of an mbarrier's phase, where more than one.
    """

    roles: tuple[Role, ...]
    loads: tuple[Load, ...]
    ahead: int = 1
    arrivals: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TmaLink:
    """How fast TMA copies arrive: latency in cycles, bytes per cycle; which warp the tensor core takes next."""

    latency: float
    bytes_per_cycle: float
    round_robin: bool = True


@dataclasses.dataclass(frozen=True)
class Modelled:
    """Cycles of a pass, the tensor core's busy cycles in it, and cycles of waiting by cause for each warpgroup."""

    cycles: float
    tensor_cycles: float
    waiting: tuple[collections.Counter[str], ...]


def simulate(paths: Sequence[Sequence[SassInstruction]], protocol: Protocol, link: TmaLink) -> Modelled:
    """Runs the main loops of the computing warpgroups side by side.

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


@dataclasses.dataclass
class _Product:
    issued: float
    cycles: float
    end: float = math.inf


class _Warp:
    """One warp of a warpgroup: what it has asked of the tensor core, how far it is, and what it has waited for."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.queue: collections.deque[_Product] = collections.deque()
        self.passes, self.next_issue = 0, 0.0
        self.waiting: collections.Counter[str] = collections.Counter()


class _Multiprocessor:
    """One sub-partition, the tensor core and the producer. Warps and producer are generators, resumed in each cycle."""

    def __init__(self, paths: Sequence[Sequence[SassInstruction]], protocol: Protocol, link: TmaLink) -> None:
        self.protocol, self.link = protocol, link
        self.now = 0
        self.tensor_free, self.tensor_busy, self.last = 0.0, 0.0, 0
        self.exp2_free, self.link_free = 0.0, 0.0
        self.phases: dict[str, list[float]] = collections.defaultdict(list)
        self.arrived: collections.Counter[str] = collections.Counter()
        self.warps = [_Warp(number) for number in range(len(paths))]
        runs = zip(self.warps, paths, protocol.roles, strict=True)
        self.steps = [self._run(warp, path, role, _barriers(path, role)) for warp, path, role in runs]
        for role in protocol.roles:
            for name in role.before:
                self._arrive(name)
            for name in role.waits if role.fetches else ():
                self.phases[name].append(0.0)

    def run(self) -> Modelled:
        start, passes, producer = None, _PASSES * self.protocol.ahead, self._produce()
        while (slowest := min(warp.passes for warp in self.warps)) < 2 * passes:
            if self.now > _MOST_CYCLES:
                raise ModelError(f"no end after {self.now} cycles; waiting: {[dict(w.waiting) for w in self.warps]}")
            if start is None and slowest >= passes:
                start = self.now, self.tensor_busy, [warp.waiting.copy() for warp in self.warps]
            next(producer)
            self._multiply()
            self._issue()
            self.now += 1
        assert start is not None
        since, busy, before = start
        waited = tuple(
            collections.Counter({cause: (count - earlier[cause]) / passes for cause, count in warp.waiting.items()})
            for warp, earlier in zip(self.warps, before, strict=True)
        )
        return Modelled((self.now - since) / passes, (self.tensor_busy - busy) / passes, waited)

    def _produce(self) -> Iterator[None]:
        """Starts each copy once its place is free and the copy before it has been issued."""
        last = 0.0
        for number in itertools.count():
            if not self.protocol.loads:
                yield  # to the warps, for ever
            for load in self.protocol.loads:
                phase, arrival = number if load.asked else number - self.protocol.ahead, 0.0
                if phase >= 0:
                    while not self._ended(load.free, phase):
                        yield
                    released = self.phases[load.free][phase]
                    released += assumed("another block") if load.fetched < load.bytes else 0
                    while max(released, last) + assumed("producer") > self.now:
                        yield
                    last, arrival = self.now, self._over_link(load.fetched, self.link.latency)
                self.phases[load.full].append(arrival)
                yield

    def _over_link(self, size: float, latency: float) -> float:
        """Returns when bytes that are asked for now have come over the link, behind all that were asked for before."""
        self.link_free = max(self.link_free, self.now + latency) + size / self.link.bytes_per_cycle
        return self.link_free

    def _multiply(self) -> None:
        """Gives a free tensor core its next product."""
        ready = [warp for warp in self.warps if warp.queue]
        if self.tensor_free > self.now or not ready:
            return
        warp = min(ready, key=lambda w: w.number == self.last if self.link.round_robin else w.queue[0].issued)
        product = warp.queue.popleft()
        self.tensor_free, self.last = self.now + product.cycles, warp.number
        self.tensor_busy += product.cycles
        product.end = self.tensor_free + assumed("wgmma drain")

    def _issue(self) -> None:
        """Issues an instruction of the first warp that can, another one first in each cycle."""
        count = len(self.warps)
        for number in ((offset + self.now) % count for offset in range(count)):
            if self.warps[number].next_issue <= self.now:
                cause = next(self.steps[number])
                if cause is None:
                    return
                self.warps[number].waiting[cause] += 1

    def _run(
        self, warp: _Warp, path: Sequence[SassInstruction], role: Role, barriers: Mapping[int, str]
    ) -> Iterator[str | None]:
        """Yields what the warp's next instruction waits for, or None when it has been issued."""
        waited: collections.Counter[str] = collections.Counter()
        scoreboards = [0.0] * 6
        groups: list[_Product] = []  # the last product of each

        def until(name: str) -> Iterator[str]:
            while not self._ended(name, waited[name]):
                yield name
            waited[name] += 1

        for name in role.before:
            yield from until(name)
        while True:
            for place, instruction in enumerate(path):
                while any(instruction.waits >> b & 1 and end > self.now for b, end in enumerate(scoreboards)):
                    yield "scoreboard"
                if instruction.op.startswith("MUFU"):
                    while self.exp2_free > self.now + assumed("exp2 per warp"):
                        yield "exp2"
                elif instruction.op.startswith("WARPGROUP.DEPBAR"):
                    found = re.search(r"gsb0, (0x[0-9a-f]+)", instruction.args)
                    must_end = max(0, len(groups) - (int(found[1], 16) if found else 0))
                    while any(product.end > self.now for product in groups[:must_end]):
                        yield "wgmma"
                    del groups[:must_end]
                elif instruction.op.startswith("BAR.SYNC"):
                    warp.next_issue = self.now + assumed("barrier of a warpgroup")
                    yield "barrier of a warpgroup"
                elif is_wait(instruction):
                    yield from until(barriers[place])
                elif is_arrival(instruction):
                    self._arrive(barriers[place])
                elif is_product(instruction):
                    product = _Product(self.now, product_cycles(instruction))
                    warp.queue.append(product)
                    if "gsb0" in instruction.args:
                        groups.append(product)
                self._set(scoreboards, instruction, role)
                warp.next_issue = self.now + max(1, instruction.stall)
                warp.passes += place == len(path) - 1
                yield None

    def _set(self, scoreboards: list[float], instruction: SassInstruction, role: Role) -> None:
        written = latency(instruction)
        if role.fetches and is_global(instruction):
            written = self._over_link(global_bytes(instruction), written) - self.now
        if instruction.op.startswith("MUFU"):
            self.exp2_free = max(self.exp2_free, self.now) + assumed("exp2 per warp")
            written += self.exp2_free - self.now - assumed("exp2 per warp")
        read = written if instruction.op.startswith(_FENCES) else assumed("operands read")
        for scoreboard, cycles in zip(instruction.sets, (written, read), strict=True):
            if scoreboard is not None:
                scoreboards[scoreboard] = max(scoreboards[scoreboard], self.now + cycles)

    def _arrive(self, name: str) -> None:
        self.arrived[name] += 1
        if self.arrived[name] == self.protocol.arrivals.get(name, 1):
            self.arrived[name] = 0
            self.phases[name].append(self.now)

    def _ended(self, name: str, phase: int) -> bool:
        """Returns whether a phase of an mbarrier, by its number, has ended."""
        return phase < len(self.phases[name]) and self.phases[name][phase] <= self.now


def _barriers(path: Sequence[SassInstruction], role: Role) -> dict[int, str]:
    """Returns the mbarriers at which a path waits or arrives, by the instruction's place."""
    names: dict[int, str] = {}
    for kind, wanted, what in ((is_wait, role.waits, "waits"), (is_arrival, role.arrives, "arrivals")):
        found = [place for place, instruction in enumerate(path) if kind(instruction)]
        if len(found) != len(wanted):
            raise ModelError(f"the loop has {len(found)} {what} at mbarriers, its protocol names {wanted}")
        names |= dict(zip(found, wanted, strict=True))
    return names
