"""The public operations on the Mosaic backend: the reference's results, errors before any kernel is traced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.align import align_groups
from pallas_kernels.backend import Backend
from pallas_kernels.dense import head_gemm, layer_gemm
from pallas_kernels.fp8 import fp8_gemm, swiglu_quantize
from pallas_kernels.gemm.plan import plan_dense
from pallas_kernels.grouped import fp8_grouped_gemm_contiguous, grouped_gemm_contiguous
from tests.pallas_kernels.gemm.interpreted import bfloat16, interpret
from tests.pallas_kernels.numerics import activation, calc_diff, weight

MOSAIC, REFERENCE = Backend.MOSAIC, Backend.REFERENCE


def test_dense_of_a_stack_with_rows_that_tma_cannot_stride():
    a, a_scale, _ = activation(0, 3, 128)  # three rows of scales are 12 bytes
    b, b_scale, _ = weight(1, 2, 136, 128)

    def run(backend):
        return lambda layer: fp8_gemm(a, a_scale, b, b_scale, layer=layer, backend=backend)

    assert calc_diff(interpret(run(MOSAIC), 1), jax.jit(run(REFERENCE))(1)) < 1e-5


def test_experts_from_routing_to_combined_rows():
    ids = jnp.array([1, 0, 1, -1, 1])
    x, x_scale, _ = activation(0, 5, 128)
    up, down = weight(1, 4, 256, 128), weight(2, 4, 128, 128)

    def experts(backend):
        def run(offset):
            aligned = align_groups(ids, 2, 8)
            q, scale = (
                x.at[aligned.source_row].get(mode="fill", fill_value=0),
                x_scale.at[:, aligned.source_row].get(mode="fill", fill_value=0),
            )
            place = {"tile_m": 8, "group_offset": offset, "backend": backend}
            gate_up = fp8_grouped_gemm_contiguous(q, scale, *up[:2], aligned.tile_group, **place)
            q, scale = swiglu_quantize(gate_up, used_rows=aligned.needed, backend=backend)
            y = fp8_grouped_gemm_contiguous(q, scale, *down[:2], aligned.tile_group, **place)
            return y.at[aligned.aligned_row].get(mode="fill", fill_value=0)

        return run

    ours = interpret(experts(MOSAIC), 2)
    assert not jnp.any(ours[3])
    assert calc_diff(ours, jax.jit(experts(REFERENCE))(2)) < 1e-4


@pytest.mark.parametrize("rows", [5, 130])
def test_a_plain_stack(rows):
    (x, x_true), (w, w_true) = bfloat16(0, rows, 80), bfloat16(1, 3, 136, 80)
    out = interpret(lambda layer: layer_gemm(x, w, layer, backend=MOSAIC), 2)
    assert out.dtype == jnp.bfloat16
    assert calc_diff(out, x_true @ w_true[2].T) < 1e-5
    assert calc_diff(jax.jit(layer_gemm)(x, w, 2), x_true @ w_true[2].T) < 1e-5


def test_a_plain_stack_with_a_float32_result():
    """A router's product: split K, a result that is not rounded to bfloat16."""
    (x, x_true), (w, w_true) = bfloat16(0, 33, 592), bfloat16(1, 3, 136, 592)
    assert plan_dense(33, 136, 592, 2, float32=True).splits > 1
    out = interpret(lambda layer: layer_gemm(x, w, layer, out_dtype=F32, backend=MOSAIC), 2)
    assert out.dtype == F32
    assert calc_diff(out, x_true @ w_true[2].T) < 1e-12
    reference = jax.jit(functools.partial(layer_gemm, out_dtype=F32))(x, w, 2)
    assert calc_diff(reference, x_true @ w_true[2].T) < 1e-12


