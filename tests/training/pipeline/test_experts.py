"""Experts spread over a team: results and gradients equal those of local experts for any routing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv3.model.layers.experts import LOCAL_EXPERTS, ExpertLayer, RoutedExperts
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.router import Routing
from dsv3.model.params import MoeParams
from pallas_kernels.backend import Backend
from training.pipeline.experts import TEAM, AllToAllExperts, TeamBuffers
from training.pipeline.ranks import SPLIT, is_partition, rank_meshes, spread
from training.pipeline.schedules import RankSize

DEVICES, TOKENS, EXPERTS, K, WIDTH = 4, 32, 16, 4, 8
SIZE = RankSize(data=2, experts=DEVICES)
BUFFERS = TeamBuffers.from_batch(TOKENS, K, EXPERTS, DEVICES)
HELD = PartitionSpec(None, TEAM)
INPUTS = (HELD, HELD), SPLIT, SPLIT, SPLIT, SPLIT


def routings() -> dict[str, np.ndarray]:
    """Returns routings of all rows, `[T, K]`, of which each team has a half; a row's experts differ."""
    rng, rows = np.random.default_rng(0), SIZE.devices * TOKENS
    even = np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :K]
    one_device = np.argsort(rng.random((rows, EXPERTS // DEVICES)), axis=1)
    one_expert = np.tile(np.where(np.arange(K) == 0, EXPERTS - 1, -1), (rows, 1))
    one_team = np.concatenate([one_device[: rows // 2], even[rows // 2 :]])
    one_sender = np.concatenate([one_device[:TOKENS], even[TOKENS:]])
    return {
        "even": even,
        "all rows to one device": one_device,
        "all rows to one expert": one_expert,
        "all rows of a team to one device": one_team,
        "all rows of one device to one device": one_sender,
    }


def gradients(routed: RoutedExperts) -> Callable[..., Any]:
    """Returns `(held, x, weights, ids, dy) -> (y, gradients of held, x and weights, counts)` on one device."""

    def run(held: Any, x: jax.Array, weights: jax.Array, ids: jax.Array, dy: jax.Array) -> Any:
        router = jnp.zeros((1, EXPERTS, WIDTH))

        def only(held: Any, x: jax.Array, weights: jax.Array) -> Any:
            params = MoeParams(router, None, *held, shared=None)
            y, stats = routed(x, Routing(ids, weights), ExpertLayer(params, 0, Numerics(backend=Backend.REFERENCE)))
            return y, stats.counts

        y, pullback, counts = jax.vjp(only, held, x, weights, has_aux=True)
        return y, *pullback(dy), counts[None]

    return run


@pytest.fixture(scope="module")
def spread_experts() -> Callable[..., Any]:
    outputs = SPLIT, (HELD, HELD), SPLIT, SPLIT, SPLIT

    def summed(*operands: Any) -> Any:
        y, dheld, *rest = gradients(AllToAllExperts(DEVICES))(*operands)
        return y, jax.lax.psum(dheld, "node"), *rest

    return jax.jit(spread(summed, SIZE, INPUTS, outputs))


def test_results_and_gradients_equal_those_of_local_experts(spread_experts: Callable[..., Any]) -> None:
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    rows = SIZE.devices * TOKENS
    held = draw(1, EXPERTS, 2 * WIDTH, WIDTH), draw(1, EXPERTS, WIDTH, WIDTH)
    x, weights, dy = draw(rows, WIDTH), draw(rows, K), draw(rows, WIDTH)
    alone, (mesh,) = jax.jit(gradients(LOCAL_EXPERTS)), rank_meshes(jax.devices(), 1, SIZE)
    places = jax.tree.map(lambda partition: NamedSharding(mesh, partition), INPUTS, is_leaf=is_partition)
    for name, ids in routings().items():
        operands = held, x, weights, ids.astype(np.int32), dy
        *got, counts = spread_experts(*jax.device_put(operands, places))
        *wanted, all_counts = alone(*operands)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_array_equal(counts.sum(axis=0), all_counts[0])


def test_a_round_fits_its_buffers() -> None:
    """Rows of every routing fit the lines, its pairs what the receiver holds; and an even one needs one round."""
    needed = {}
    for name, ids in routings().items():
        ids = ids[:TOKENS]
        rounds = np.where(ids >= 0, np.asarray(BUFFERS.rounds(jnp.asarray(ids, jnp.int32))), -1)
        needed[name] = rounds.max() + 1
        for number in range(needed[name]):
            for peer in range(DEVICES):
                here = (rounds == number) & (ids // BUFFERS.experts == peer)
                assert here.any(axis=1).sum() <= BUFFERS.lines
                assert here.sum() * DEVICES <= BUFFERS.received
    assert needed["even"] == 1
    assert needed["all rows to one device"] == -(-TOKENS * K // BUFFERS.pairs) > 1
    published = TeamBuffers.from_batch(4096, 8, 256, 64)
    assert published.received < 1.5 * 4096 * 8, "not 64 times the rows of a device"
