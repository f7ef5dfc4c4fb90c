"""Grouped products through the reference: against dense formulations, gradients, skipped tiles, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.align import align_groups
from pallas_kernels.grouped import fp8_grouped_gemm_contiguous, grouped_gemm_contiguous, weight_gradient
from tests.pallas_kernels.numerics import activation, calc_diff, weight

ROUTINGS = {
    "spread": [3, 0, 2, 2, 0, 3, 3, 0, 1, 2],
    "one group": [2] * 10,
    "empty groups and dropped rows": [0, -1, 3, 3, -1, 0, 3, 0, 0, -1],
}


def routed(x, aligned):
    return x.at[aligned.source_row].get(mode="fill", fill_value=0)


@functools.partial(jax.jit, static_argnames="tile_m")
def grouped(x, w, offset, ids, tile_m):
    aligned = align_groups(ids, 4, tile_m)
    y = grouped_gemm_contiguous(routed(x, aligned), w, aligned.tile_group, tile_m=tile_m, group_offset=offset)
    return y.at[aligned.aligned_row].get(mode="fill", fill_value=0)


@jax.jit
def dense(x, w, offset, ids):
    return jnp.einsum("mk,mnk->mn", x, w[offset + ids]) * (ids >= 0)[:, None]


def gradients(product):
    return jax.jit(jax.value_and_grad(lambda x, w, target, *rest: jnp.sum(product(x, w, *rest) * target), (0, 1)))


LOSSES = {tile_m: gradients(functools.partial(grouped, tile_m=tile_m)) for tile_m in (1, 4)}
DENSE_LOSS = gradients(dense)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("tile_m", LOSSES)
def test_contiguous_and_gradients_against_dense(routing, tile_m):
    ids, offset = jnp.array(routing), jnp.int32(4)  # the second layer of a stack of two
    x, w, target = (
        np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((10, 24), (8, 16, 24), (10, 16))
    )
    product = grouped(x, w, offset, ids, tile_m)
    np.testing.assert_allclose(product, dense(x, w, offset, ids), rtol=1e-4, atol=1e-5)
    ours, theirs = (loss(x, w, target, offset, ids) for loss in (LOSSES[tile_m], DENSE_LOSS))
    for our, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-5)


def test_skipped_tiles_do_no_work_and_read_no_weight():
    w = jnp.stack([jnp.full((8, 8), jnp.nan), jnp.ones((8, 8))])
    y = grouped_gemm_contiguous(jnp.ones((6, 8)), w, jnp.array([-1, 1, -1]), tile_m=2)
    np.testing.assert_array_equal(y[:, 0], [0, 0, 8, 8, 0, 0])


def test_contiguous_bfloat16():
    x = jax.random.normal(jax.random.key(0), (8, 64), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (2, 32, 64), jnp.bfloat16)
    y = grouped_gemm_contiguous(x, w, jnp.array([1, 0]), tile_m=4)
    assert y.dtype == jnp.bfloat16
    exact = np.concatenate([np.asarray(x[:4], np.float64) @ np.asarray(w[1], np.float64).T,
                            np.asarray(x[4:], np.float64) @ np.asarray(w[0], np.float64).T])  # fmt: skip
    assert calc_diff(y, exact) < 1e-5


def test_fp8_contiguous():
    x, x_scale, x_true = activation(0, 12, 200)
    w, w_scale, w_true = weight(1, 4, 136, 200)
    product = jax.jit(lambda offset: fp8_grouped_gemm_contiguous(
        x, x_scale, w, w_scale, jnp.array([1, -1, 0]), tile_m=4, group_offset=offset))  # fmt: skip
    y = product(2)
    assert calc_diff(y[:4], x_true[:4] @ w_true[3].T) < 1e-5
    assert calc_diff(y[8:], x_true[8:] @ w_true[2].T) < 1e-5


def test_weight_gradient_with_an_empty_group():
    dy = jax.random.normal(jax.random.key(0), (8, 5))
    x = jax.random.normal(jax.random.key(1), (8, 6))
    dw = weight_gradient(dy, x, jnp.array([0, 2, -1, 2]), 0, 2, 3)
    np.testing.assert_allclose(dw[0], dy[:2].T @ x[:2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw[2], dy[2:4].T @ x[2:4] + dy[6:].T @ x[6:], rtol=1e-5, atol=1e-6)
    assert not jnp.any(dw[1])


X, W, TILES = np.zeros((8, 16), np.float32), np.zeros((2, 4, 16), np.float32), np.zeros(2, np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grouped_gemm_contiguous(X, W, TILES, tile_m=2), r"\[8/2\]"),
        (lambda: grouped_gemm_contiguous(X, W[..., :8], TILES, tile_m=4), r"\(2, 4, 8\)"),
        (lambda: grouped_gemm_contiguous(X, W.astype(jnp.bfloat16), TILES, tile_m=4), "bfloat16"),
        (lambda: grouped_gemm_contiguous(X, W, TILES.astype(jnp.float32), tile_m=4), "integers"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
