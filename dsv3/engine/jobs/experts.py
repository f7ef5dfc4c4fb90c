"""Experts: balances the load of the devices that hold routed experts, while the engine serves (EPLB).

The devices count how often each expert is selected; every few steps the counts are read out, one step late like tokens,
and enter a sliding window. A thread evaluates the window: how even the devices' load is, and, at most every
`eplb_interval` steps and below `eplb_threshold`, a better expert map (`plan_rebalance`). Between two steps the
resulting moves are executed (`sharding.experts.rebalance`), a few layers at a time, as part of the step's command. A
layer whose checksums differ stays as it was. An error in the thread is logged; the experts stay where they are. The
layer of an MTP module is one more layer here, behind those of the main model. Expert map and loads are saved in a file,
from which the next engine starts.
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
from dsv3.engine.job import Command, EngineView, JobKind, Planned
from dsv3.engine.step_log import ExpertLoad
from dsv3.files import replace_file
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
READ_STEPS = 128  # steps between read-outs
WINDOW_READS = 8
MOVE_BYTES = 256 * 2**20  # per device and step, twice over the wire: 10 ms at 50 GB/s; at least one layer
_DIGEST_BYTES = 32
MIN_GAIN = 0.02  # of a layer's balancedness; a smaller gain is not worth moving its weights


class ExpertsCommand(Command, frozen=True):
    """Reads out and resets the experts' load where `read_load` is set, then moves experts."""

    read_load: bool
    moves: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]  # each a `LayerMove` of host arrays


@dataclasses.dataclass(frozen=True)
class ExpertStats:
    """Numbers of routed experts on several devices; counts and bytes are totals as of the last read-out.

    `balancedness` is the mean over the layers of mean over maximum of the devices' loads, for the load of the last
    steps under the present expert map. `balancedness_min` is that of the most uneven layer, `balancedness_by_layer`
    that of each MoE layer, an MTP module's last. `rebalances` counts executed plans, `moved` replicas that got another
    expert, `checksum_failures` layers that stayed because a checksum differed. `repeats` are forward passes that
    overflowed a buffer; they were repeated, except for an MTP module's, which only propose drafts. `in_node_bytes` have
    gone from device to device of a node for dispatch and combine, `cross_node_bytes` to another node, in all.
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


def plan_rebalance(
    load: np.ndarray, expert_map: ExpertMap, experts: SpreadExperts, max_copies: int, threshold: float
) -> tuple[np.ndarray, list[LayerMove]]:
    """Returns the balancedness of a load `[L, E]` by layer `[L]`, and the moves that improve it.

    Layers that gain by it are moved if the mean balancedness is below `threshold`.
    """
    machine = experts.machine
    current = balancedness(load, expert_map, machine.devices)
    if current.mean() >= threshold:
        return current, []
    nodes, devices = machine.nodes, machine.devices
    new = rebalance_experts(load, experts.num_replicas, experts.num_groups, nodes, devices)
    new = keep_in_place(new, expert_map, experts.num_groups, nodes, devices)
    gain = balancedness(load, new, devices) - current
    return current, moves_to(new, expert_map, max_copies, np.flatnonzero(gain > MIN_GAIN))


def moves_to(new: ExpertMap, old: ExpertMap, max_copies: int, layers: np.ndarray) -> list[LayerMove]:
    """Returns the moves that take these layers from one map to another, both of as many replicas."""
    placement, source = placement_of(new, max_copies), sources(new, old).astype(np.int32)
    return [LayerMove(np.array(i, np.int32), source[i], placement.replicas[i], placement.copies[i]) for i in layers]


def _make_planner(view: EngineView) -> "ExpertBalancer":
    """Returns a balancer for the expert map of the parameters."""
    functions, cfg = view.components.functions, view.components.cfg
    experts, traffic = functions.experts, functions.traffic
    assert experts is not None and traffic is not None  # `_applies`
    placement = Placement(*map(np.asarray, experts.take(view.components.params)[1]))
    sent = [traffic(program) for program in cfg.forward_programs]
    return ExpertBalancer(experts, placement, layer_bytes(experts, view.components.params), sent, cfg)


def layer_bytes(experts: SpreadExperts, params: Any) -> int:
    """Returns the bytes of a layer's experts on one device."""
    stacks, _ = experts.take(params)
    nbytes = sum(stack.size * stack.dtype.itemsize for stack in jax.tree.leaves(stacks))
    return nbytes // experts.num_layers // experts.machine.devices


