"""The prefill kernel in the Mosaic interpreter, with race detection."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla import mosaic_ops
from pallas_kernels.mosaic import interpret_params, reset_interpreter
from tests.pallas_kernels.mla import cases

SCALE = 0.1352338


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    reset_interpreter()


@functools.partial(jax.jit, static_argnames=("key_block", "stages", "blocks"))
def prefill(q, k, v, cu_lengths, shared_key=None, key_block=64, stages=2, blocks=None):
    how = {"key_block": key_block, "stages": stages, "blocks": blocks, "interpret": interpret_params()}
    return mosaic_ops.prefill_mosaic(q, k, v, cu_lengths, shared_key, scale=SCALE, **how)


def check(lengths, T, *, H=1, dtype=jnp.bfloat16, widths=(192, 128), shared=0, **kwargs):
    """Compares with the reference; the last `shared` columns of keys are shared by all heads, and a separate array."""
    rng = np.random.default_rng(0)
    q, k, v = (np.clip(rng.standard_normal((T, H, w)) / 3, -1, 1) for w in (widths[0], *widths))
    for x in (q, k, v):
        x[sum(lengths) :] = np.nan
    own = widths[0] - shared
    k[:, :, own:] = k[:, :1, own:]
    q, k, v = (jnp.asarray(x.astype(dtype)) for x in (q, k, v))
    cu_lengths = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    shared_key = k[:, 0, own:] if shared else None
    out, lse = prefill(q, k[:, :, :own], v, cu_lengths, shared_key, **kwargs)
    expected_out, expected_lse = cases.prefill_oracle(q, k, v, lengths, SCALE)
    np.testing.assert_array_equal(np.isinf(lse), np.isinf(expected_lse))
    finite = np.isfinite(expected_lse)
    np.testing.assert_allclose(np.asarray(lse)[finite], expected_lse[finite], atol=1e-5, rtol=1e-5)
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(out, expected_out, atol=2e-3, rtol=2.01 / 128)
    assert cases.cosine_difference(out, expected_out) < 1e-5
    assert not out[sum(lengths) :].any()


@pytest.mark.parametrize("lengths", [(256, 0, 0), (1, 130, 61), (127, 1, 128), (0, 0, 5), (0, 0, 0)], ids=str)
def test_segments(lengths):
    """Keys in two parts, as in the model."""
    check(lengths, 256, shared=64)


@pytest.mark.parametrize("shared", [0, 64])
def test_two_heads_and_a_length_that_fills_no_block(shared):
    check((70, 60), 150, H=2, dtype=jnp.float16, shared=shared)


def test_heads_of_256():
    check((70, 60), 150, widths=(256, 256), key_block=None)


@pytest.mark.parametrize(("lengths", "blocks"), [((1, 130, 61), 3), ((70, 5), 1)], ids=str)
def test_blocks_with_several_items(lengths, blocks):
    """Four items of two heads: the third block has one, and two of a block's items have no tokens."""
    check(lengths, 256, H=2, blocks=blocks)


@pytest.mark.parametrize(("key_block", "stages"), [(128, 2), (64, 4)])
def test_tuned_tiles(key_block, stages):
    check((200, 40), 256, key_block=key_block, stages=stages)
