"""The product and quantization kernels in Triton's interpreter: edges in all dimensions, empty groups, parts of K."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.dense import head_gemm, layer_gemm
from pallas_kernels.fp8 import fp8_gemm, quantize_1x128, swiglu_quantize
from pallas_kernels.grouped import (
    fp4_grouped_gemm_contiguous,
    fp8_grouped_gemm_contiguous,
    grouped_gemm_contiguous,
    int4_grouped_gemm_contiguous,
)
from pallas_kernels.int4 import interleave
from tests.pallas_kernels import fp4_weights, int4_weights
from tests.pallas_kernels.gemm.interpreted import bfloat16, untouched
from tests.pallas_kernels.numerics import activation, calc_diff, weight

pytestmark = pytest.mark.usefixtures("interpreted")
TRITON, REFERENCE = Backend.TRITON, Backend.REFERENCE
BYTES, NATIVE = 86, 89
"""A GPU without FP8 tensor cores, and one with them."""


@pytest.fixture(params=[BYTES, NATIVE])
def gpu(request):
    with gpus.compiling_for(gpus.by_number(request.param)) as kind:
        yield kind


@pytest.mark.parametrize(
    ("m", "n", "k", "out_dtype"),
    [(130, 136, 256, jnp.bfloat16), (5, 136, 400, jnp.bfloat16), (17, 72, 1040, jnp.float32)],
)
def test_dense_fp8(gpu, m, n, k, out_dtype):
    (a, a_scale, a_true), (b, b_scale, b_true) = activation(0, m, k), weight(1, 3, n, k)
    out = fp8_gemm(a, a_scale, b, b_scale, layer=jnp.int32(1), out_dtype=out_dtype, backend=TRITON)
    assert out.shape == (m, n) and out.dtype == out_dtype
    assert calc_diff(out, a_true @ b_true[1].T) < (1e-12 if out_dtype == jnp.float32 else 1e-5)


@pytest.mark.parametrize(("m", "n", "k"), [(130, 136, 80), (33, 72, 1104), (1, 136, 64)], ids=str)
def test_dense_bfloat16(m, n, k):
    """Computes a router's product: split K, a float32 result that is not rounded to bfloat16."""
    (x, x_true), (w, w_true) = bfloat16(0, m, k), bfloat16(1, 3, n, k)
    out = layer_gemm(x, w, 2, out_dtype=jnp.float32, backend=TRITON)
    assert calc_diff(out, x_true @ w_true[2].T) < 1e-12
    rounded = layer_gemm(x, w, 2, backend=TRITON)
    assert rounded.dtype == jnp.bfloat16 and calc_diff(rounded, x_true @ w_true[2].T) < 1e-5


def test_float16():
    """A result rounded to bfloat16 would differ by 1e-6."""
    x = jax.random.normal(jax.random.key(0), (9, 208), jnp.float16)
    w = jax.random.normal(jax.random.key(1), (2, 136, 208), jnp.float16)
    out = layer_gemm(x, w, 1, backend=TRITON)
    assert out.dtype == jnp.float16
    assert calc_diff(out, np.asarray(x, np.float64) @ np.asarray(w, np.float64)[1].T) < 1e-7


GROUPS = {
    "tiles of 8, fewer rows than a product has": ([2, 0, 0, -1, 1, -1], 8),
    "a tile of 48, no power of two": ([1], 48),
    "nothing to do": ([-1, -1, -1], 16),
}


