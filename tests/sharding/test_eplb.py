import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.experts.eplb import (
    ExpertMap,
    balancedness,
    device_load,
    keep_in_place,
    map_of,
    rebalance_experts,
    sources,
)

# Outputs of DeepSeek's EPLB with its sort made stable (see "note" in the file).
CASES = json.loads((pathlib.Path(__file__).parent / "eplb_cases.json").read_text())["cases"]


def solve(case: dict) -> ExpertMap:
    return rebalance_experts(
        np.array(case["weight"]), case["num_replicas"], case["num_groups"], case["num_nodes"], case["num_gpus"]
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_equals_the_original_bit_for_bit(case: dict) -> None:
    result = solve(case)
    for name in ExpertMap._fields:
        np.testing.assert_array_equal(getattr(result, name), case[name])
    weight = np.array(case["weight"])
    np.testing.assert_allclose(
        device_load(weight, result, case["num_gpus"]).max(axis=1), case["max_gpu_load"], rtol=1e-6
    )
    np.testing.assert_allclose(
        balancedness(weight, result, case["num_gpus"]), case["balancedness_mean_over_max"], rtol=1e-4
    )


@st.composite
def problems(draw: st.DrawFn) -> dict:
    nodes, per_node, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    experts = groups * draw(st.integers(1, 4)) * nodes
    gpus = nodes * per_node
    replicas = gpus * draw(st.integers(-(-experts // gpus), -(-experts // gpus) + 3))
    loads = st.lists(st.floats(0, 1e6, width=32), min_size=experts, max_size=experts)
    weight = draw(st.lists(loads, min_size=1, max_size=3))
    return dict(weight=weight, num_replicas=replicas, num_groups=groups, num_nodes=nodes, num_gpus=gpus)


@settings(deadline=None)
@given(problems())
def test_maps_agree_and_cover_every_expert(problem: dict) -> None:
    result = solve(problem)
    layers, experts = np.shape(problem["weight"])
    for layer in range(layers):
        counts = np.bincount(result.phy2log[layer], minlength=experts)
        np.testing.assert_array_equal(counts, result.logcnt[layer])
        assert counts.min() >= 1
        for expert in range(experts):
            replicas = result.log2phy[layer, expert]
            assert (result.phy2log[layer, replicas[: counts[expert]]] == expert).all()
            assert (replicas[counts[expert] :] == -1).all()
    total = device_load(np.array(problem["weight"]), result, problem["num_gpus"]).sum(axis=1)
    np.testing.assert_allclose(total, np.sum(problem["weight"], axis=1), rtol=1e-6)


@settings(deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_keep_in_place_moves_few_experts_at_the_same_balance(problem: dict, seed: int) -> None:
    groups, nodes, gpus = problem["num_groups"], problem["num_nodes"], problem["num_gpus"]
    old, weight = solve(problem), np.random.default_rng(seed).lognormal(size=np.shape(problem["weight"]))
    new = solve(problem | {"weight": weight})
    kept = keep_in_place(new, old, groups, nodes, gpus)
    np.testing.assert_array_equal(kept.logcnt, new.logcnt)
    loads = [np.sort(device_load(weight, m, gpus), axis=1) for m in (new, kept)]
    np.testing.assert_allclose(*loads, rtol=1e-9)
    if groups % nodes == 0:
        loads = [np.sort(device_load(weight, m, nodes), axis=1) for m in (new, kept)]
        np.testing.assert_allclose(*loads, rtol=1e-9)
    source = sources(kept, old)
    np.testing.assert_array_equal(np.take_along_axis(old.phy2log, source, axis=1), kept.phy2log)
    stays = kept.phy2log == old.phy2log
    np.testing.assert_array_equal(source == np.arange(source.shape[1]), stays)
    for a, b in zip(map_of(kept.phy2log, weight.shape[1]), kept, strict=True):
        np.testing.assert_array_equal(a, b)
    # A device that holds an expert before and after holds it as the same replica.
    span = source.shape[1] // gpus
    before, after = old.phy2log.reshape(-1, span), kept.phy2log.reshape(-1, span)
    for a, b, same in zip(before, after, stays.reshape(-1, span), strict=True):
        common = sum(min((a == e).sum(), (b == e).sum()) for e in set(b))
        assert same.sum() == common


def test_an_equal_load_moves_nothing() -> None:
    weight = np.random.default_rng(0).lognormal(size=(3, 64))
    old = rebalance_experts(weight, 80, 8, 4, 16)
    shuffled = map_of(old.phy2log.reshape(3, 4, 4, 5)[:, ::-1, ::-1, ::-1].reshape(3, 80), 64)
    np.testing.assert_array_equal(keep_in_place(shuffled, old, 8, 4, 16).phy2log, old.phy2log)


def test_hierarchical_policy_keeps_a_group_on_one_node() -> None:
    weight = np.random.default_rng(0).lognormal(size=(3, 64))
    result = rebalance_experts(weight, 80, 8, 4, 16)
    node_of_replica = np.arange(80) // 20
    for layer in result.phy2log:
        for group in range(8):
            assert len(set(node_of_replica[layer // 8 == group])) == 1


def test_replicas_balance_a_hot_expert() -> None:
    weight = np.ones((1, 64))
    weight[0, 7] = 20
    result = rebalance_experts(weight, 80, 1, 1, 16)
    assert result.logcnt[0, 7] > 1
    assert (
        balancedness(weight, result, 16)[0] > 2 * balancedness(weight, rebalance_experts(weight, 64, 1, 1, 16), 16)[0]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.ones((1, 8)), 7, 1, 1, 1), "at least 8"),
        ((np.ones((1, 8)), 10, 1, 1, 4), "multiple of 4"),
        ((np.ones((1, 8)), 8, 3, 1, 4), "multiple of 3"),
        ((np.ones((1, 8)), 8, 1, 3, 4), "multiple of 3"),
        ((np.ones((1, 8)), 8, 0, 1, 4), "positive"),
        ((np.ones(8), 8, 1, 1, 4), "layers, experts"),
        ((np.full((1, 8), np.nan), 8, 1, 1, 4), "not finite"),
    ],
)
def test_impossible_placements_are_rejected(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rebalance_experts(*arguments)