@pytest.mark.parametrize(("transposed", "carried"), [(False, 0), (True, 16)])
def test_heads_of_a_stack(transposed, carried):
    """Carried columns are appended to the product, unchanged."""
    (x, x_true), (w, w_true) = bfloat16(0, 9, 2, 64 + carried), bfloat16(1, 3, 2, 64, 64)
    product = np.einsum("mhk,hkn->mhn" if transposed else "mhk,hnk->mhn", x_true[..., :64], w_true[2])
    how = dict(transposed=transposed, carried=carried)
    out = interpret(lambda layer: head_gemm(x, w, layer, backend=MOSAIC, **how), 2)
    reference = jax.jit(functools.partial(head_gemm, **how))(x, w, 2)
    for result in (out, reference):
        assert result.dtype == jnp.bfloat16 and result.shape == (9, 2, 64 + carried)
        assert calc_diff(result[..., :64], product) < 1e-5
        np.testing.assert_array_equal(result[..., 64:], x[..., 64:])


def test_gradients_of_a_plain_stack():
    x, w = (np.random.default_rng(0).standard_normal(shape, np.float32) for shape in ((3, 16), (2, 8, 16)))
    dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(layer_gemm(x, w, jnp.int32(1)) ** 2), (0, 1)))(x, w)
    dx_dense, dw_dense = jax.jit(jax.grad(lambda x, w: jnp.sum((x @ w[1].T) ** 2), (0, 1)))(x, w)
    np.testing.assert_allclose(dx, dx_dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, dw_dense, rtol=1e-4, atol=1e-5)

    (x, _), (w, _) = bfloat16(0, 8, 64), bfloat16(1, 2, 64, 64)

    def gradients(backend):
        return jax.grad(lambda x, w: jnp.sum(layer_gemm(x, w, 1, out_dtype=F32, backend=backend)), (0, 1))(x, w)

    for ours, theirs in zip(interpret(lambda: gradients(MOSAIC)), jax.jit(lambda: gradients(REFERENCE))(), strict=True):
        assert calc_diff(ours, theirs) < 1e-5


E4M3, F32, BF16 = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16


def zeros(dtype, *shape):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fp8_gemm(
                zeros(E4M3, 8, 128), zeros(F32, 1, 8), zeros(E4M3, 130, 128), zeros(F32, 2, 1), backend=MOSAIC
            ),
            "N=130",
        ),
        (
            lambda: fp8_gemm(
                zeros(E4M3, 8, 120), zeros(F32, 1, 8), zeros(E4M3, 128, 120), zeros(F32, 1, 1), backend=MOSAIC
            ),
            "K=120",
        ),
        (
            lambda: grouped_gemm_contiguous(
                zeros(BF16, 8, 64), zeros(BF16, 2, 64, 64), jnp.zeros(2, jnp.int32), tile_m=4, backend=MOSAIC
            ),
            "tile_m=4",
        ),
        (
            lambda: grouped_gemm_contiguous(
                zeros(F32, 16, 64), zeros(F32, 2, 64, 64), jnp.zeros(2, jnp.int32), tile_m=8, backend=MOSAIC
            ),
            "float32",
        ),
        (lambda: layer_gemm(zeros(BF16, 8, 64), zeros(BF16, 3, 64, 64), 0, out_dtype=E4M3), "float8"),
        (lambda: head_gemm(zeros(BF16, 8, 2, 64), zeros(BF16, 3, 2, 64, 128), 0), "needs x"),
        (lambda: head_gemm(zeros(BF16, 8, 2, 64), zeros(F32, 3, 2, 64, 64), 0), "of one dtype"),
        (lambda: head_gemm(zeros(BF16, 8, 2, 64), zeros(BF16, 3, 2, 60, 64), 0, backend=MOSAIC), "N=60"),
        (
            lambda: fp8_grouped_gemm_contiguous(
                zeros(E4M3, 16, 128),
                zeros(F32, 1, 16),
                zeros(E4M3, 2, 128, 128),
                zeros(F32, 2, 1, 1),
                jnp.zeros(2, jnp.int32),
                tile_m=8,
                out_dtype=F32,
                backend=MOSAIC,
            ),
            "out_dtype float32",
        ),
    ],
    ids=["N", "K", "tile_m", "dtype", "stack's out_dtype", "heads' K", "heads' dtype", "heads' N", "out_dtype"],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
