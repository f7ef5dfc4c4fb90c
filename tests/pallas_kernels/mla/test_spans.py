"""Prefill attention to spans of keys: the reference, and the Mosaic kernel in the interpreter with race detection."""

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
from tests.pallas_kernels.mla.topk_cases import SCALE, UNUSED_KEYS


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 4e-3)])
def test_the_reference(dtype, tolerance) -> None:
    case = cases.spans_case(dtype=dtype)
    attend = jax.jit(functools.partial(mla.mla_prefill_spans, scale=SCALE, backend=Backend.REFERENCE))
    out, lse = attend(**case.arguments)
    np.testing.assert_allclose(np.asarray(out, np.float64), case.expected, atol=tolerance)
    np.testing.assert_array_equal(np.isposinf(lse)[:, 0], np.asarray(case.arguments["ends"]) == 0)


@functools.partial(jax.jit, static_argnames=("key_block", "blocks"))
def kernel(q, k, shared_key, v, starts, ends, key_block=None, blocks=None):
    how = {"key_block": key_block, "blocks": blocks, "interpret": interpret_params()}
    return mosaic_ops.prefill_spans_mosaic(q, k, shared_key, v, starts, ends, scale=SCALE, **how)[0]


@pytest.mark.parametrize(("key_block", "blocks"), [(None, None), (64, 1)])
def test_the_mosaic_kernel(key_block: int | None, blocks: int | None) -> None:
    """Two blocks of queries, the first of two requests with cached tokens; the tile after all spans is never read."""
    case = cases.spans_case(dtype=jnp.bfloat16)
    assert np.isnan(np.asarray(case.arguments["v"], np.float32)[-UNUSED_KEYS:]).all()
    try:
        out = kernel(**case.arguments, key_block=key_block, blocks=blocks)
    finally:
        reset_interpreter()
    np.testing.assert_allclose(np.asarray(out, np.float64), case.expected, atol=4e-3)


def test_mismatched_shapes_are_rejected() -> None:
    case = cases.spans_case(dtype=jnp.float32).arguments
    with pytest.raises(ValueError, match=r"K a multiple of 128 for q \(150, 1, 192\), but are \(100, 1, 128\)"):
        mla.mla_prefill_spans(**case | {"k": case["k"][:100]}, scale=SCALE)
    with pytest.raises(ValueError, match=r"ends must be \[T\] with T = 150, but is \(149,\)"):
        mla.mla_prefill_spans(**case | {"ends": case["ends"][1:]}, scale=SCALE)
