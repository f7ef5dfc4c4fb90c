"""Evens the load of the devices that hold routed experts, while the engine serves.

The devices count how often each expert is chosen; every few steps the counts are read out, one step late like tokens,
and enter a sliding window. A thread judges the window: how even the devices' load is, and, at most every
`eplb_interval` steps and below `eplb_threshold`, which experts should stand where. Between two steps the resulting
moves are carried out (`sharding.experts.rebalance`), a few layers at a time, as part of the step's command. A layer
whose checksums differ stays as it was. Whatever goes wrong in the thread is logged; the experts stay where they are.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from dsv3.engine.commands import BalanceCommand, MoveCommand
from dsv3.engine.config import EngineConfig
from dsv3.engine.stats import ExpertStats
from dsv3.engine.step_bodies import SpreadExperts, StepFunctions, split_load
from sharding.experts.eplb import ExpertMap, balancedness, keep_in_place, map_of, rebalance_experts, sources
from sharding.experts.placement import Placement, expert_map_of, placement_of
from sharding.experts.traffic import StepTraffic, Traffic

_log = logging.getLogger(__name__)

READ_STEPS = 128  # launching a read-out took 0.5 ms on eight devices of a busy CPU: 4 us a step
WINDOW_READS = 8
MOVE_BYTES = 256 * 2**20  # a device and step, twice over the wire: 10 ms at 50 GB/s; at least one layer
MIN_GAIN = 0.02  # of a layer's balancedness; less is not worth moving its weights


@dataclasses.dataclass(frozen=True)
class Judgement:
    """How even the load is by layer `[L]`, and what to do about it."""

    balancedness: np.ndarray
    moves: list[MoveCommand]


def judge(
    load: np.ndarray, expert_map: ExpertMap, experts: SpreadExperts, max_copies: int, threshold: float
) -> Judgement:
    """Judges a load `[L, E]`; moves the layers that gain by it if the mean balancedness is below `threshold`."""
    machine = experts.machine
    even = balancedness(load, expert_map, machine.devices)
    if even.mean() >= threshold:
        return Judgement(even, [])
    nodes, devices = machine.nodes, machine.devices
    new = rebalance_experts(load, experts.num_slots, experts.num_groups, nodes, devices)
    new = keep_in_place(new, expert_map, experts.num_groups, nodes, devices)
    gain = balancedness(load, new, devices) - even
    placement, source = placement_of(new, max_copies), sources(new, expert_map).astype(np.int32)
    layers = np.flatnonzero(gain > MIN_GAIN)
    moves = [MoveCommand(np.array(i, np.int32), source[i], placement.replicas[i], placement.copies[i]) for i in layers]
    return Judgement(even, moves)


class Sent:
    """What dispatch and combine have sent, from what the devices count and `StepFunctions.traffic`."""

    def __init__(self, traffic: Sequence[StepTraffic]) -> None:
        self._traffic = traffic
        self.total, self.extra_rounds = Traffic(), 0

    def add(self, programs: np.ndarray) -> None:
        """Takes over rounds of each hop and steps, by forward program `[P, MAX_HOPS + 1]`."""
        for step, (*rounds, steps) in zip(self._traffic, programs.tolist(), strict=True):
            self.total += step.total(rounds, steps)
            self.extra_rounds += sum(step.overflow_rounds(rounds, steps))


def balancer_of(functions: StepFunctions, params: Any, cfg: EngineConfig) -> "Balancer | None":
    """A balancer of the experts in `params`, as they stand there; None where the functions do not spread any."""
    experts = functions.experts
    if experts is None:
        return None
    assert functions.traffic is not None
    traffic = [functions.traffic(size, kind == "prefill") for kind, size in cfg.forward_programs]
    placement = Placement(*map(np.asarray, experts.take(params)[1]))
    return Balancer(experts, placement, layer_bytes(experts, params), Sent(traffic), cfg)


def layer_bytes(experts: SpreadExperts, params: Any) -> int:
    """Of a layer's experts on one device."""
    stacks, _ = experts.take(params)
    return sum(stack.nbytes for stack in jax.tree.leaves(stacks)) // experts.num_layers // experts.machine.devices


