"""Rings in pages and slots: a step leaves what writing its tokens one after the other would leave."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.model import DecodeBatch, PrefillBatch
from dsv3.model.batch import StepRows
from dsv3.model.layers.cache_rows import CacheRows

PAGES, TABLE, SIZE, RING = 12, 4, 8, 5


@functools.partial(jax.jit, static_argnames="per_page")
def kept(batch: PrefillBatch | DecodeBatch, array: jax.Array, new: jax.Array, per_page: int) -> tuple[jax.Array, ...]:
    """The array after the step; pages and rows of its tokens, and which of them are written."""
    rows = StepRows.of(batch)
    table = rows.window_table if per_page == SIZE else rows.slots[:, None]
    cached = CacheRows(rows, array, table, 0, len(array), per_page)
    places = cached.locate(rows.requests, rows.positions)
    lasting = rows.valid & cached.is_last_write(rows.positions, rows.ends[rows.requests])
    return cached.write_after(jnp.zeros(()), new)[1], *places, lasting


def batch_of(kind: str, contexts: list[int], counts: list[int], windows: np.ndarray) -> PrefillBatch | DecodeBatch:
    slots, table = np.arange(3, dtype=np.int32)[::-1], np.zeros((3, TABLE), np.int32)
    if kind == "decode":
        lengths = np.array([c + 6 if n else 0 for c, n in zip(contexts, counts, strict=True)], np.int32)
        return DecodeBatch(np.zeros((3, 6), np.int32), lengths, table, window_table=windows, slots=slots)
    positions = np.zeros(36, np.int32)
    cu = np.cumsum([0, *counts]).astype(np.int32)
    for (first, last), context in zip(itertools.pairwise(cu), contexts, strict=True):
        positions[first:last] = context + np.arange(last - first)
    start = np.array(contexts, np.int32)
    return PrefillBatch(0 * positions, positions, cu, start, table, window_table=windows, slots=slots)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from([SIZE, 2**30]),
    st.lists(st.integers(0, TABLE * SIZE - 13), min_size=3, max_size=3),
    st.lists(st.integers(0, 12), min_size=3, max_size=3),
    st.permutations(range(PAGES)),
    st.sets(st.integers(0, PAGES - 1)),
)
def test_a_step_leaves_its_last_rows(
    kind: str, per_page: int, contexts: list[int], counts: list[int], pages: list[int], released: set[int]
) -> None:
    windows = np.array([-1 if page in released else page for page in pages], np.int32).reshape(3, TABLE)
    batch = jax.tree.map(jnp.asarray, batch_of(kind, contexts, counts, windows))
    rows, array = StepRows.of(batch), np.zeros((PAGES, RING, 1), np.float32)
    new = np.arange(1, len(rows.positions) + 1, dtype=np.float32)[:, None]
    found, ids, offsets, lasting = map(np.asarray, kept(batch, jnp.asarray(array), new, per_page=per_page))
    for value, page, offset, valid in zip(new, ids, offsets, rows.valid, strict=True):
        if valid and page >= 0:
            array[page, offset] = value
    np.testing.assert_array_equal(found, array)
    places = [(p, o) for p, o, last in zip(ids.tolist(), offsets.tolist(), lasting, strict=True) if last and p >= 0]
    assert len(places) == len(set(places)), "two rows of a scatter may come in any order"
