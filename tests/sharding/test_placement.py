import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.experts.eplb import map_of, rebalance_experts
from sharding.experts.placement import choose_replicas, expert_map_of, placement_of

E, Er, T, K = 8, 12, 16, 3


def random_map(seed: int):
    weight = np.random.default_rng(seed).lognormal(sigma=2, size=(2, E))
    return rebalance_experts(weight, Er, 1, 1, 4)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), rank=st.integers(0, 200))
def test_replicas_hold_the_selected_expert_and_share_its_load(seed: int, rank: int) -> None:
    expert_map = random_map(seed)
    placement = placement_of(expert_map, Er - E + 1)
    ids = np.random.default_rng(seed).integers(-1, E, (T, K)).astype(np.int32)
    selected = np.asarray(choose_replicas(ids, placement.replicas[1], placement.copies[1], rank))
    assert ((selected == -1) == (ids == -1)).all()
    assert (expert_map.phy2log[1, selected[ids >= 0]] == ids[ids >= 0]).all()
    for expert in range(E):
        own = [replica for replica in expert_map.log2phy[1, expert] if replica >= 0]
        taken = [(selected == replica).sum() for replica in own]
        assert max(taken) - min(taken) <= 1


def test_replicas_are_round_robin_from_an_offset_per_device() -> None:
    """The k-th token that selects an expert goes to its replica number k + device, modulo the number of replicas."""
    placement = placement_of(random_map(7), Er - E + 1)
    replicas, copies = placement.replicas[0], placement.copies[0]
    ids = np.random.default_rng(0).integers(-1, E, (T, K)).astype(np.int32)
    selected = np.asarray(choose_replicas(ids, replicas, copies, 3)).ravel()
    seen = dict.fromkeys(range(E), 3)
    for expert, replica in zip(ids.ravel().tolist(), selected.tolist(), strict=True):
        if expert >= 0:
            assert replica == replicas[expert, seen[expert] % copies[expert]]
            seen[expert] += 1


def test_without_redundant_experts_there_is_one_replica() -> None:
    placement = placement_of(map_of(np.arange(E)[None, ::-1], E), 1)
    ids = np.array([[0, 3, -1], [7, 0, 1]], np.int32)
    selected = choose_replicas(ids, placement.replicas[0], placement.copies[0], 5)
    np.testing.assert_array_equal(selected, [[7, 4, -1], [0, 7, 6]])


def test_expert_map_of_inverts_placement_of() -> None:
    expert_map = random_map(3)
    restored = expert_map_of(placement_of(expert_map, Er - E + 1), Er)
    np.testing.assert_array_equal(restored.phy2log, expert_map.phy2log)
    np.testing.assert_array_equal(restored.logcnt, expert_map.logcnt)


def test_placements_have_one_shape() -> None:
    shapes = {tuple(a.shape for a in placement_of(random_map(seed), Er - E + 1)) for seed in range(5)}
    assert shapes == {((2, E, Er - E + 1), (2, E))}


def test_more_replicas_than_compiled_for_are_rejected() -> None:
    hot = np.array([[1000.0] + [1.0] * (E - 1)])
    with pytest.raises(ValueError, match="5 replicas, but the compiled step allows at most 2"):
        placement_of(rebalance_experts(hot, Er, 1, 1, 4), 2)
