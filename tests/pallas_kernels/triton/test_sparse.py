"""The kernels of sparse attention in Triton's interpreter: selection against Python's sort, copies against jax.numpy.

The interpreter runs one program at a time and detects no races. Programs write to disjoint places, each once: a place
written twice would leave another unwritten, which `test_selection_is_exact...` detects.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pallas_kernels import dsa, gpus, mla
from pallas_kernels.backend import Backend
from pallas_kernels.dsa import attend
from pallas_kernels.dsa.keys import keys_of_pages, queries_for, write_keys
from pallas_kernels.dsa.topk import raw_scores, select_in_kernel
from pallas_kernels.mla.layout import fp8_rows_of_pages
from tests.pallas_kernels.mla.cases import PAGE, UNUSED_PAGE, decode_case

pytestmark = pytest.mark.usefixtures("interpreted")
TRITON, ROWS, N = Backend.TRITON, 6, 192
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, np.nextafter(np.float32(1), 2)]
_pack = jax.jit(lambda rows: mla.fp8_pages_of_rows(mla.pack_fp8(rows, 32), 32))
_copied = jax.jit(attend._copied, static_argnums=(3, 4))
_rows_of_pages = jax.jit(fp8_rows_of_pages, static_argnums=1)
_write = jax.jit(functools.partial(write_keys, layer=0, pages_per_layer=20))
_read = jax.jit(keys_of_pages, static_argnames=("width", "dtype"))
SCORES = st.one_of(
    arrays.arrays(np.float32, (ROWS, N), elements=st.sampled_from(SPECIAL)),
    arrays.arrays(np.float32, (ROWS, N), elements=st.floats(width=32, allow_nan=False)),
)


def wanted(scores: np.ndarray, visible: int, topk: int) -> list[int]:
    """The positions, by a sort of the visible scores."""
    indices = sorted(sorted(range(visible), key=lambda i: (-float(scores[i]), i))[:topk])
    return indices + [len(scores)] * (topk - len(indices))


@settings(deadline=None, max_examples=12)
@given(SCORES, st.lists(st.integers(0, N), min_size=ROWS, max_size=ROWS), st.sampled_from([16, 64, 100]))
def test_selection_is_exact_and_the_first_of_equal_scores_win(scores, visible, topk) -> None:
    """Scores after the visible ones are NaN; blocks are smaller than rows, so that sums are carried."""
    for row, count in zip(scores, visible, strict=True):
        row[count:] = np.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pallas_kernels.dsa.topk._SELECT_BLOCK", 64)
        found = select_in_kernel(jnp.asarray(scores), jnp.asarray(visible, jnp.int32), topk, TRITON)
    for row, count, indices in zip(scores, visible, np.asarray(found), strict=True):
        assert indices.tolist() == wanted(row, count, topk)


def test_a_long_row() -> None:
    """Ten blocks of the size on a GPU, with scores that agree in all but the last bits."""
    bits = 0x3F800000 + np.random.default_rng(0).integers(0, 500, 40_000, np.int32)
    scores = bits.view(np.float32)
    found = select_in_kernel(jnp.asarray(scores)[None], jnp.asarray([39_990], jnp.int32), 2048, TRITON)
    assert np.asarray(found)[0].tolist() == wanted(scores, 39_990, 2048)


@pytest.mark.parametrize("fp8", [False, True])
def test_copies_have_the_bits_of_the_topk_rows(fp8: bool) -> None:
    case, rng = decode_case([150, 0, 64, 7], H=4, R=32, P=16, dtype=jnp.float32), np.random.default_rng(1)
    pages = case.pages
    if fp8:
        pages = _pack(np.nan_to_num(pages))
    positions, counts = np.full((4, 2 * PAGE), 10**6, np.int32), np.minimum(case.lengths, 100).astype(np.int32)
    for row, count in enumerate(counts):
        positions[row, :count] = np.sort(rng.permutation(int(case.lengths[row]))[:count])
    given = pages, case.page_table, jnp.asarray(positions), jnp.asarray(counts)
    first = case.layer * case.pages_per_layer
    ours = attend.copy_rows(*given, first, 32, TRITON)
    theirs = _copied(*given[:3], first, 32)
    rows = [_rows_of_pages(each, 32) if fp8 else each for each in (ours, theirs)]
    ours, theirs = (np.asarray(each).reshape(4, 2 * PAGE, -1) for each in rows)
    for row, count in enumerate(counts):
        np.testing.assert_array_equal(ours[row, :count], theirs[row, :count])
        unwritten = 255 if fp8 else np.nan
        np.testing.assert_array_equal(ours[row, count:], unwritten, "invalid rows are not written")


@pytest.mark.parametrize(
    ("number", "fp8", "heads", "width"),
    [(86, False, 20, 64), (86, True, 20, 128), (89, True, 64, 32)],
    ids=["bfloat16", "FP8 widened", "FP8 as it is"],
)
def test_scores_are_those_of_the_formula(number: int, fp8: bool, heads: int, width: int, monkeypatch) -> None:
    """Six pages in parts of four, one page, and none; unused table entries are far outside of the pool.

    Queries and keys are compared after rounding: their products are exact in float32.
    """
    monkeypatch.setattr("pallas_kernels.dsa.topk.SCORE_PAGES", 4)
    rng, visible = np.random.default_rng(0), np.array([350, 0, 64], np.int32)
    q, weights = rng.normal(size=(3, heads, width)), rng.normal(size=(3, heads)).astype(np.float32)
    keys, table = rng.normal(size=(20, PAGE, width)), np.full((3, 6), UNUSED_PAGE, np.int32)
    table[0], table[2, 0] = rng.permutation(9)[:6], 9
    q, pool = jnp.asarray(q, jnp.bfloat16), jnp.asarray(keys, jnp.bfloat16)
    if fp8:
        places, empty = jnp.arange(20 * PAGE, dtype=jnp.int32), jnp.zeros((20, PAGE, width + 4), jnp.uint8)
        arrays = pool.reshape(-1, width), places // PAGE, places % PAGE
        pool = _write(empty, *arrays)
    with gpus.compiling_for(gpus.by_number(number)):
        score = jax.jit(functools.partial(raw_scores, first_page=10, backend=TRITON))
        found = np.asarray(score(q, weights, pool, table, visible))
    assert found.shape == (3, 6 * PAGE)
    meeting = np.asarray(jax.jit(queries_for)(pool, q), np.float64)
    for row, count in ((0, 350), (2, 64)):
        ids = jnp.asarray(10 + table[row, : -(-count // PAGE)])
        rows = np.asarray(_read(pool, ids, width=width, dtype=jnp.float32), np.float64).reshape(-1, width)[:count]
        wanted = weights[row] @ np.maximum(meeting[row] @ rows.T, 0)
        np.testing.assert_allclose(found[row, :count], wanted, atol=1e-4)
    assert np.isnan(found[1]).all(), "a query that sees nothing costs nothing"


@pytest.mark.parametrize(
    ("q", "pool", "message"),
    [
        (((64, 128), jnp.bfloat16), (jnp.bfloat16, 128), None),
        (((64, 128), jnp.bfloat16), (jnp.uint8, 132), None),
        (((4, 16), jnp.bfloat16), (jnp.uint8, 20), "FP8 keys of 16 are narrower"),
        (((4, 96), jnp.bfloat16), (jnp.bfloat16, 96), "4 heads of 96 are"),
        (((4, 64), jnp.float32), (jnp.float32, 64), "not of one type of 16 bits"),
    ],
)
def test_what_the_kernel_of_scores_supports(q, pool, message) -> None:
    why = dsa.scores_unsupported(
        jax.ShapeDtypeStruct((2, *q[0]), q[1]), jax.ShapeDtypeStruct((4, PAGE, pool[1]), pool[0]), TRITON
    )
    assert why is None if message is None else message in why


def test_sparse_attention_uses_the_kernels() -> None:
    """Selection and attention equal those of jax.numpy on the same cache."""
    case, rng = decode_case([150, 0, 64, 7], H=4, R=32, P=16, dtype=jnp.bfloat16), np.random.default_rng(2)
    q, weights = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 8, 16), (4, 8)))
    pool = jnp.asarray(rng.normal(size=(2 * case.pages_per_layer, PAGE, 16)), jnp.float32)
    first = case.layer * case.pages_per_layer
    where = dict(scale=0.3, first_page=first, value_width=32)

    def attended(backend: Backend) -> tuple[jax.Array, jax.Array]:
        picked = dsa.topk_indices(
            q, weights, pool, case.page_table, case.lengths, first_page=first, topk=64, backend=backend
        )
        counts = jnp.minimum(case.lengths, 64)
        return picked, dsa.attend_topk(
            case.q[:, 0], case.pages, case.page_table, picked, counts, backend=backend, **where
        )[0]

    ours, theirs = (jax.jit(functools.partial(attended, backend))() for backend in (TRITON, Backend.REFERENCE))
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(*(np.asarray(each[1], np.float32) for each in (ours, theirs)), atol=0.02)


def test_other_widths_than_powers_of_two_use_jax_numpy() -> None:
    def pages(values: int, rope: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, PAGE, mla.fp8_row_bytes(values, rope)), jnp.uint8)

    assert attend.copy_unsupported(pages(512, 64), 512) is None
    assert "of 96 values and 128 bytes" in attend.copy_unsupported(pages(96, 64), 96)
    assert "of 512 values and 96 bytes" in attend.copy_unsupported(pages(512, 48), 512)
