"""The attention and cache kernels in Triton's interpreter, on hostile padding, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.mla import (
    fp8_pages_of_rows,
    mla_decode,
    mla_prefill,
    mla_prefill_context,
    mla_prefill_spans,
    mla_prefill_topk,
    pack_fp8,
    unpack_fp8,
    write_pages,
)
from tests.pallas_kernels.mla import cases, topk_cases

pytestmark = pytest.mark.usefixtures("interpreted")
SCALE = 0.1352338
TRITON = Backend.TRITON


def where(case):
    R = case.q.shape[-1] - 64
    return {"layer": case.layer, "pages_per_layer": case.pages_per_layer, "value_width": R, "backend": TRITON}


def decode(case):
    run = jax.jit(functools.partial(mla_decode, scale=SCALE, **where(case)))
    return run(case.q, case.pages, case.page_table, case.lengths)


def check(case):
    R = case.q.shape[-1] - 64
    cases.assert_close(*decode(case), *cases.decode_oracle(case, SCALE, R), dtype=case.q.dtype)


CASES = {
    "page edges": cases.decode_case((0, 1, 63, 64, 65), H=16, table_width=3, pool=7),
    "ragged, many parts": cases.decode_case((330, 0, 3, 129), H=16, table_width=6),
    "128 heads": cases.decode_case((70,), H=128, table_width=2),
    "3 heads": cases.decode_case((65,), H=3),
    "causal queries": cases.decode_case((2, 129), S=4, H=16),
    "causal queries, odd heads": cases.decode_case((66, 1), S=2, H=20),
    "latents of 256": cases.decode_case((150, 65, 1), S=2, H=20, R=256),
    "float16": cases.decode_case((150, 10), H=16, dtype=jnp.float16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_decode(case):
    check(case)


def test_one_part_per_request_on_a_gpu_of_much_shared_memory():
    with gpus.compiling_for(dataclasses.replace(gpus.by_number(80), multiprocessors=1)):
        check(cases.decode_case((70, 0, 128, 5), H=40, R=256))


def test_fp8_pages():
    """Equals the reference on the same pages, and the unquantized cache within the error of e4m3."""
    case = cases.decode_case((0, 1, 66), S=2, H=16)

    @jax.jit
    def rounded(pages):
        rows = pack_fp8(pages, 512)
        return fp8_pages_of_rows(rows, 512), unpack_fp8(rows, 512, jnp.bfloat16)

    eight, plain = (dataclasses.replace(case, pages=pages) for pages in rounded(case.pages))
    out, lse = decode(eight)
    cases.assert_close(out, lse, *cases.decode_oracle(plain, SCALE, 512), dtype=jnp.bfloat16)
    exact, _ = cases.decode_oracle(case, SCALE, 512)
    assert 1e-5 < cases.cosine_difference(np.asarray(out, np.float64), exact) < 1e-3


@pytest.mark.parametrize(("H", "R", "counts", "contexts"), [(16, 512, (3, 2, 0), (70, 0, 64)), (64, 256, (1,), (65,))])
def test_context_of_new_tokens(H, R, counts, contexts):
    case = cases.decode_case(contexts, H=1, R=R)
    q = np.random.default_rng(1).standard_normal((sum(counts) + 2, H, R + 64)) / 10
    q[sum(counts) :] = np.nan  # padding
    q, ends = jnp.asarray(q, jnp.bfloat16), jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    run = jax.jit(functools.partial(mla_prefill_context, scale=SCALE, **where(case)))
    out, lse = run(q, case.pages, case.page_table, case.lengths, ends)
    cases.assert_close(out, lse, *cases.context_oracle(q, case, counts, SCALE, R), dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("widths", "lengths"),
    [((192, 128), (0, 1, 130, 0, 20)), ((256, 256), (70, 3)), ((128, 128), (0,))],
    ids=str,
)
def test_prefill(widths, lengths):
    T, H, rng = sum(lengths) + 5, 2, np.random.default_rng(0)
    arrays = [rng.standard_normal((T, H, w)) / 10 for w in (widths[0], *widths)]
    for array in arrays:
        array[sum(lengths) :] = np.nan
    q, k, v = (jnp.asarray(array, jnp.bfloat16) for array in arrays)
    ends = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    out, lse = jax.jit(functools.partial(mla_prefill, scale=SCALE, backend=TRITON))(q, k, v, ends)
    cases.assert_close(out, lse, *cases.prefill_oracle(q, k, v, lengths, SCALE), dtype=jnp.bfloat16)


@pytest.mark.parametrize("width", [576, 320, 48])
def test_write(width):
    """Rows are written or dropped, and every other value keeps its bits."""
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.standard_normal((4, 64, width)), jnp.bfloat16)
    rows = jnp.asarray(rng.standard_normal((5, width)), jnp.float32)
    ids, offsets = jnp.array([1, -1, 0, 2, 1]), jnp.array([63, 3, 0, 5, 64])
    write = functools.partial(write_pages, layer=1, pages_per_layer=2, value_width=32)
    ours = jax.jit(lambda pages: write(pages, rows, ids, offsets, backend=TRITON))(pages)
    expected = jax.jit(lambda pages: write(pages, rows, ids, offsets, backend=Backend.REFERENCE))(pages)
    np.testing.assert_array_equal(np.asarray(ours).view(np.uint16), np.asarray(expected).view(np.uint16))


def test_prefill_to_topk_keys():
    case = topk_cases.topk_case(dtype=jnp.bfloat16)
    out = mla_prefill_topk(**case.arguments, scale=topk_cases.SCALE, backend=TRITON)
    np.testing.assert_allclose(np.asarray(out, np.float64), case.expected, atol=4e-3)


def test_prefill_to_spans_of_keys():
    case = topk_cases.spans_case(dtype=jnp.bfloat16)
    out, _ = mla_prefill_spans(**case.arguments, scale=topk_cases.SCALE, backend=TRITON)
    np.testing.assert_allclose(np.asarray(out, np.float64), case.expected, atol=4e-3)
