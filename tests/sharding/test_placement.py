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
def test_replicas_hold_the_wanted_expert_and_share_its_load(seed: int, rank: int) -> None:
    expert_map = random_map(seed)
    placement = placement_of(expert_map, Er - E + 1)
    ids = np.random.default_rng(seed).integers(-1, E, (T, K)).astype(np.int32)
    chosen = np.asarray(choose_replicas(ids, placement.replicas[1], placement.copies[1], rank))
    assert ((chosen == -1) == (ids == -1)).all()
    assert (expert_map.phy2log[1, chosen[ids >= 0]] == ids[ids >= 0]).all()
    for expert in range(E):
        own = [replica for replica in expert_map.log2phy[1, expert] if replica >= 0]
        taken = [(chosen == replica).sum() for replica in own]
        assert max(taken) - min(taken) <= 1


def test_replicas_are_taken_in_turn_from_one_that_the_device_decides() -> None:
    """The k-th token that wants an expert takes its copy number k + device; an even spread over many tokens follows."""
    placement = placement_of(random_map(7), Er - E + 1)
    replicas, copies = placement.replicas[0], placement.copies[0]
    ids = np.random.default_rng(0).integers(-1, E, (T, K)).astype(np.int32)
    chosen = np.asarray(choose_replicas(ids, replicas, copies, 3)).ravel()
    seen = dict.fromkeys(range(E), 3)
    for expert, replica in zip(ids.ravel().tolist(), chosen.tolist(), strict=True):
        if expert >= 0:
            assert replica == replicas[expert, seen[expert] % copies[expert]]
            seen[expert] += 1


def test_without_redundant_experts_there_is_one_replica_to_take() -> None:
    placement = placement_of(map_of(np.arange(E)[None, ::-1], E), 1)
    ids = np.array([[0, 3, -1], [7, 0, 1]], np.int32)
    chosen = choose_replicas(ids, placement.replicas[0], placement.copies[0], 5)
    np.testing.assert_array_equal(chosen, [[7, 4, -1], [0, 7, 6]])


def test_a_placement_tells_its_map() -> None:
    expert_map = random_map(3)
    told = expert_map_of(placement_of(expert_map, Er - E + 1), Er)
    np.testing.assert_array_equal(told.phy2log, expert_map.phy2log)
    np.testing.assert_array_equal(told.logcnt, expert_map.logcnt)


def test_maps_of_one_shape() -> None:
    shapes = {tuple(a.shape for a in placement_of(random_map(seed), Er - E + 1)) for seed in range(5)}
    assert shapes == {((2, E, Er - E + 1), (2, E))}


def test_more_copies_than_compiled_for_are_refused() -> None:
    hot = np.array([[1000.0] + [1.0] * (E - 1)])
    with pytest.raises(ValueError, match="5 copies, the compiled step allows 2"):
        placement_of(rebalance_experts(hot, Er, 1, 1, 4), 2)
