"""Index scores, top-k selection and attention to it, against numpy; unwritten rows are NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dsa, mla
from pallas_kernels.dsa.keys import keys_of_pages, queries_for
from tests.pallas_kernels.mla.cases import PAGE, decode_case, gather_tokens

LENGTHS = [150, 0, 64, 7]
WIDTHS = {"value_width": 32, "scale": 0.3}
HEADS, KEY = 3, 16
_select = jax.jit(dsa.select_topk, static_argnames="topk")
_score = jax.jit(dsa.index_scores)
_pack = jax.jit(lambda rows: mla.fp8_pages_of_rows(mla.pack_fp8(rows, 32), 32))
_keys_of_pages, _queries_for = jax.jit(keys_of_pages, static_argnums=(2, 3)), jax.jit(queries_for)
_write = jax.jit(dsa.write_keys, static_argnames=("layer", "pages_per_layer"))


def latents(dtype=jnp.float32):
    """A case of mla's tests: R 32, P 16."""
    return decode_case(LENGTHS, H=4, R=32, P=16, dtype=dtype)


def indexer(case, dtype=jnp.float32, seed=0):
    """Queries, weights, and the keys of the case's requests `[B, N, I]` in a pool whose other rows are NaN."""
    rng = np.random.default_rng(seed)
    B, N = len(LENGTHS), case.page_table.shape[1] * PAGE
    q, weights, keys = (rng.normal(size=s).astype(np.float32) for s in ((B, HEADS, KEY), (B, HEADS), (B, N, KEY)))
    is_fp8 = dtype == jnp.uint8
    width, kind = dsa.key_row(KEY, None if is_fp8 else dtype)
    pool = np.full((2 * case.pages_per_layer, PAGE, width), 255 if is_fp8 else np.nan, kind)
    rows, places = np.repeat(np.arange(B), LENGTHS), np.concatenate([np.arange(length) for length in LENGTHS])
    ids = np.asarray(case.page_table)[rows, places // PAGE]
    pool = _write(pool, keys[rows, places], ids, places % PAGE, layer=case.layer, pages_per_layer=case.pages_per_layer)
    return jnp.asarray(q), jnp.asarray(weights), jnp.asarray(keys), pool


def expected_scores(q, weights, keys):
    products = np.einsum("bhi,bni->bhn", np.asarray(q, np.float64), np.asarray(keys, np.float64))
    return np.einsum("bh,bhn->bn", np.asarray(weights, np.float64), np.maximum(products, 0))


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.05), (jnp.uint8, 0.12)])
def test_scores_are_those_of_the_formula(dtype, tolerance) -> None:
    case = latents()
    q, weights, keys, pool = indexer(case, dtype)
    scores = _score(q, weights, pool, case.page_table, case.lengths, first_page=case.layer * case.pages_per_layer)
    wanted = expected_scores(q, weights, keys)
    for row, length in enumerate(LENGTHS):
        assert np.abs(scores[row, :length] - wanted[row, :length]).max(initial=0) < tolerance * np.abs(wanted).max()
        assert np.isneginf(scores[row, length:]).all()


def test_fp8_keys_are_rotated_and_no_product_changes() -> None:
    case = latents()
    q, _, keys, pool = indexer(case, jnp.uint8)
    ids = case.layer * case.pages_per_layer + np.asarray(case.page_table[0])
    turned = np.asarray(_keys_of_pages(pool, ids, KEY, jnp.float32)).reshape(-1, KEY)[: LENGTHS[0]]
    plain = np.asarray(keys[0, : LENGTHS[0]])
    assert np.abs(turned - plain).max() > 1, "rotated keys differ"
    products, wanted = turned @ np.asarray(_queries_for(pool, q))[0].T, plain @ np.asarray(q)[0].T
    assert np.abs(products - wanted).max() < 0.1 * np.abs(wanted).max()
    assert pool.shape[2] == KEY + 4 and dsa.key_row(128, None) == (132, np.uint8)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=40, max_size=40), st.integers(0, 40))
def test_top_k_is_exact_and_the_first_of_equal_scores_win(values: list[int], visible: int) -> None:
    scores = np.where(np.arange(40) < visible, np.float32(values), -np.inf)
    indices = np.asarray(_select(jnp.asarray(scores)[None], jnp.asarray([visible]), topk=16))[0]
    wanted = sorted(sorted(range(visible), key=lambda i: (-scores[i], i))[:16])
    assert indices.tolist() == wanted + [40] * (16 - len(wanted))


def test_a_sum_of_negative_zeros_ties_with_zero() -> None:
    """A head with product 0 gives 0 or -0, by the sign of its weight; sorted by bits they would differ."""
    case = latents()
    _, _, _, pool = indexer(case)
    q, weights = jnp.zeros((len(LENGTHS), HEADS, KEY)), -jnp.ones((len(LENGTHS), HEADS))
    scores = _score(q, weights, pool, case.page_table, case.lengths, first_page=case.layer * case.pages_per_layer)
    assert not np.signbit(scores[0, : LENGTHS[0]]).any() and (scores[0, : LENGTHS[0]] == 0).all()


@pytest.mark.parametrize("fp8", [False, True])
def test_attention_to_all_tokens_has_the_bits_of_decode(fp8: bool) -> None:
    case = latents()
    pages = case.pages
    if fp8:
        pages = _pack(np.nan_to_num(pages))
    M, K = len(LENGTHS), 192
    first = case.layer * case.pages_per_layer
    where = dict(layer=case.layer, pages_per_layer=case.pages_per_layer)
    dense, _ = mla.mla_decode(case.q, pages, case.page_table, case.lengths, **where, **WIDTHS)
    every = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (M, K))
    out, _ = dsa.attend_topk(case.q[:, 0], pages, case.page_table, every, case.lengths, first_page=first, **WIDTHS)
    np.testing.assert_array_equal(out, dense[:, 0])


def test_attention_is_only_to_the_topk_tokens() -> None:
    case, rng = latents(), np.random.default_rng(1)
    positions, counts = np.full((len(LENGTHS), PAGE), 10**6, np.int32), np.minimum(LENGTHS, 16).astype(np.int32)
    for row, count in enumerate(counts):
        positions[row, :count] = np.sort(rng.permutation(LENGTHS[row])[:count])
    first = case.layer * case.pages_per_layer
    arrays = case.q[:, 0], case.pages, case.page_table, jnp.asarray(positions), jnp.asarray(counts)
    out = np.asarray(dsa.attend_topk(*arrays, first_page=first, **WIDTHS)[0])
    for row, count in enumerate(counts):
        tokens = gather_tokens(case, row, LENGTHS[row])[positions[row, :count]]
        scores = np.asarray(case.q, np.float64)[row, 0] @ tokens.T * WIDTHS["scale"]
        weights = np.exp(scores - scores.max(axis=1, initial=-np.inf, keepdims=True)) if count else scores
        wanted = weights @ tokens[:, :32] / weights.sum(axis=1, keepdims=True) if count else np.zeros((4, 32))
        np.testing.assert_allclose(out[row], wanted, atol=1e-6)


def test_keys_of_another_width_are_rejected() -> None:
    pool, ids = jnp.zeros((4, PAGE, 16)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"must be \[.., 64, 8\] for a width of 8, not \(4, 64, 16\)"):
        dsa.write_keys(pool, jnp.zeros((1, 8)), ids, ids, layer=0, pages_per_layer=2)
