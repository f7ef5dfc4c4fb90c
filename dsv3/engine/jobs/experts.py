"""Experts: evens the load of the devices that hold routed experts, while the engine serves.

The devices count how often each expert is chosen; every few steps the counts are read out, one step late like tokens,
and enter a sliding window. A thread judges the window: how even the devices' load is, and, at most every
`eplb_interval` steps and below `eplb_threshold`, which experts should stand where. Between two steps the resulting
moves are carried out (`sharding.experts.rebalance`), a few layers at a time, as part of the step's command. A layer
whose checksums differ stays as it was. Whatever goes wrong in the thread is logged; the experts stay where they are.
The layer of an MTP module is one more layer here, behind those of the main model. Places and loads are kept in a file,
from which the engine that comes next starts.
"""

import dataclasses
import functools
import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dsv3.config.engine import EngineConfig
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.functions import SpreadExperts
from dsv3.engine.job import Command, EngineView, JobKind, Planned, Watch
from dsv3.engine.step_log import ExpertLoad
from dsv3.model.steps import StepOutput
from dsv3.scheduler.request import StepOutputs
from sharding.experts.eplb import (
    ExpertMap,
    balancedness,
    device_load,
    keep_in_place,
    map_of,
    rebalance_experts,
    sources,
)
from sharding.experts.placement import Placement, expert_map_of, placement_of
from sharding.experts.rebalance import LayerMove, move_layer
from sharding.experts.traffic import Traffic
from sharding.mesh import RANK_SPEC, RANKS

_log = logging.getLogger(__name__)

NAME = "experts"
READ_LOAD, MOVE = Key("read_load"), Key("move_experts")  # one of `MOVE` per stack, its variant
READ_STEPS = 128  # launching a read-out took 0.5 ms on eight devices of a busy CPU: 4 us per step
WINDOW_READS = 8
MOVE_BYTES = 256 * 2**20  # per device and step, twice over the wire: 10 ms at 50 GB/s; at least one layer
_DIGEST_BYTES = 32
_COUNTS = 2  # of each forward program: passes that overflowed, and all
MIN_GAIN = 0.02  # of a layer's balancedness; less is not worth moving its weights


class ExpertsCommand(Command, frozen=True):
    """Reads out the experts' load and starts counting anew, where `read_load` says so, then moves experts."""

    read_load: bool
    moves: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]  # each a `LayerMove` of host arrays


@dataclasses.dataclass(frozen=True)
class ExpertStats:
    """Numbers of routed experts on several devices; counts and bytes are totals since the start, as far as read out.

    `balancedness` is the mean over the layers of mean over maximum of the devices' loads, for the load of the last
    steps on the experts' present places. `balancedness_min` is that of the most uneven layer, `balancedness_by_layer`
    that of each MoE layer, an MTP module's last. `rebalances` counts decisions carried out, `moved` slots that got
    another expert, `checksum_failures` layers that stayed because a checksum differed. `repeats` are forward passes
    that meant nothing because a buffer was too small. They were computed again, but for an MTP module's, which only
    guess. `in_node_bytes` have gone from device to device of a node for dispatch and combine, `cross_node_bytes` to
    another node, in all.
    """

    balancedness: float
    balancedness_min: float
    balancedness_by_layer: tuple[float, ...]
    rebalances: int
    moved: int
    checksum_failures: int
    repeats: int
    in_node_bytes: int
    cross_node_bytes: int


def judge(
    load: np.ndarray, expert_map: ExpertMap, experts: SpreadExperts, max_copies: int, threshold: float
) -> tuple[np.ndarray, list[LayerMove]]:
    """Returns how even a load `[L, E]` is by layer `[L]`, and what to do about it.

    The layers that gain by it are moved if the mean balancedness is below `threshold`.
    """
    machine = experts.machine
    even = balancedness(load, expert_map, machine.devices)
    if even.mean() >= threshold:
        return even, []
    nodes, devices = machine.nodes, machine.devices
    new = rebalance_experts(load, experts.num_replicas, experts.num_groups, nodes, devices)
    new = keep_in_place(new, expert_map, experts.num_groups, nodes, devices)
    gain = balancedness(load, new, devices) - even
    return even, moves_to(new, expert_map, max_copies, np.flatnonzero(gain > MIN_GAIN))


