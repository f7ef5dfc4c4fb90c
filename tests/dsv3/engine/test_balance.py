"""Experts move between devices while requests stream: the same tokens, no compilation, and no interruption.

The model has an MTP module, whose drafts are verified, and whose layer is counted and moved like the others.
"""

import concurrent.futures
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsv3.config.engine import EngineConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.programs import Key, Programs
from dsv3.engine.dtypes import EngineDtypes
from dsv3.engine.engine import Engine
from dsv3.engine.expert_parallel import expert_parallel_functions
from dsv3.engine.functions import SpreadExperts
from dsv3.engine.job import Command, Planned
from dsv3.engine.jobs import experts
from dsv3.engine.jobs.experts import MOVE, READ_LOAD, ExpertBalancer, ExpertsCommand
from dsv3.engine.limits import Hardware, engine_config
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.sequence import GREEDY
from sharding.experts import rebalance
from sharding.experts.eplb import balancedness, device_load, rebalance_experts
from sharding.experts.placement import placement_of
from sharding.experts.traffic import Traffic
from sharding.mesh import Machine, rank_mesh
from tests.dsv3.engine import toy
from tests.dsv3.engine.driving import Gathered, name_of, request, run, take
from tests.dsv3.engine.spread import spread_experts
from tests.dsv3.model import golden
from tests.dsv3.model.golden import DIRECTORY

DRAFTS = dict(speculative_config={"method": "mtp", "num_speculative_tokens": 1}, tokens_per_row=2)
RANKS, SHARDS = 4, 2
"""Ranks over two nodes, and the devices of each."""
LIMITS = dict(max_model_len=120, num_pages=2, max_num_seqs=1, max_num_batched_tokens=64)
LIMITS |= dict(num_ranks=RANKS, num_nodes=2, tensor_parallel_size=SHARDS)
REDUNDANT, LENGTH = 8, 16
MOVE_MODULE = MOVE._replace(variant=1)
BALANCING = (READ_LOAD, MOVE, MOVE_MODULE)
NEEDED = [
    *(Key("prefill", 64), Key("mtp prefill", 64), Key("sample", 1, GREEDY)),
    *(Key("decode", 1, width=2), Key("mtp decode", 1, width=2), Key("sample", 1, GREEDY, 2)),
    *BALANCING,
]


