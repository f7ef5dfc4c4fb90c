"""The C++ attention of decode and prefill: against a float64 oracle, with NaN where it must not read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.backend import Backend
from pallas_kernels.mla import mla_decode, mla_prefill, mla_prefill_context
from tests.pallas_kernels.mla import cases

pytestmark = pytest.mark.skipif(not native.library().targets, reason=native.library().reason)
SCALE = 0.1352338


def decode(case, value_width, backend=Backend.NATIVE):
    run = functools.partial(mla_decode, scale=SCALE, pages_per_layer=case.pages_per_layer, value_width=value_width)
    return run(case.q, case.pages, case.page_table, case.lengths, layer=jnp.int32(case.layer), backend=backend)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("S", "H", "R"), [(1, 1, 32), (2, 3, 128), (4, 16, 72)])
def test_lengths_at_edges_of_pages(dtype, S, H, R):
    case = cases.decode_case((0, 1, 63, 64, 65, 300), S=S, H=H, R=R, P=16, dtype=dtype, table_width=9)
    out, lse = decode(case, R)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    cases.assert_close(out, lse, *cases.decode_oracle(case, SCALE, R), dtype=dtype)


def test_scores_far_apart():
    """The running maximum changes by more than the range of float32's exponent."""
    case = cases.decode_case((200,), H=2, R=64, P=16, dtype=jnp.float32)
    far = case.q.at[:, :, 0].multiply(4000).at[:, :, 1].multiply(-4000)
    out, lse = decode(dataclasses.replace(case, q=far), 64)
    cases.assert_close(out, lse, *cases.decode_oracle(dataclasses.replace(case, q=far), SCALE, 64), dtype=jnp.float32)


def test_a_request_has_the_same_bits_beside_others():
    case = cases.decode_case((130, 7, 64), S=2, H=5, R=64, P=16, dtype=jnp.float32)
    together, _ = decode(case, 64)
    for b in range(3):
        alone = jax.tree.map(lambda a, b=b: a[b : b + 1], (case.q, case.page_table, case.lengths))
        q, page_table, lengths = alone
        out, _ = decode(dataclasses.replace(case, q=q, page_table=page_table, lengths=lengths), 64)
        np.testing.assert_array_equal(out[0], together[b])


def test_pages_of_another_type_use_xla():
    case = cases.decode_case((70,), H=2, R=32, P=16, dtype=jnp.float32)
    mixed = dataclasses.replace(case, pages=case.pages.astype(jnp.bfloat16))
    ours, theirs = (decode(mixed, 32, backend)[0] for backend in (Backend.NATIVE, Backend.REFERENCE))
    np.testing.assert_array_equal(ours, theirs)


def ends_of(counts):
    return jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("H", "widths", "counts"), [(1, (8, 1, 7), (1,)), (3, (24, 8, 33), (0, 5, 130, 1)), (16, (128, 64, 128), (64, 3))]
)
def test_new_tokens_see_those_before_them_in_their_chunk(dtype, H, widths, counts):
    """Padding is NaN; keys have a shared part, or none."""
    T, rng = sum(counts) + 3, np.random.default_rng(0)
    N, P, V = widths
    shapes = *((T, H, width) for width in (N + P, N, V)), (T, P)
    q, k, v, shared = (rng.standard_normal(shape) / 10 for shape in shapes)
    for array in (q, k, v, shared):
        array[sum(counts) :] = np.nan
    whole = np.concatenate([k, np.broadcast_to(shared[:, None], (T, H, P))], axis=-1)
    q, k, v, shared, whole = (jnp.asarray(array, dtype) for array in (q, k, v, shared, whole))
    expected = cases.prefill_oracle(q, whole, v, counts, SCALE)
    for keys in ({"k": k, "shared_key": shared}, {"k": whole}):
        run = jax.jit(functools.partial(mla_prefill, scale=SCALE, backend=Backend.NATIVE))
        out, lse = run(q, v=v, cu_lengths=ends_of(counts), **keys)
        assert out.dtype == dtype
        cases.assert_close(out, lse, *expected, dtype=dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("H", "R", "counts", "contexts"),
    [(1, 32, (2,), (1,)), (5, 72, (3, 20, 0, 2), (130, 64, 9, 0)), (16, 128, (1,), (65,))],
)
def test_new_tokens_see_the_cached_ones_of_their_request(dtype, H, R, counts, contexts):
    case = cases.decode_case(contexts, H=1, R=R, P=16, dtype=dtype, table_width=4)
    q = np.random.default_rng(1).standard_normal((sum(counts) + 2, H, R + 16)) / 10
    q[sum(counts) :] = np.nan  # padding
    q = jnp.asarray(q, dtype)
    where = {"layer": case.layer, "pages_per_layer": case.pages_per_layer, "value_width": R, "backend": Backend.NATIVE}
    run = jax.jit(functools.partial(mla_prefill_context, scale=SCALE, **where))
    out, lse = run(q, case.pages, case.page_table, case.lengths, ends_of(counts))
    cases.assert_close(out, lse, *cases.context_oracle(q, case, counts, SCALE, R), dtype=dtype)