class Balancer:
    """Decides what each step's command does about balance, and keeps the books. One thread calls it.

    Args:
      experts: what the engine knows of the experts.
      placement: where they stand, as numpy arrays.
      layer_bytes: of a layer's experts on one device.
      sent: counts what one device sends.
      cfg: the engine's limits.
    """

    def __init__(
        self, experts: SpreadExperts, placement: Placement, layer_bytes: int, sent: Sent, cfg: EngineConfig
    ) -> None:
        self._experts, self._num_ranks, self._sent = experts, cfg.num_ranks, sent
        self._map = expert_map_of(placement, experts.num_slots)
        self._max_copies = placement.replicas.shape[2]
        self._interval, self._threshold = cfg.eplb_interval, cfg.eplb_threshold
        self._read_steps = min(READ_STEPS, self._interval) if self._interval else READ_STEPS
        self._layers_at_once = max(1, MOVE_BYTES // max(1, layer_bytes))
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW_READS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eplb")
        self._judging: Future[Judgement] | None = None
        self._moves: deque[MoveCommand] = deque()
        self._under_way = 0  # moves launched whose outcome is not known yet
        self._steps = self._decided = 0
        self._even = np.ones(experts.num_layers)
        self._rebalances = self._moved = self._failures = 0
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

    def command(self) -> BalanceCommand | None:
        """What the next step does."""
        self._steps += 1
        if self._judging is not None and self._judging.done():
            self._take_judgement(self._judging)
        read = self._steps % self._read_steps == 0
        if not read and not self._moves:
            return None
        moves = [self._moves.popleft() for _ in range(min(self._layers_at_once, len(self._moves)))]
        self._under_way += len(moves)
        return BalanceCommand(read, moves)

    def note(self, command: BalanceCommand, results: Sequence[np.ndarray]) -> None:
        """Takes over what a command has given: the load, if it was read, and whether each move was carried out."""
        moved = list(results)
        if command.read_load:
            self._note_load(moved.pop(0))
        for move, intact in zip(command.moves, moved, strict=True):
            self._note_move(move, bool(intact))
        if command.moves and not self._moving:
            self._rebalances += 1
            _log.info("experts rebalanced: %d moved so far", self._moved)
        self._stats = self._summed_up()

    def stats(self) -> ExpertStats:
        """A snapshot; any thread may ask."""
        return self._stats

    @property
    def _moving(self) -> bool:
        return bool(self._moves or self._under_way)

    def _summed_up(self) -> ExpertStats:
        sent = self._sent.total * self._experts.machine.devices
        return ExpertStats(
            balancedness=float(self._even.mean()),
            balancedness_min=float(self._even.min()),
            rebalances=self._rebalances,
            moved=self._moved,
            checksum_failures=self._failures,
            extra_rounds=self._sent.extra_rounds,
            in_node_bytes=sent.device_bytes - sent.node_bytes,
            cross_node_bytes=sent.node_bytes,
        )

    def _note_load(self, load: np.ndarray) -> None:
        pairs, programs = split_load(load, self._experts, self._num_ranks)
        self._sent.add(programs)
        self._window.append(pairs)
        if self._judging is None:
            due = self._interval and self._steps - self._decided >= self._interval and not self._moving
            if due:
                self._decided = self._steps
            threshold = self._threshold if due else 0.0
            arguments = (self.load, self._map, self._experts, self._max_copies, threshold)
            self._judging = self._thread.submit(judge, *arguments)

    def _take_judgement(self, future: Future[Judgement]) -> None:
        self._judging = None
        error = future.exception()
        if error is not None:
            _log.error("the experts' balance could not be judged; they stay where they are", exc_info=error)
            return
        judgement = future.result()
        self._even = judgement.balancedness
        self._stats = self._summed_up()
        self._moves.extend(judgement.moves)

    def _note_move(self, move: MoveCommand, intact: bool) -> None:
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