def moves_to(new: ExpertMap, old: ExpertMap, max_copies: int, layers: np.ndarray) -> list[LayerMove]:
    """Returns the moves that take these layers from one map to another, both of as many replicas."""
    placement, source = placement_of(new, max_copies), sources(new, old).astype(np.int32)
    return [LayerMove(np.array(i, np.int32), source[i], placement.replicas[i], placement.copies[i]) for i in layers]


class TrafficCounter:
    """What dispatch and combine have sent, from what the devices count and `StepFunctions.traffic`."""

    def __init__(self, traffic: Sequence[Traffic]) -> None:
        self._traffic = traffic
        self.total, self.repeats = Traffic(), 0

    def add(self, programs: np.ndarray) -> None:
        """Takes over how often each forward program overflowed, and how often it ran, `[P, 2]`."""
        for step, (overflowed, steps) in zip(self._traffic, programs.tolist(), strict=True):
            self.total += step * steps
            self.repeats += overflowed


def _make_planner(view: EngineView) -> "ExpertBalancer":
    """Returns a balancer of the experts as they stand in the parameters."""
    functions, cfg = view.parts.functions, view.parts.cfg
    experts, traffic = functions.experts, functions.traffic
    assert experts is not None and traffic is not None  # `_applies`
    placement = Placement(*map(np.asarray, experts.take(view.parts.params)[1]))
    sent = TrafficCounter([traffic(program) for program in cfg.forward_programs])
    return ExpertBalancer(experts, placement, layer_bytes(experts, view.parts.params), sent, cfg)


def layer_bytes(experts: SpreadExperts, params: Any) -> int:
    """Returns the bytes of a layer's experts on one device."""
    stacks, _ = experts.take(params)
    nbytes = sum(stack.size * stack.dtype.itemsize for stack in jax.tree.leaves(stacks))
    return nbytes // experts.num_layers // experts.machine.devices