class ExpertBalancer:
    """Decides the experts' part of each step's command, and tracks the expert map. One thread calls it.

    `expert_map` is the present one, as far as results are in.

    Args:
      experts: what the engine knows of the experts.
      placement: their initial placement, as numpy arrays.
      layer_bytes: of a layer's experts on one device.
      traffic: what one device sends in each forward program.
      cfg: the engine's limits.
    """

    def __init__(
        self,
        experts: SpreadExperts,
        placement: Placement,
        layer_bytes: int,
        traffic: Sequence[Traffic],
        cfg: EngineConfig,
    ) -> None:
        self._experts, self._num_ranks = experts, cfg.num_ranks
        self._traffic, self._sent, self._repeats = traffic, Traffic(), 0
        self.expert_map = expert_map_of(placement, experts.num_replicas)
        self._max_copies = placement.replicas.shape[2]
        self._interval, self._threshold = cfg.eplb_interval, cfg.eplb_threshold
        self._read_steps = min(READ_STEPS, self._interval) if self._interval else READ_STEPS
        self._layers_at_once = max(1, MOVE_BYTES // max(1, layer_bytes))
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW_READS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eplb")
        self._planning: Future[tuple[np.ndarray, list[LayerMove]]] | None = None
        self._planned_load = self.load  # of the plan in progress, or the last one
        self._moves: deque[LayerMove] = deque()
        self._under_way = 0  # moves launched whose outcome is not known yet
        self._steps = self._decided = 0
        self._balancedness = np.ones(experts.num_layers)
        self._rebalances = self._moved = self._failures = 0
        self._version = 0  # of what `snapshot` shows
        self._last_move: tuple[np.ndarray, ExpertMap] | None = None  # the load that decided it, the map before it
        self._file = Path(cfg.eplb_state) if cfg.eplb_state and self._interval else None
        if self._file is not None:
            self._start_from(self._file)
        self._stats = self._make_stats()

    @property
    def load(self) -> np.ndarray:
        """(token, expert) pairs by layer and expert in the window, `[L, E]`."""
        shape = self._experts.num_layers, self._experts.num_experts
        return sum(self._window, start=np.zeros(shape, np.int64))

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Balances alongside other work: a step with nothing else is not worth launching."""
        if not step:
            return []
        self._steps += 1
        if self._planning is not None and self._planning.done():
            self._apply_plan(self._planning)
        read = self._steps % self._read_steps == 0
        if not read and not self._moves:
            return []
        moves = [self._moves.popleft() for _ in range(min(self._layers_at_once, len(self._moves)))]
        self._under_way += len(moves)
        return [Planned(NAME, ExpertsCommand(read, moves))]

    def on_results(self, planned: Planned, results: tuple[np.ndarray, ...], outputs: StepOutputs) -> None:
        """Updates window and map from the results of a command: the load, if read, and the success of each move."""
        command, moved = planned.command, list(results)
        assert isinstance(command, ExpertsCommand)
        if command.read_load:
            self._on_load(moved.pop(0))
        for move, intact in zip(command.moves, moved, strict=True):
            self._on_move(LayerMove(*move), bool(intact))
        if command.moves and not self._moving:
            self._rebalances += 1
            _log.info("EPLB: rebalance %d is done, %d replicas moved so far", self._rebalances, self._moved)
        if self._file is not None and not self._moving:
            self._thread.submit(write_state, self._file, self.expert_map, list(self._window))
        self._stats = self._make_stats()

    def stats(self) -> ExpertStats:
        """Returns a snapshot; any thread may call it."""
        return self._stats

    def snapshot(self) -> ExpertLoad:
        """Returns the load of the window, and the effect of the last rebalance on the load that caused it."""
        load, devices = self.load, self._experts.machine.devices
        before = after = b""
        if self._last_move is not None:
            planned_load, old = self._last_move
            before, after = (_floats(device_load(planned_load, each, devices)) for each in (old, self.expert_map))
        now = _floats(device_load(load, self.expert_map, devices))
        layers, experts = load.shape
        return ExpertLoad(self._version, layers, experts, devices, _floats(load), now, before, after)

    @property
    def _moving(self) -> bool:
        return bool(self._moves or self._under_way)

    def _make_stats(self) -> ExpertStats:
        sent = self._sent * self._experts.machine.devices
        return ExpertStats(
            balancedness=float(self._balancedness.mean()),
            balancedness_min=float(self._balancedness.min()),
            balancedness_by_layer=tuple(self._balancedness.tolist()),
            rebalances=self._rebalances,
            moved=self._moved,
            checksum_failures=self._failures,
            repeats=self._repeats,
            in_node_bytes=sent.device_bytes - sent.node_bytes,
            cross_node_bytes=sent.node_bytes,
        )

    def _start_from(self, file: Path) -> None:
        """Starts with the saved loads, and with moves to the saved expert map."""
        if (found := read_state(file, self._experts, self.expert_map)) is not None:
            saved, loads = found
            self._window.extend(loads)
            differ = np.flatnonzero((saved.phy2log != self.expert_map.phy2log).any(axis=1))
            self._moves.extend(moves_to(saved, self.expert_map, self._max_copies, differ))

    def _on_load(self, load: np.ndarray) -> None:
        pairs, programs = self._experts.split_counters(load, self._num_ranks)
        for each, (overflowed, passes) in zip(self._traffic, programs.tolist(), strict=True):
            self._sent += each * passes
            self._repeats += overflowed
        self._window.append(pairs)
        self._version += 1
        if self._planning is None:
            due = self._interval and self._steps - self._decided >= self._interval and not self._moving
            if due:
                self._decided = self._steps
            threshold = self._threshold if due else 0.0
            self._planned_load = self.load
            arguments = (self._planned_load, self.expert_map, self._experts, self._max_copies, threshold)
            self._planning = self._thread.submit(plan_rebalance, *arguments)

    def _apply_plan(self, future: Future[tuple[np.ndarray, list[LayerMove]]]) -> None:
        self._planning = None
        error = future.exception()
        if error is not None:
            _log.error("EPLB: planning a rebalance failed; the experts stay where they are", exc_info=error)
            return
        self._balancedness, moves = future.result()
        self._stats = self._make_stats()
        self._moves.extend(moves)
        if moves:
            self._last_move = self._planned_load, self.expert_map

    def _on_move(self, move: LayerMove, intact: bool) -> None:
        self._under_way -= 1
        layer = int(move.layer)
        if not intact:
            self._failures += 1
            _log.error(
                "EPLB: a checksum of MoE layer %d differs after a move, so its experts stay where they were", layer
            )
            return
        self._moved += int((move.source != np.arange(len(move.source))).sum())
        phy2log = self.expert_map.phy2log.copy()
        phy2log[layer] = phy2log[layer, move.source]
        self.expert_map = map_of(phy2log, self._experts.num_experts)
        self._version += 1


def _floats(array: np.ndarray) -> bytes:
    return array.astype("<f4").tobytes()


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields the read-out, and for each stack one program for every move."""
    load, whole = layout.state.counters, PartitionSpec()
    yield layout.mapped(READ_LOAD, _read_load, (load,), (0,), (RANK_SPEC,), (RANK_SPEC, whole))
    experts = layout.functions.experts
    assert experts is not None  # `_applies`
    stacks, placement = experts.take(layout.params)
    shapes = LayerMove((), (experts.num_replicas,), placement.replicas.shape[1:], placement.copies.shape[1:])
    sharding = NamedSharding(layout.mesh, whole)
    move = LayerMove(*(jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for shape in shapes))
    partitions, placement_specs = experts.take(layout.functions.param_specs)
    for number, stack in enumerate(stacks):
        body = functools.partial(move_layer, machine=experts.machine, first_layer=experts.first_layer(number))
        specs, no_move = (partitions[number], placement_specs, whole), functools.partial(_no_move, experts, number)
        key, arguments = MOVE._replace(variant=number), (stack, placement, move)
        yield layout.mapped(key, body, arguments, (0, 1), specs, specs, padding={2: no_move})


def _no_move(experts: SpreadExperts, number: int, _: Any, placement: Placement) -> LayerMove:
    """Returns a move that leaves the first layer of a stack as it is."""
    layer = experts.first_layer(number)
    source = np.arange(experts.num_replicas)
    return LayerMove(layer, source, np.asarray(placement.replicas)[layer], np.asarray(placement.copies)[layer])


def launch(devices: Devices, command: ExpertsCommand) -> tuple[jax.Array, ...]:
    """Returns the load, if it is read, and for each move whether it succeeded."""
    read = [_read(devices)] if command.read_load else []
    results = (*read, *(_move(devices, LayerMove(*move)) for move in command.moves))
    for array in results:
        array.copy_to_host_async()
    return results


def _read(devices: Devices) -> jax.Array:
    load, total = devices.programs.get(READ_LOAD)(devices.state.counters)
    devices.state = dataclasses.replace(devices.state, counters=load)
    return total


def _move(devices: Devices, move: LayerMove) -> jax.Array:
    experts = devices.layout.functions.experts
    assert experts is not None  # `_applies`
    stacks, placement = experts.take(devices.params)
    number = experts.stack_of(int(move.layer))
    program = devices.programs.get(MOVE._replace(variant=number))
    moved, placement, intact = program(stacks[number], placement, move)
    stacks = (*stacks[:number], moved, *stacks[number + 1 :])
    devices.params = experts.put(devices.params, stacks, placement)
    return intact


def _read_load(load: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns counters `[1, n]` reset to 0, and the sum of the ranks' counters `[n]`."""
    return jnp.zeros_like(load), jax.lax.psum(load[0], RANKS)


class _SavedExperts(msgspec.Struct, frozen=True):
    """A map `phy2log` `[L, Er]`, and the read-outs `loads` `[reads, L, E]`, both int64 and little endian."""

    layers: int
    experts: int
    replicas: int
    phy2log: bytes
    reads: int
    loads: bytes


def write_state(path: Path, expert_map: ExpertMap, loads: Sequence[np.ndarray]) -> None:
    """Replaces the file. An error is logged, and has no other effect."""
    layers, replicas = expert_map.phy2log.shape
    saved = _SavedExperts(
        layers=layers,
        experts=expert_map.logcnt.shape[1],
        replicas=replicas,
        phy2log=expert_map.phy2log.astype("<i8").tobytes(),
        reads=len(loads),
        loads=b"".join(load.astype("<i8").tobytes() for load in loads),
    )
    body = msgspec.msgpack.encode(saved)
    try:
        replace_file(path, hashlib.sha256(body).digest() + body)
    except OSError as error:
        _log.warning("EPLB: the expert map is not saved in %s: %s", path, error.strerror or error)


def read_state(path: Path, experts: SpreadExperts, first: ExpertMap) -> tuple[ExpertMap, list[np.ndarray]] | None:
    """Returns the expert map for an engine that starts with the map `first`, and the saved loads `[L, E]`.

    The map is the saved one where it has as many replicas, else one that suits the saved loads. Returns None where
    nothing was saved for as many layers and experts; an unusable file is logged.
    """
    try:
        content = path.read_bytes()
        digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("it is damaged")
        return _adapt_state(msgspec.msgpack.decode(body, type=_SavedExperts), experts, first)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        _log.warning("EPLB: the expert map in %s is not used: %s", path, error)
        return None


def _adapt_state(saved: _SavedExperts, experts: SpreadExperts, first: ExpertMap) -> tuple[ExpertMap, list[np.ndarray]]:
    """Raises ValueError for another model's experts."""
    if (saved.layers, saved.experts) != (experts.num_layers, experts.num_experts):
        raise ValueError(
            f"it has {saved.layers} layers of {saved.experts} experts, and the model has {experts.num_layers} of "
            f"{experts.num_experts}"
        )
    loads = list(np.frombuffer(saved.loads, "<i8").reshape(saved.reads, saved.layers, saved.experts))
    if saved.replicas == experts.num_replicas:
        phy2log = np.frombuffer(saved.phy2log, "<i8").reshape(saved.layers, saved.replicas)
        return _validated_map(phy2log, saved.experts), loads
    return _rebalanced_map(sum(loads, start=np.zeros((saved.layers, saved.experts), np.int64)), experts, first), loads


def _validated_map(phy2log: np.ndarray, num_experts: int) -> ExpertMap:
    if any(set(layer) != set(range(num_experts)) for layer in phy2log.tolist()):
        raise ValueError("a layer does not have every expert")
    return map_of(phy2log, num_experts)


def _rebalanced_map(load: np.ndarray, experts: SpreadExperts, first: ExpertMap) -> ExpertMap:
    if not load.any():
        return first
    nodes, devices, groups = experts.machine.nodes, experts.machine.devices, experts.num_groups
    new = rebalance_experts(load, experts.num_replicas, groups, nodes, devices)
    return keep_in_place(new, first, groups, nodes, devices)


def _applies(components: EngineComponents) -> bool:
    return components.functions.experts is not None


KIND = JobKind(NAME, ExpertsCommand, _make_planner, programs, launch, _applies)
