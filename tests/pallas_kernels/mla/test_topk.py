"""Prefill attention to top-k keys: the reference, and the Mosaic kernel in the interpreter with race detection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla
from pallas_kernels.backend import Backend
from pallas_kernels.mla import mosaic_ops
from pallas_kernels.mosaic import interpret_params, reset_interpreter
from tests.pallas_kernels.mla import topk_cases as cases
from tests.pallas_kernels.mla.topk_cases import SCALE


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 4e-3)])
def test_the_reference_attends_to_the_keys_of_the_bitmask(dtype, tolerance) -> None:
    case = cases.topk_case(dtype=dtype)
    attend = jax.jit(functools.partial(mla.mla_prefill_topk, scale=SCALE, backend=Backend.REFERENCE))
    out = attend(**case.arguments)
    np.testing.assert_allclose(np.asarray(out, np.float64), case.expected, atol=tolerance)


@functools.partial(jax.jit, static_argnames=("key_block", "blocks"))
def kernel(q, k, shared_key, v, bits, starts, ends, key_block=None, blocks=None):
    how = {"key_block": key_block, "blocks": blocks, "interpret": interpret_params()}
    return mosaic_ops.prefill_spans_mosaic(q, k, shared_key, v, starts, ends, bits, scale=SCALE, **how)[0]


@pytest.mark.parametrize(("key_block", "blocks"), [(None, None), (64, 1)])
def test_the_mosaic_kernel(key_block: int | None, blocks: int | None) -> None:
    """Two blocks of queries, the first of two requests; one thread block for both, or one each."""
    case = cases.topk_case(dtype=jnp.bfloat16)
    try:
        out = kernel(**case.arguments, key_block=key_block, blocks=blocks)
    finally:
        reset_interpreter()
    np.testing.assert_allclose(np.asarray(out, np.float64), case.expected, atol=4e-3)


def test_every_key_has_its_own_bit() -> None:
    keys = jnp.array([[0, 31, 32, 127], [5, 64, 300, -1]], jnp.int32)
    bits = np.asarray(mla.topk_bitmask(keys, jnp.array([[True, True, True, True], [True, False, True, True]]), 128))
    found = [[k for k in range(128) if bits[k // 32, row] >> (k % 32) & 1] for row in range(2)]
    assert found == [[0, 31, 32, 127], [5]]


def test_gathered_rows_of_fp8_pages_are_zero_where_unwritten() -> None:
    @jax.jit
    def both(latents):
        packed = mla.pack_fp8(latents, 32)
        pages = mla.fp8_pages_of_rows(packed.reshape(2, 64, -1), 32)
        rows = mla.gather_latents(pages, jnp.array([1, 0]), jnp.array([64, 10]), 32, jnp.float32)
        return rows, mla.unpack_fp8(packed, 32, jnp.float32)

    rows, wanted = both(np.random.default_rng(0).standard_normal((2 * 64, 48)).astype(np.float32))
    np.testing.assert_array_equal(rows, np.concatenate([wanted[64:], wanted[:10], np.zeros((54, 48))]))


def test_mismatched_shapes_are_rejected() -> None:
    case = cases.topk_case(dtype=jnp.float32).arguments
    with pytest.raises(ValueError, match=r"K a multiple of 128 for q \(150, 1, 192\), but are \(100, 1, 128\)"):
        mla.mla_prefill_topk(**case | {"k": case["k"][:100]}, scale=SCALE)
    with pytest.raises(ValueError, match=r"bits must be int32 \(12, 150\), but are int32\[12, 149\]"):
        mla.mla_prefill_topk(**case | {"bits": case["bits"][:, 1:]}, scale=SCALE)