class ExpertBalancer:
    """Decides what each step's command does about balance, and keeps the books. One thread calls it.

    Args:
      experts: what the engine knows of the experts.
      placement: where they stand, as numpy arrays.
      layer_bytes: of a layer's experts on one device.
      sent: counts what one device sends.
      cfg: the engine's limits.
    """

    def __init__(
        self, experts: SpreadExperts, placement: Placement, layer_bytes: int, sent: TrafficCounter, cfg: EngineConfig
    ) -> None:
        self._experts, self._num_ranks, self._sent = experts, cfg.num_ranks, sent
        self._map = expert_map_of(placement, experts.num_replicas)
        self._max_copies = placement.replicas.shape[2]
        self._interval, self._threshold = cfg.eplb_interval, cfg.eplb_threshold
        self._read_steps = min(READ_STEPS, self._interval) if self._interval else READ_STEPS
        self._layers_at_once = max(1, MOVE_BYTES // max(1, layer_bytes))
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW_READS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eplb")
        self._judging: Future[tuple[np.ndarray, list[LayerMove]]] | None = None
        self._judged = self.load  # what is being judged, or was last
        self._moves: deque[LayerMove] = deque()
        self._under_way = 0  # moves launched whose outcome is not known yet
        self._steps = self._decided = 0
        self._even = np.ones(experts.num_layers)
        self._rebalances = self._moved = self._failures = 0
        self._version = 0  # of what `snapshot` shows
        self._last_move: tuple[np.ndarray, ExpertMap] | None = None  # the load that decided it, the map before it
        self._file = Path(cfg.eplb_state) if cfg.eplb_state and self._interval else None
        if self._file is not None:
            self._start_from(self._file)
        self._stats = self._summed_up()

    @property
    def load(self) -> np.ndarray:
        """(token, expert) pairs by layer and expert in the window, `[L, E]`."""
        shape = self._experts.num_layers, self._experts.num_experts
        return sum(self._window, start=np.zeros(shape, np.int64))

    @property
    def expert_map(self) -> ExpertMap:
        """Where the experts stand, as far as the host knows."""
        return self._map

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Balances beside other work: a step that would hold nothing else is not worth launching."""
        command = self.command() if step else None
        return [] if command is None else [Planned(NAME, command)]

    def collect(self, planned: Planned, results: tuple[np.ndarray, ...], outputs: StepOutputs) -> None:
        """Takes over what a command has given."""
        assert isinstance(planned.command, ExpertsCommand)
        self.note(planned.command, results)

    def command(self) -> ExpertsCommand | None:
        """Returns what the next step does about balance."""
        self._steps += 1
        if self._judging is not None and self._judging.done():
            self._take_judgement(self._judging)
        read = self._steps % self._read_steps == 0
        if not read and not self._moves:
            return None
        moves = [self._moves.popleft() for _ in range(min(self._layers_at_once, len(self._moves)))]
        self._under_way += len(moves)
        return ExpertsCommand(read, moves)

    def note(self, command: ExpertsCommand, results: Sequence[np.ndarray]) -> None:
        """Takes over what a command has given: the load, if it was read, and whether each move was carried out."""
        moved = list(results)
        if command.read_load:
            self._note_load(moved.pop(0))
        for move, intact in zip(command.moves, moved, strict=True):
            self._note_move(LayerMove(*move), bool(intact))
        if command.moves and not self._moving:
            self._rebalances += 1
            _log.info("experts rebalanced: %d moved so far", self._moved)
        if self._file is not None and not self._moving:
            self._thread.submit(write_state, self._file, self._map, list(self._window))
        self._stats = self._summed_up()

    def stats(self) -> ExpertStats:
        """Returns a snapshot; any thread may ask."""
        return self._stats

    def snapshot(self) -> ExpertLoad:
        """Returns the load of the window, and what the last move made of the load that decided it."""
        load, devices = self.load, self._experts.machine.devices
        before = after = b""
        if self._last_move is not None:
            judged, old = self._last_move
            before, after = (_floats(device_load(judged, each, devices)) for each in (old, self._map))
        now = _floats(device_load(load, self._map, devices))
        layers, experts = load.shape
        return ExpertLoad(self._version, layers, experts, devices, _floats(load), now, before, after)

    @property
    def _moving(self) -> bool:
        return bool(self._moves or self._under_way)

    def _summed_up(self) -> ExpertStats:
        sent = self._sent.total * self._experts.machine.devices
        return ExpertStats(
            balancedness=float(self._even.mean()),
            balancedness_min=float(self._even.min()),
            balancedness_by_layer=tuple(self._even.tolist()),
            rebalances=self._rebalances,
            moved=self._moved,
            checksum_failures=self._failures,
            repeats=self._sent.repeats,
            in_node_bytes=sent.device_bytes - sent.node_bytes,
            cross_node_bytes=sent.node_bytes,
        )

    def _start_from(self, file: Path) -> None:
        """Begins with the loads of the engine before, and with the moves to the places that its experts had."""
        if (found := read_state(file, self._experts, self._map)) is not None:
            wanted, loads = found
            self._window.extend(loads)
            differ = np.flatnonzero((wanted.phy2log != self._map.phy2log).any(axis=1))
            self._moves.extend(moves_to(wanted, self._map, self._max_copies, differ))

    def _note_load(self, load: np.ndarray) -> None:
        pairs, programs = split_load(load, self._experts, self._num_ranks)
        self._sent.add(programs)
        self._window.append(pairs)
        self._version += 1
        if self._judging is None:
            due = self._interval and self._steps - self._decided >= self._interval and not self._moving
            if due:
                self._decided = self._steps
            threshold = self._threshold if due else 0.0
            self._judged = self.load
            arguments = (self._judged, self._map, self._experts, self._max_copies, threshold)
            self._judging = self._thread.submit(judge, *arguments)

    def _take_judgement(self, future: Future[tuple[np.ndarray, list[LayerMove]]]) -> None:
        self._judging = None
        error = future.exception()
        if error is not None:
            _log.error("the experts' balance could not be judged; they stay where they are", exc_info=error)
            return
        self._even, moves = future.result()
        self._stats = self._summed_up()
        self._moves.extend(moves)
        if moves:
            self._last_move = self._judged, self._map

    def _note_move(self, move: LayerMove, intact: bool) -> None:
        self._under_way -= 1
        layer = int(move.layer)
        if not intact:
            self._failures += 1
            _log.error("the experts of MoE layer %d were damaged on their way, so they stay where they were", layer)
            return
        self._moved += int((move.source != np.arange(len(move.source))).sum())
        phy2log = self._map.phy2log.copy()
        phy2log[layer] = phy2log[layer, move.source]
        self._map = map_of(phy2log, self._experts.num_experts)
        self._version += 1


def _floats(array: np.ndarray) -> bytes:
    return array.astype("<f4").tobytes()


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields the read-out, and for each stack one program for every move."""
    load, whole = layout.state.counters[NAME], PartitionSpec()
    yield layout.mapped(READ_LOAD, _read_load, (load,), (0,), (RANK_SPEC,), (RANK_SPEC, whole))
    experts = layout.functions.experts
    assert experts is not None  # `_applies`
    stacks, placement = experts.take(layout.params)
    shapes = LayerMove((), (experts.num_replicas,), placement.replicas.shape[1:], placement.copies.shape[1:])
    sharding = NamedSharding(layout.mesh, whole)
    move = LayerMove(*(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for shape in shapes))
    partitions, everywhere = experts.take(layout.functions.param_specs)
    for number, stack in enumerate(stacks):
        body = functools.partial(move_layer, machine=experts.machine, first_layer=experts.first_layer(number))
        specs, stays = (partitions[number], everywhere, whole), functools.partial(_no_move, experts, number)
        key, given = MOVE._replace(variant=number), (stack, placement, move)
        yield layout.mapped(key, body, given, (0, 1), specs, specs, padding={2: stays})


def _no_move(experts: SpreadExperts, number: int, _: Any, placement: Placement) -> LayerMove:
    """Returns a move that leaves the first layer of a stack as it is."""
    layer = experts.first_layer(number)
    source = np.arange(experts.num_replicas)
    return LayerMove(layer, source, np.asarray(placement.replicas)[layer], np.asarray(placement.copies)[layer])


class ExpertsWorker:
    """Reads the devices' counters and moves experts between devices."""

    def __init__(self, devices: Devices) -> None:
        assert devices.layout.functions.experts is not None  # `_applies`
        self._devices, self._experts = devices, devices.layout.functions.experts

    def launch(self, command: ExpertsCommand) -> tuple[jax.Array, ...]:
        """Returns the load, if it is read, and for each move whether it was carried out."""
        read = [self._read()] if command.read_load else []
        results = (*read, *map(self._move, command.moves))
        for array in results:
            array.copy_to_host_async()
        return results

    def _read(self) -> jax.Array:
        devices = self._devices
        load, total = devices.programs.get(READ_LOAD)(devices.state.counters[NAME])
        devices.state = dataclasses.replace(devices.state, counters=devices.state.counters | {NAME: load})
        return total

    def _move(self, arrays: tuple[np.ndarray, ...]) -> jax.Array:
        devices, experts, move = self._devices, self._experts, LayerMove(*arrays)
        stacks, placement = experts.take(devices.params)
        number = experts.stack_of(int(move.layer))
        program = devices.programs.get(MOVE._replace(variant=number))
        moved, placement, intact = program(stacks[number], placement, move)
        stacks = (*stacks[:number], moved, *stacks[number + 1 :])
        devices.params = experts.put(devices.params, stacks, placement)
        return intact


def _read_load(load: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Starts counting anew `[1, n]`; also returns the sum of the ranks' counters `[n]`."""
    return jnp.zeros_like(load), jax.lax.psum(load[0], RANKS)


def load_size(experts: SpreadExperts, cfg: EngineConfig) -> int:
    """Returns how many counters there are: see `split_load`."""
    return experts.num_layers * experts.num_experts + len(cfg.forward_programs) * _COUNTS


def counted(experts: SpreadExperts, cfg: EngineConfig, load: jax.Array, result: StepOutput, program: int) -> jax.Array:
    """Returns the counters after a forward pass."""
    pairs = experts.num_layers * experts.num_experts
    counts = result.expert_counts.ravel()
    first = experts.first_layer(int(cfg.forward_programs[program].of_module)) * experts.num_experts
    load = load.at[first : first + counts.size].add(counts)
    ran = jnp.stack([(result.overflows > 0).astype(jnp.int32), jnp.ones((), jnp.int32)])
    return load.at[pairs + program * _COUNTS : pairs + (program + 1) * _COUNTS].add(ran)


def split_load(load: np.ndarray, experts: SpreadExperts, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits what was read of all ranks.

    Returns (token, expert) pairs `[L, E]`; and how often each forward program overflowed, and how often it ran.
    """
    pairs = experts.num_layers * experts.num_experts
    programs = load[pairs:].reshape(-1, _COUNTS) // num_ranks  # equal on every rank
    return load[:pairs].reshape(experts.num_layers, -1).astype(np.int64), programs.astype(np.int64)


class _Kept(msgspec.Struct, frozen=True):
    """A map `phy2log` `[L, Er]`, and the read-outs `loads` `[reads, L, E]`, both int64 and little endian."""

    layers: int
    experts: int
    replicas: int
    phy2log: bytes
    reads: int
    loads: bytes


def write_state(path: Path, expert_map: ExpertMap, loads: Sequence[np.ndarray]) -> None:
    """Writes the file anew, in one piece. One that cannot be written is told of, and nothing else happens.

    What a process that dies meanwhile leaves beside it has one name, and so is overwritten by the next.
    """
    layers, replicas = expert_map.phy2log.shape
    kept = _Kept(
        layers=layers,
        experts=expert_map.logcnt.shape[1],
        replicas=replicas,
        phy2log=expert_map.phy2log.astype("<i8").tobytes(),
        reads=len(loads),
        loads=b"".join(load.astype("<i8").tobytes() for load in loads),
    )
    body = msgspec.msgpack.encode(kept)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(hashlib.sha256(body).digest() + body)
        part.replace(path)
    except OSError as error:
        _log.warning("the experts' places are not kept in %s: %s", path, error.strerror or error)


def read_state(path: Path, experts: SpreadExperts, first: ExpertMap) -> tuple[ExpertMap, list[np.ndarray]] | None:
    """Returns where to put the experts of an engine that has them at `first`, and the loads `[L, E]` it knows.

    The map is the one that was kept where it has as many replicas, else one that suits the kept loads. Returns None
    where nothing was kept for as many layers and experts; a file that cannot be used is told of.
    """
    try:
        content = path.read_bytes()
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("it is damaged")
        return _fitting(msgspec.msgpack.decode(body, type=_Kept), experts, first)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        _log.warning("the experts' places in %s are not used: %s", path, error)
        return None


def _fitting(kept: _Kept, experts: SpreadExperts, first: ExpertMap) -> tuple[ExpertMap, list[np.ndarray]]:
    """Raises ValueError for another model's experts."""
    if (kept.layers, kept.experts) != (experts.num_layers, experts.num_experts):
        raise ValueError(
            f"it has {kept.layers} layers of {kept.experts} experts, and the model has {experts.num_layers} of "
            f"{experts.num_experts}"
        )
    loads = list(np.frombuffer(kept.loads, "<i8").reshape(kept.reads, kept.layers, kept.experts))
    if kept.replicas == experts.num_replicas:
        return _checked_map(np.frombuffer(kept.phy2log, "<i8").reshape(kept.layers, kept.replicas), kept.experts), loads
    return _suited_map(sum(loads, start=np.zeros((kept.layers, kept.experts), np.int64)), experts, first), loads


def _checked_map(phy2log: np.ndarray, num_experts: int) -> ExpertMap:
    if any(set(layer) != set(range(num_experts)) for layer in phy2log.tolist()):
        raise ValueError("a layer does not have every expert")
    return map_of(phy2log, num_experts)


def _suited_map(load: np.ndarray, experts: SpreadExperts, first: ExpertMap) -> ExpertMap:
    if not load.any():
        return first
    nodes, devices, groups = experts.machine.nodes, experts.machine.devices, experts.num_groups
    new = rebalance_experts(load, experts.num_replicas, groups, nodes, devices)
    return keep_in_place(new, first, groups, nodes, devices)


def _watch(parts: EngineComponents) -> Watch | None:
    experts, cfg = parts.functions.experts, parts.cfg
    return None if experts is None else Watch(load_size(experts, cfg), functools.partial(counted, experts, cfg))


def _applies(parts: EngineComponents) -> bool:
    return parts.functions.experts is not None


KIND = JobKind(NAME, ExpertsCommand, _make_planner, programs, ExpertsWorker, _applies, _watch)
