"""The Mosaic kernels in the interpreter, with race detection: every kind of tile, edge and layout.

`calc_diff` against float64 of the same quantized values; 1e-5 allows only for the bfloat16 result.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gemm import dispatch
from pallas_kernels.gemm.plan import TilePlan
from tests.pallas_kernels.gemm.interpreted import NUM_BLOCKS, bfloat16, interpret, untouched
from tests.pallas_kernels.numerics import activation, calc_diff, weight

# M, N, K, plan: no dimension is a multiple of the tile, weight scales change inside tiles, the ring wraps around.
DENSE = {
    "wide 128": (200, 264, 256, TilePlan(True, 128, 128, stages=3)),
    "wide 112 meets two scales": (130, 264, 400, TilePlan(True, 128, 112, stages=2)),
    "wide 192": (130, 392, 272, TilePlan(True, 128, 192, stages=3)),
    "activations by multicast, a block outside": (130, 264, 256, TilePlan(True, 128, 128, cluster=2, stages=3)),
    "weights by multicast, a block outside": (
        260,
        136,
        256,
        TilePlan(True, 128, 128, cluster=2, stages=3, shares_weights=True),
    ),
    "tall, a block outside": (300, 264, 400, TilePlan(True, 256, 128, cluster=2, stages=2)),
    "narrow 8": (5, 264, 400, TilePlan(False, 8, 128, stages=3)),
    "narrow 32, two row tiles": (40, 136, 256, TilePlan(False, 32, 128, stages=2)),
    "narrow, half a block of K in a stage": (11, 264, 320, TilePlan(False, 16, 128, splits=2, stages=3)),
    "wide, half a block of K in a stage": (130, 136, 192, TilePlan(True, 128, 128, stages=3)),
    "tall, half a block of K in a stage": (300, 264, 192, TilePlan(True, 256, 128, cluster=2, stages=2)),
    "narrow 16 split": (11, 264, 912, TilePlan(False, 16, 128, splits=3, stages=3)),
}


@pytest.mark.parametrize(("m", "n", "k", "plan"), DENSE.values(), ids=DENSE)
def test_dense_fp8(m, n, k, plan):
    a, a_scale, a_true = activation(0, m, k)
    b, b_scale, b_true = weight(1, 3, n, k)
    out = interpret(
        lambda a, a_scale, b, b_scale, layer: dispatch.dense(
            a, a_scale, b, b_scale, layer, jnp.bfloat16, plan=plan, num_sms=NUM_BLOCKS * plan.cluster
        ),
        a, a_scale, b, b_scale, 1,
    )  # fmt: skip
    assert out.shape == (m, n) and out.dtype == jnp.bfloat16
    assert calc_diff(out, a_true @ b_true[1].T) < 1e-5


@pytest.mark.parametrize("plan", [TilePlan(True, 128, 128), TilePlan(False, 16, 128)], ids=["wide", "narrow"])
def test_dense_float32_output(plan):
    a, a_scale, a_true = activation(0, 9, 256)
    b, b_scale, b_true = weight(1, 1, 136, 256)
    out = interpret(
        lambda *args: dispatch.dense(*args, 0, jnp.float32, plan=plan, num_sms=NUM_BLOCKS), a, a_scale, b, b_scale
    )
    assert calc_diff(out, a_true @ b_true[0].T) < 1e-12


FLOAT32 = {
    "one row": (1, 136, 400, TilePlan(False, 8, 128, splits=7, stages=2)),
    "rows of a part are padded": (33, 264, 208, TilePlan(False, 64, 128, splits=2, stages=3)),
    "whole tile": (64, 256, 256, TilePlan(False, 64, 128, splits=4)),
    "two row tiles": (130, 136, 336, TilePlan(False, 128, 128, splits=3, stages=2)),
    "wide": (130, 136, 208, TilePlan(True, 128, 192, stages=3)),
}


@pytest.mark.parametrize(("m", "n", "k", "plan"), FLOAT32.values(), ids=FLOAT32)
def test_dense_bfloat16_with_a_float32_result(m, n, k, plan):
    (x, x_true), (w, w_true) = bfloat16(0, m, k), bfloat16(1, 3, n, k)
    out = interpret(
        lambda x, w, layer: dispatch.dense(x, None, w, None, layer, jnp.float32, plan=plan, num_sms=NUM_BLOCKS), x, w, 2
    )
    assert out.shape == (m, n) and out.dtype == jnp.float32
    assert calc_diff(out, x_true @ w_true[2].T) < 1e-12


def contiguous(x, x_scale, w, w_scale, tile_group, tile_m, plan):
    def fn(x, x_scale, w, w_scale, tile_group, offset):
        return dispatch.contiguous(
            x,
            x_scale,
            w,
            w_scale,
            tile_group,
            offset,
            tile_m,
            jnp.bfloat16,
            plan=plan,
            num_sms=NUM_BLOCKS * plan.cluster,
        )

    return interpret(fn, x, x_scale, w, w_scale, jnp.array(tile_group), 2)


CONTIGUOUS = {
    "wide": ([0, -1, 2], 128, TilePlan(True, 128, 128, stages=3)),
    "pairs of one group, of two, of one tile": ([1, 1, 1, 2, 0], 128, TilePlan(True, 128, 128, cluster=2, stages=2)),
    "pairs, tiles without rows": ([0, -1, -1, -1, -1, 2], 128, TilePlan(True, 128, 192, cluster=2, stages=2)),
    "narrow": ([2, 0, 0, -1, 1, -1], 16, TilePlan(False, 16, 128, stages=3)),
    "nothing to do": ([-1, -1], 8, TilePlan(False, 8, 128, stages=3)),
}


@pytest.mark.parametrize(("tile_group", "tile_m", "plan"), CONTIGUOUS.values(), ids=CONTIGUOUS)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bfloat16"])
def test_contiguous(tile_group, tile_m, plan, fp8):
    rows, n, k = len(tile_group) * tile_m, 200, 208
    if fp8:
        (x, x_scale, x_true), (w, w_scale, w_true) = activation(0, rows, k), weight(1, 5, n, k)
    else:
        (x, x_true), (w, w_true), x_scale, w_scale = bfloat16(0, rows, k), bfloat16(1, 5, n, k), None, None
    out = contiguous(x, x_scale, w, w_scale, tile_group, tile_m, plan)
    for tile, group in enumerate(tile_group):
        at = slice(tile * tile_m, (tile + 1) * tile_m)
        if group < 0:
            assert untouched(out[at])
        else:
            assert calc_diff(out[at], x_true[at] @ w_true[2 + group].T) < 1e-5


HEADS = {
    "columns shared": (5, 3, 136, 80),
    "columns shared, whole tiles": (64, 2, 256, 128),
    "rows shared, two row tiles": (130, 2, 200, 72),
}


@pytest.mark.parametrize(("m", "heads", "n", "k"), HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("transposed", [False, True])
def test_heads(m, heads, n, k, transposed):
    (x, x_true), (w, w_true) = bfloat16(0, m, heads, k), bfloat16(1, 3 * heads, *((k, n) if transposed else (n, k)))
    out = interpret(lambda x, w, layer: dispatch.heads(x, w, layer, transposed, num_sms=NUM_BLOCKS), x, w, jnp.int32(1))
    assert out.shape == (m, heads, n) and out.dtype == jnp.bfloat16
    for head in range(heads):
        weight_true = w_true[heads + head]
        assert calc_diff(out[:, head], x_true[:, head] @ (weight_true if transposed else weight_true.T)) < 1e-5


def test_groups_without_tiles_never_read_their_weights():
    x, x_scale, _ = activation(0, 16, 128)
    w, w_scale, _ = weight(1, 5, 128, 128)
    poisoned = w_scale.at[jnp.array([0, 1, 3, 4])].set(jnp.nan)
    out = contiguous(x, x_scale, w, poisoned, [0, -1], 8, TilePlan(False, 8, 128, stages=2))
    assert not jnp.any(jnp.isnan(out[:8].astype(jnp.float32))) and untouched(out[8:])


@pytest.mark.parametrize(
    ("m", "plan"), [(130, TilePlan(True, 128, 128, stages=3)), (9, TilePlan(False, 16, 128))], ids=["wide", "narrow"]
)
def test_float16(m, plan):
    """A result rounded to bfloat16 would differ by 1e-6."""
    x = jax.random.normal(jax.random.key(0), (m, 208), jnp.float16)
    w = jax.random.normal(jax.random.key(1), (2, 136, 208), jnp.float16)
    out = interpret(lambda x, w: dispatch.dense(x, None, w, None, 1, jnp.float16, plan=plan, num_sms=NUM_BLOCKS), x, w)
    assert out.dtype == jnp.float16
    x_true, w_true = (np.asarray(v, np.float64) for v in (x, w))
    assert calc_diff(out, x_true @ w_true[1].T) < 1e-7