class Served:
    """The golden model on eight devices of two nodes, two for each rank, compiled once."""

    def __init__(self) -> None:
        texts = json.loads((DIRECTORY / "greedy" / "greedy.json").read_text())
        self.prompts, self.answers = texts["prompts"], [tokens[:LENGTH] for tokens in texts["greedy"]]
        whole, self.cfg = golden.with_module("greedy")
        self.whole = jax.device_get(whole)  # jax would compile each array's distribution
        mesh = rank_mesh(jax.devices()[: RANKS * SHARDS], LIMITS["num_nodes"], SHARDS)
        self.functions = expert_parallel_functions(self.cfg, mesh, REDUNDANT, dtype=jnp.float32)
        self.params = spread_experts(self.whole, self.cfg, mesh, REDUNDANT)
        self.programs: Programs | None = None

    def engine(self, **changes) -> Engine:
        cfg = EngineConfig(**(LIMITS | DRAFTS | dict(eplb_interval=4, eplb_threshold=1.0) | changes))
        engine = Engine(EngineComponents.on_devices(self.functions, self.params, self.cfg, cfg))
        if self.programs is None:
            self.programs = engine.executor.devices.programs
            assert set(BALANCING) <= set(self.programs.keys())
            self.programs.keys = lambda: NEEDED
        engine.executor.devices.programs = self.programs
        engine.warm_up()
        return engine

    def serve(self, engine: Engine, count: int = 32) -> None:
        """Serves the first `count` prompts, one on each rank.

        A request with a first token gets more in every step until its end. Where its last tokens may all be scheduled,
        it waits for one step's results.
        """
        names = [str(i) for i in range(count)]
        gathered: dict[str, Gathered] = {}
        steps: dict[str, list[int]] = {}
        for name, prompt in zip(names, self.prompts, strict=False):
            engine.add(request(name, prompt, max_tokens=LENGTH, ignore_eos=True))
        while engine.has_work:
            if engine.planners["experts"]._planning is not None:
                concurrent.futures.wait([engine.planners["experts"]._planning])
            outputs = engine.step()
            take(outputs, gathered)
            for output in outputs:
                steps.setdefault(name_of(output.request_id), []).append(engine.stats().steps)
        assert all(max(np.diff(seen)) <= 2 and len(seen) > LENGTH // 2 for seen in steps.values())
        assert [gathered[name].tokens for name in names] == self.answers[:count]
        assert engine.failure is None
        assert engine.stats().recompilations == 0
        assert engine.stats().pages_in_use == 0


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


def test_tokens_stay_the_same_while_experts_move_and_the_load_gets_even(served: Served, monkeypatch) -> None:
    monkeypatch.setattr(experts, "MOVE_BYTES", 1)  # one layer a step
    engine = served.engine()
    before = engine.planners["experts"].expert_map
    served.serve(engine)
    stats, after = engine.stats().jobs["experts"], engine.planners["experts"].expert_map
    load = engine.planners["experts"].load
    assert stats.rebalances >= 1 and stats.checksum_failures == 0
    assert stats.moved >= (before.phy2log != after.phy2log).sum() > 0
    even = [balancedness(load, expert_map, 8) for expert_map in (before, after)]
    assert (even[1] > even[0] + 0.1).all()
    assert stats.balancedness > even[0].mean() + 0.1
    seen = engine.snapshot().experts  # what the dashboard shows: the load that decided, before and after its moves
    shape = (seen.layers, seen.devices)
    loads = [np.frombuffer(each, "<f4").reshape(shape) for each in (seen.before, seen.after, seen.device_load)]
    assert shape == (len(after.phy2log), 8) and np.allclose(loads[0].sum(axis=1), loads[1].sum(axis=1))
    assert (loads[1].max(axis=1) <= loads[0].max(axis=1)).all() and (loads[1] != loads[0]).any()
    assert np.allclose(loads[2], device_load(load, after, 8))
    assert (np.frombuffer(seen.load, "<f4").reshape(load.shape) == load).all()
    assert len(stats.balancedness_by_layer) == len(after.phy2log) == served.cfg.num_moe_layers + 1
    assert (before.phy2log != after.phy2log).any(axis=1).all()  # the module's layer is the last
    params = engine.executor.devices.params
    assert (np.asarray(params.placement.copies) == after.logcnt).all()
    stacks = ((layers.moe.moe, layers.mtp.layers.moe) for layers in (params.params, served.whole))
    for layer, stack, own in zip((1, -1), *stacks, strict=True):  # the weights are where the map says
        for moved, whole in ((stack.gate_up, own.gate_up), (stack.down, own.down)):
            np.testing.assert_array_equal(moved[layer], np.asarray(whole)[layer][after.phy2log[layer]])


def test_a_damaged_layer_stays_and_tokens_are_right(served: Served, monkeypatch, caplog) -> None:
    permute = rebalance.permute
    monkeypatch.setattr(
        rebalance,
        "permute",
        lambda words, source, machine: permute(words, source, machine).at[0, 0].add(jnp.uint32(1)),
    )
    engine = served.engine()
    damaged = [damage(served, engine, key) for key in (MOVE, MOVE_MODULE)]
    engine.warm_up()
    before = engine.planners["experts"].expert_map
    served.serve(engine, 8)
    for key, sound, spec in damaged:
        served.programs._compiled[key], served.programs._specs[key] = sound, spec
    stats = engine.stats().jobs["experts"]
    assert stats.checksum_failures > 0 and stats.moved == 0
    np.testing.assert_array_equal(engine.planners["experts"].expert_map.phy2log, before.phy2log)
    placement = engine.executor.devices.params.placement
    np.testing.assert_array_equal(np.asarray(placement.replicas), served.params.placement.replicas)
    assert "a checksum of MoE layer" in caplog.text


def damage(served: Served, engine: Engine, key: Key):
    """Replaces a move's program by one that calls what is patched; returns the original."""
    sound, spec = served.programs._compiled.pop(key), served.programs._specs[key]
    moved, first = served.functions.experts, served.functions.experts.first_layer(key.variant)
    body = functools.partial(rebalance.move_layer, machine=moved.machine, first_layer=first)
    stacks, placement = moved.take(served.functions.param_specs)
    specs = (stacks[key.variant], placement, PartitionSpec())
    served.programs._specs[key] = engine.executor.devices.layout.mapped(
        key, lambda *args: body(*args), spec.arguments, spec.donated, specs, specs
    )  # another function: jax does not trace the same one twice
    return key, sound, spec


def test_an_error_in_planning_leaves_the_experts_where_they_are(served: Served, monkeypatch, caplog) -> None:
    def fail(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(experts, "rebalance_experts", fail)
    engine = served.engine()
    served.serve(engine, 8)
    assert engine.stats().jobs["experts"].moved == 0
    assert "planning a rebalance failed" in caplog.text and "a bug" in caplog.text


def test_without_an_interval_the_load_is_known_and_nothing_moves(served: Served, monkeypatch) -> None:
    monkeypatch.setattr(experts, "READ_STEPS", 8)
    engine = served.engine(eplb_interval=0)
    served.serve(engine, count := 16)
    stats = engine.stats().jobs["experts"]
    assert 0 < stats.balancedness_min <= stats.balancedness < 0.95 and stats.rebalances == 0
    assert stats.in_node_bytes > 0 and stats.cross_node_bytes > 0 and stats.repeats >= 0
    prompts = sum(map(len, served.prompts[:count]))
    rows = prompts + 2 * count * (LENGTH - 1)  # at most: with each of a row's two tokens once,
    rows += stats.repeats * RANKS * LIMITS["max_num_batched_tokens"]  # and those of a step that overflowed again
    per_layer = engine.planners["experts"].load.sum(axis=1)
    assert (per_layer <= rows * served.cfg.num_experts_per_tok).all()
    assert (per_layer > rows * served.cfg.num_experts_per_tok / 3).all()


def test_the_modules_counts_are_those_of_its_router(served: Served, monkeypatch) -> None:
    """The module processes each token of a prompt with the next one, the last one with the sampled token."""
    monkeypatch.setattr(experts, "READ_STEPS", 1)
    engine = served.engine(eplb_interval=0)
    prompt = max(served.prompts, key=len)
    [token] = run(engine, request("counted", prompt, max_tokens=1, ignore_eos=True))["counted"].tokens
    expected = golden.run(served.whole, served.cfg, np.array([[*prompt, token]])).expert_counts
    load = engine.planners["experts"].load
    np.testing.assert_array_equal(load[-1], expected[-1])
    assert load.sum(axis=1).tolist() == [len(prompt) * served.cfg.num_experts_per_tok] * (served.cfg.num_moe_layers + 1)


def test_a_model_without_spread_experts_has_no_statistics() -> None:
    engine = Engine(
        EngineComponents.on_devices(toy.FUNCTIONS, toy.PARAMS, toy.toy_config(), EngineConfig(64, 1, max_num_seqs=1))
    )
    assert "experts" not in engine.stats().jobs


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(enable_eplb=True), "enable_expert_parallel"),
        (dict(enable_eplb=True, enable_expert_parallel=True, eplb_interval=0), "eplb_interval"),
    ],
)
def test_options_that_cannot_balance_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineOptions(**options)


