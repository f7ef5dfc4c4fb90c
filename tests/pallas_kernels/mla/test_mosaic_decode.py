"""The decode kernel in the Mosaic interpreter, with race detection, on hostile padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla import fp8_pages_of_rows, mosaic_ops, pack_fp8, unpack_fp8
from pallas_kernels.mosaic import interpret_params, reset_interpreter
from tests.pallas_kernels.mla import cases

SCALE = 0.1352338


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    reset_interpreter()


@functools.partial(jax.jit, static_argnames=("pages_per_layer", "multiprocessors"))
def _decode(q, pages, page_table, lengths, layer, *, pages_per_layer, multiprocessors):
    return mosaic_ops.decode_mosaic(
        q,
        pages,
        page_table,
        lengths,
        scale=SCALE,
        first_page=layer * pages_per_layer,
        multiprocessors=multiprocessors,
        interpret=interpret_params(),
    )


def decode(case, multiprocessors=3):
    return _decode(
        case.q,
        case.pages,
        case.page_table,
        case.lengths,
        jnp.int32(case.layer),
        pages_per_layer=case.pages_per_layer,
        multiprocessors=multiprocessors,
    )


@functools.partial(jax.jit, static_argnames="first_page")
def _context(q, pages, page_table, lengths, cu_lengths, *, first_page):
    how = {"scale": SCALE, "first_page": first_page, "multiprocessors": 3, "interpret": interpret_params()}
    return mosaic_ops.context_mosaic(q, pages, page_table, lengths, cu_lengths, **how)


def check(case):
    out, lse = decode(case)
    R = case.q.shape[-1] - 64
    cases.assert_close(out, lse, *cases.decode_oracle(case, SCALE, R), dtype=case.q.dtype)


_schedule = jax.jit(mosaic_ops.decode_schedule, static_argnames=("queries", "heads", "multiprocessors"))


def splits(case, multiprocessors=3):
    _, S, H, _ = case.q.shape
    schedule = _schedule(case.lengths, queries=S, heads=H, multiprocessors=multiprocessors)
    return int((np.asarray(schedule.cuts)[1:-1, 1] > 0).sum())


@pytest.mark.parametrize(
    "lengths",
    [(0, 1, 63, 64, 65), (0, 0, 0, 0, 0), (200, 0, 3, 129, 128), (700, 0, 20, 3, 0), (40, 0, 640, 1, 64)],
    ids=str,
)
def test_lengths(lengths):
    case = cases.decode_case(lengths, H=16, table_width=11, pool=16)
    assert splits(case) == 0 or sum(lengths) > 700
    check(case)


@pytest.mark.parametrize("H", [1, 127])
def test_heads(H):
    """Less than a tile of 64 rows, and a full tile plus a partial one; below, two full ones."""
    check(cases.decode_case((130, 40), H=H))


def test_query_tokens_are_causal_among_themselves():
    check(cases.decode_case((2, 65, 129), S=4, H=40))


@pytest.mark.parametrize(("lengths", "split"), [((2, 65, 129), False), ((450, 65, 1), True)])
def test_causal_queries_of_whole_and_split_requests(lengths, split):
    case = cases.decode_case(lengths, S=2, H=16, table_width=8, pool=12)
    assert bool(splits(case)) == split
    check(case)


def test_latents_of_256():
    case = cases.decode_case((450, 65, 1), S=2, H=20, R=256)
    assert splits(case)
    check(case)


def test_float16():
    check(cases.decode_case((150, 10), H=16, dtype=jnp.float16))


@jax.jit
def _packed(pages):
    """Returns FP8 rows, and their pages."""
    packed = pack_fp8(pages, 512)
    return unpack_fp8(packed, 512, jnp.bfloat16), fp8_pages_of_rows(packed, 512)


def test_fp8_cache():
    """Equals the reference on the same pages, and the unquantized cache within the error of e4m3.

    Tiles of a row span the range of float16; queries beyond it give a finite result.
    """
    case = cases.decode_case((450, 64, 1, 0), S=2, H=16)
    assert splits(case)
    factors = jnp.repeat(2.0 ** jnp.asarray([-8, 6, 0, 0, 0]), 128)[:576]
    case = dataclasses.replace(
        case, q=(case.q / factors).astype(case.q.dtype), pages=(case.pages * factors).astype(case.pages.dtype)
    )
    rows, pages = _packed(case.pages)
    eight = dataclasses.replace(case, pages=pages)
    out, lse = decode(eight)
    plain = dataclasses.replace(case, pages=rows)
    cases.assert_close(out, lse, *cases.decode_oracle(plain, SCALE, 512), dtype=jnp.bfloat16)
    exact, _ = cases.decode_oracle(case, SCALE, 512)
    assert 1e-5 < cases.cosine_difference(np.asarray(out, np.float64), exact) < 1e-3
    huge = dataclasses.replace(eight, q=eight.q.at[0, 0, :, 300].set(jnp.asarray([1e6, -1e30] * 8, jnp.bfloat16)))
    assert np.all(np.isfinite(np.asarray(decode(huge)[0], np.float32)))


@pytest.mark.parametrize(("H", "R", "is_cached"), [(16, 512, 1), (128, 512, 1), (16, 512, 0)])
def test_context_of_new_tokens(H, R, is_cached):
    """The kernel also runs if no request has context. `test_latents_of_256` has the other width."""
    counts, contexts = ((1, 2), (70, 0)) if H == 128 else ((5, 2, 0), (70, 0, 64))
    case = cases.decode_case(contexts, H=1, R=R)
    case = dataclasses.replace(case, lengths=is_cached * case.lengths)
    T = sum(counts) + 2
    q = np.random.default_rng(1).standard_normal((T, H, R + 64)) / 10
    q[sum(counts) :] = np.nan
    q = jnp.asarray(q.astype(jnp.bfloat16))
    cu_lengths = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    first_page = case.layer * case.pages_per_layer
    out, lse = _context(q, case.pages, case.page_table, case.lengths, cu_lengths, first_page=first_page)
    cases.assert_close(out, lse, *cases.context_oracle(q, case, counts, SCALE, R), dtype=jnp.bfloat16)