@pytest.mark.parametrize(("tile_group", "tile_m"), GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bfloat16"])
def test_contiguous(tile_group, tile_m, fp8):
    """Groups without tiles hold NaN: their weights are never read, and rows without a group never written."""
    rows, n, k = len(tile_group) * tile_m, 136, 208
    idle = jnp.array([2 + group not in [2 + g for g in tile_group if g >= 0] for group in range(-2, 3)])
    groups, place = jnp.array(tile_group), {"tile_m": tile_m, "group_offset": jnp.int32(2), "backend": TRITON}
    if fp8:
        (x, x_scale, x_true), (w, w_scale, w_true) = activation(0, rows, k), weight(1, 5, n, k)
        w_scale = jnp.where(idle[:, None, None], jnp.nan, w_scale)
        out = fp8_grouped_gemm_contiguous(x, x_scale, w, w_scale, groups, **place)
    else:
        (x, x_true), (w, w_true) = bfloat16(0, rows, k), bfloat16(1, 5, n, k)
        out = grouped_gemm_contiguous(x, jnp.where(idle[:, None, None], jnp.nan, w), groups, **place)
    for tile, group in enumerate(tile_group):
        at = slice(tile * tile_m, (tile + 1) * tile_m)
        assert untouched(out[at]) if group < 0 else calc_diff(out[at], x_true[at] @ w_true[2 + group].T) < 1e-5


@pytest.mark.parametrize(("tile_group", "tile_m"), GROUPS.values(), ids=GROUPS)
def test_int4(tile_group, tile_m):
    """Every code, against float64; scales of idle groups are NaN, and never read."""
    rows, n, k = len(tile_group) * tile_m, 72, 512
    (x, x_true), (codes, scale) = bfloat16(0, rows, k), int4_weights.random_weight(1, 5, n, k)
    true = int4_weights.real(codes, scale)
    scale[[group for group in range(5) if group - 2 not in tile_group]] = np.nan
    words, place = interleave(int4_weights.pack(codes)), {"tile_m": tile_m, "group_offset": jnp.int32(2)}
    scales = jnp.asarray(scale).swapaxes(1, 2)
    out = int4_grouped_gemm_contiguous(x, words, scales, jnp.array(tile_group), **place, backend=TRITON)
    for tile, group in enumerate(tile_group):
        at = slice(tile * tile_m, (tile + 1) * tile_m)
        assert untouched(out[at]) if group < 0 else calc_diff(out[at], x_true[at] @ true[2 + group].T) < 1e-5


@pytest.mark.parametrize(("tile_group", "tile_m"), GROUPS.values(), ids=GROUPS)
def test_fp4(gpu, tile_group, tile_m):
    """Every code at every place, against float64; scales of idle groups are NaN, and never read."""
    rows, n, k = len(tile_group) * tile_m, 136, 256
    (x, x_scale, x_true), (codes, places, scale) = activation(0, rows, k), fp4_weights.random_weight(1, 5, n, k)
    true = fp4_weights.real(codes, places, scale)
    scale[[group for group in range(5) if group - 2 not in tile_group]] = np.nan
    weight = fp4_weights.words(codes), fp4_weights.powers(places), scale
    place = {"tile_m": tile_m, "group_offset": jnp.int32(2), "backend": TRITON}
    out = fp4_grouped_gemm_contiguous(x, x_scale, *weight, jnp.array(tile_group), **place)
    for tile, group in enumerate(tile_group):
        at = slice(tile * tile_m, (tile + 1) * tile_m)
        assert untouched(out[at]) if group < 0 else calc_diff(out[at], x_true[at] @ true[2 + group].T) < 1e-5


@pytest.mark.parametrize(
    ("m", "heads", "n", "k", "transposed"), [(5, 3, 136, 80, False), (130, 2, 72, 72, True)], ids=str
)
def test_heads(m, heads, n, k, transposed):
    (x, x_true), (w, w_true) = bfloat16(0, m, heads, k), bfloat16(1, 3, heads, *((k, n) if transposed else (n, k)))
    out = head_gemm(x, w, jnp.int32(1), transposed=transposed, backend=TRITON)
    assert out.shape == (m, heads, n) and out.dtype == jnp.bfloat16
    expected = np.einsum("mhk,hkn->mhn" if transposed else "mhk,hnk->mhn", x_true, w_true[1])
    assert calc_diff(out, expected) < 1e-5


@pytest.mark.parametrize(
    ("number", "quantize", "ue8m0"),
    [
        (BYTES, quantize_1x128, False),
        (NATIVE, quantize_1x128, True),
        (BYTES, swiglu_quantize, True),
        (NATIVE, functools.partial(swiglu_quantize, limit=0.3), False),
    ],
)
def test_quantization_equals_the_reference(number, quantize, ue8m0):
    """Zeros, values at the limit of e4m3, and magnitudes down to its subnormal numbers."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 19, 288)) * 2.0 ** rng.integers(-12, 2, (2, 19, 288))
    values[0, 3], values[1, 5, :128] = 0, 448
    x = jnp.asarray(values, jnp.bfloat16)
    with gpus.compiling_for(gpus.by_number(number)):
        q, scale = jax.jit(functools.partial(quantize, ue8m0=ue8m0, backend=TRITON))(x)
    q_expected, scale_expected = jax.jit(functools.partial(quantize, ue8m0=ue8m0, backend=REFERENCE))(x)
    assert q.shape == q_expected.shape and q.dtype == q_expected.dtype and scale.shape == scale_expected.shape
    np.testing.assert_allclose(scale, scale_expected, rtol=1e-6)
    assert jnp.mean(q != q_expected) < (1e-3 if quantize is quantize_1x128 else 1e-2)  # exp may round differently


@pytest.mark.parametrize("used", [0, 17])
def test_rows_past_the_used_ones_are_skipped(used):
    x = jax.random.normal(jax.random.key(1), (40, 256), jnp.bfloat16)
    q, scale = swiglu_quantize(x, used_rows=jnp.int32(used), backend=TRITON)
    _, expected = swiglu_quantize(x, used_rows=jnp.int32(used), backend=REFERENCE)
    np.testing.assert_allclose(scale[:, :used], expected[:, :used], rtol=1e-6)
    assert untouched(scale[:, -(-used // 16) * 16 :]) and untouched(q[-(-used // 16) * 16 :])


def test_float32_has_no_kernel_and_says_what_to_use():
    with pytest.raises(ValueError, match=r"the Triton kernel takes bfloat16 or float16, got float32; use Backend.REFE"):
        layer_gemm(jnp.zeros((2, 16)), jnp.zeros((1, 8, 16)), 0, backend=TRITON)
