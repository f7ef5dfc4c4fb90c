"""The jax.numpy paths against a float64 oracle, and the checks of bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backend
from pallas_kernels.mla import (
    fp8_pages_of_rows,
    fp8_row_bytes,
    merge_attention,
    mla_decode,
    mla_prefill,
    mla_prefill_context,
    pack_fp8,
    unpack_fp8,
    write_pages,
)
from tests.pallas_kernels.mla import cases

REFERENCE = Backend.REFERENCE
SCALE = 0.1352338
EDGE_LENGTHS = (0, 1, 63, 64, 65, 300)


_pack, _pages_of_rows = (jax.jit(function, static_argnums=1) for function in (pack_fp8, fp8_pages_of_rows))
_unpack = jax.jit(unpack_fp8, static_argnums=(1, 2))
_merge = jax.jit(merge_attention)


def decode(case, value_width, **kwargs):
    run = functools.partial(
        mla_decode,
        scale=SCALE,
        pages_per_layer=case.pages_per_layer,
        value_width=value_width,
        backend=REFERENCE,
        **kwargs,
    )
    layer = jnp.int32(case.layer)
    return jax.jit(lambda c_layer: run(case.q, case.pages, case.page_table, case.lengths, layer=c_layer))(layer)


@pytest.mark.parametrize(
    ("S", "H", "dtype"),
    [(1, 1, jnp.float32), (2, 3, jnp.float32), (4, 16, jnp.float32), (1, 16, jnp.bfloat16), (2, 3, jnp.float16)],
)
def test_decode_edge_lengths(S, H, dtype):
    case = cases.decode_case(EDGE_LENGTHS, S=S, H=H, R=32, P=16, dtype=dtype, table_width=9)
    out, lse = decode(case, 32)
    cases.assert_close(out, lse, *cases.decode_oracle(case, SCALE, 32), dtype=dtype)


def test_decode_real_widths_and_every_row_empty():
    case = cases.decode_case((70, 5), H=16)
    out, lse = decode(case, 512)
    cases.assert_close(out, lse, *cases.decode_oracle(case, SCALE, 512), dtype=jnp.bfloat16)
    empty = cases.decode_case((0, 0), H=2)
    out, lse = decode(empty, 512)
    assert not np.asarray(out, np.float32).any()
    assert np.isposinf(lse).all()


_prefill = jax.jit(functools.partial(mla_prefill, scale=SCALE, backend=REFERENCE))


@pytest.mark.parametrize(("T", "lengths"), [(12, (5,)), (400, (1, 127, 128, 129)), (400, (0, 40, 0, 200)), (12, (0,))])
def test_prefill(T, lengths):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((T, 2, w)).astype(np.float32) for w in (24, 24, 16))
    for x in (q, k, v):
        x[sum(lengths) :] = np.nan
    out, lse = _prefill(q, k, v, _cu(lengths))
    cases.assert_close(out, lse, *cases.prefill_oracle(q, k, v, lengths, SCALE), dtype=jnp.float32)


@pytest.mark.parametrize(
    ("counts", "contexts"), [((5, 64, 1), (0, 130, 64)), ((3, 0, 70, 9), (200, 64, 1, 65)), ((4, 4), (0, 0))]
)
def test_prefill_context(counts, contexts):
    case = cases.decode_case(contexts, H=1, R=32, P=16, dtype=jnp.float32)
    T = sum(counts) + 3
    q = np.random.default_rng(1).standard_normal((T, 2, 48)).astype(np.float32)
    q[sum(counts) :] = np.nan
    where = {"layer": case.layer, "pages_per_layer": case.pages_per_layer, "value_width": 32}
    attend = jax.jit(functools.partial(mla_prefill_context, scale=SCALE, backend=REFERENCE, **where))
    out, lse = attend(q, case.pages, case.page_table, case.lengths, _cu(counts))
    cases.assert_close(out, lse, *cases.context_oracle(q, case, counts, SCALE, 32), dtype=jnp.float32)


def test_merge_equals_attention_over_the_union():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((4, 8), (10, 8), (10, 6)))
    sides = [cases.attend(q, k[s], v[s], SCALE) for s in (slice(0, 3), slice(3, 10), slice(0, 0))]
    (out_a, lse_a), (out_b, lse_b), (_, lse_none) = ([np.float32(x) for x in side] for side in sides)
    poison = np.full_like(out_a, np.nan)  # the output of an empty side is ignored
    whole, whole_lse = cases.attend(q, k, v, SCALE)
    out, lse = _merge(out_a, lse_a, out_b, lse_b)
    np.testing.assert_allclose(out, whole, rtol=1e-5)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5)
    for args in ((out_a, lse_a, poison, lse_none), (poison, lse_none, out_a, lse_a)):
        out, lse = _merge(*args)
        np.testing.assert_allclose(out, out_a, rtol=1e-6)
        np.testing.assert_allclose(lse, lse_a, rtol=1e-6)
    out, lse = _merge(poison, lse_none, poison, lse_none)
    assert not np.asarray(out).any()
    assert np.isposinf(lse).all()


def test_write_drops_rows_without_a_page_and_donates():
    pages = jnp.zeros((6, 64, 48), jnp.bfloat16)
    latents = jnp.asarray(np.random.default_rng(0).standard_normal((7, 48)), jnp.bfloat16)
    page_ids = jnp.asarray([0, 2, -1, 3, 1, 1, -(2**31)], jnp.int32)  # page 3 is the next layer's
    offsets = jnp.asarray([0, 63, 5, 0, 64, -1, 0], jnp.int32)
    run = jax.jit(
        functools.partial(write_pages, pages_per_layer=3, value_width=32, backend=REFERENCE), donate_argnums=0
    )
    expected = np.zeros(pages.shape, np.float32)
    expected[3, 0], expected[5, 63] = np.asarray(latents[0], np.float32), np.asarray(latents[1], np.float32)
    compiled = run.lower(pages, latents, page_ids, offsets, layer=jnp.int32(1)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pages.nbytes
    np.testing.assert_array_equal(
        np.asarray(run(pages, latents, page_ids, offsets, layer=jnp.int32(1)), np.float32), expected
    )


def test_fp8_rows_round_trip_within_the_format():
    assert fp8_row_bytes(512, 64) == 656
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((50, 576)).astype(np.float32) * 10.0 ** rng.integers(-3, 3, (50, 1))
    latents[3], latents[7, 4] = 0, 1e9
    rows = _pack(jnp.asarray(latents), 512)
    assert rows.shape == (50, 656)
    back = np.asarray(_unpack(rows, 512, jnp.float32))
    scales = np.asarray(rows)[:, 512:528].copy().view(np.float32)
    assert np.all(np.frexp(scales)[0] == 0.5)
    tile_scale = np.repeat(scales, 128, axis=1)
    assert scales.max() == 128 and back[7, 4] == 57344  # the dequantized value fits in float16
    latents[7, 4] = 57344
    error = np.abs(back[:, :512] - latents[:, :512])
    assert np.all(error <= np.maximum(np.abs(latents[:, :512]) / 16, tile_scale * 2**-10))
    np.testing.assert_array_equal(back[:, 512:], np.asarray(jnp.asarray(latents[:, 512:], jnp.bfloat16), np.float32))


def test_fp8_cache_decodes_like_its_own_dequantized_rows():
    case = cases.decode_case(EDGE_LENGTHS, S=2, H=4, R=256, P=16, dtype=jnp.float32)
    rows = _pack(case.pages, 256)
    packed = _pages_of_rows(rows, 256)
    plain = cases.DecodeCase(
        case.q, _unpack(rows, 256, jnp.float32), case.page_table, case.lengths, case.layer, case.pages_per_layer
    )
    eight = cases.DecodeCase(case.q, packed, case.page_table, case.lengths, case.layer, case.pages_per_layer)
    for got, expected in zip(decode(eight, 256), decode(plain, 256), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_fp8_rows_are_written_to_their_positions():
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((3, 64, 144)).astype(np.float32)
    page_ids, offsets = (x.reshape(-1).astype(np.int32) for x in np.indices((3, 64)))
    page_ids[5] = -1
    write = jax.jit(
        functools.partial(write_pages, layer=1, pages_per_layer=3, value_width=128, backend=REFERENCE),
    )
    empty = np.zeros((6, 64, fp8_row_bytes(128, 16)), np.uint8)
    pages = np.asarray(write(empty, latents.reshape(-1, 144), page_ids, offsets))
    rows = np.array(_pack(latents, 128))
    rows[0, 5] = 0
    np.testing.assert_array_equal(pages[3:], _pages_of_rows(rows, 128))
    assert not pages[:3].any()


def _cu(lengths):
    return jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