DTYPES = EngineDtypes(jnp.dtype(jnp.float32), "float32")


def test_options_reach_the_engine() -> None:
    options = EngineOptions(enable_expert_parallel=True, enable_eplb=True, eplb_interval=70, eplb_threshold=0.5)
    cfg = engine_config(toy.toy_config(), options, Hardware(), DTYPES)
    assert (cfg.eplb_interval, cfg.eplb_threshold) == (70, 0.5)
    off = dataclasses.replace(options, enable_eplb=False)
    assert engine_config(toy.toy_config(), off, Hardware(), DTYPES).eplb_interval == 0


# The host's part alone: eight devices of three slots each, no programs.

EXPERTS = SpreadExperts((3, 1), 16, 24, 1, Machine(1, 8), lambda params: params, lambda *_: None)


def make_balancer(**changes) -> tuple[ExpertBalancer, EngineConfig]:
    cfg = EngineConfig(64, 1, max_num_seqs=1, num_ranks=8, **(dict(eplb_interval=3, eplb_threshold=1.0) | changes))
    first = rebalance_experts(np.ones((4, 16)), 24, 1, 1, 8)
    traffic = [Traffic(100, 40, 1)] * len(cfg.forward_programs)
    return ExpertBalancer(EXPERTS, placement_of(first, 9), experts.MOVE_BYTES // 3, traffic, cfg), cfg


def read_out(cfg: EngineConfig, seed: int = 0) -> np.ndarray:
    """Counters of the devices for a load that only `seed` determines."""
    total = np.zeros(EXPERTS.num_counters(len(cfg.forward_programs)), np.int32)
    total[: 4 * 16] = (100 * np.random.default_rng(seed).lognormal(sigma=1.5, size=64)).astype(np.int32)
    total[-2:] = 8 * np.array([2, 5])  # five passes of the last program, of which two overflowed
    return total


def drive(balancer: ExpertBalancer, cfg: EngineConfig, steps: int, intact: bool = True) -> list[ExpertsCommand]:
    """Steps whose results come one step late."""
    commands, late = [], []
    for _ in range(steps):
        if balancer._planning is not None:
            concurrent.futures.wait([balancer._planning])
        planned = balancer.plan([Planned("decode", Command())])
        for job in late:
            read = [read_out(cfg)] if job.command.read_load else []
            balancer.on_results(job, (*read, *[np.array(intact)] * len(job.command.moves)), StepOutputs())
        late = planned
        commands += [job.command for job in planned]
    return commands


def test_layers_move_a_few_at_a_time_each_in_one_command() -> None:
    balancer, cfg = make_balancer()
    commands = drive(balancer, cfg, 9)
    moves = [[int(move.layer) for move in command.moves] for command in commands if command.moves]
    assert moves == [[0, 1, 2], [3]]
    assert balancer.stats().rebalances == 1
    assert balancer.stats().balancedness > 0.8


def test_bytes_follow_from_steps() -> None:
    balancer, cfg = make_balancer(eplb_interval=0)
    drive(balancer, cfg, experts.READ_STEPS + 1)
    stats = balancer.stats()
    assert stats.repeats == 2
    assert stats.cross_node_bytes == 8 * 5 * 40
    assert stats.in_node_bytes == 8 * 5 * 60


def test_an_even_load_moves_nothing() -> None:
    balancer, cfg = make_balancer(eplb_threshold=0.05)
    assert not any(command.moves for command in drive(balancer, cfg, 30))
    assert balancer.stats().balancedness < 0.6


def test_a_layer_that_failed_is_tried_again_at_the_next_decision() -> None:
    balancer, cfg = make_balancer()
    before = balancer.expert_map
    first = sum(len(command.moves) for command in drive(balancer, cfg, 7, intact=False))
    assert balancer.stats().checksum_failures == first == 4
    np.testing.assert_array_equal(balancer.expert_map.phy2log, before.phy2log)
    assert sum(len(command.moves) for command in drive(balancer, cfg, 9)) == 4
    assert balancer.stats().moved > 0


def test_the_window_drops_old_loads() -> None:
    balancer, cfg = make_balancer(eplb_interval=0)
    assert balancer.stats().balancedness == 1.0
    drive(balancer, cfg, experts.READ_STEPS * (experts.WINDOW_READS + 3))
    expected = experts.WINDOW_READS * read_out(cfg)[: 4 * 16].reshape(4, 16)
    np.testing.assert_array_equal(balancer.load, expected)
