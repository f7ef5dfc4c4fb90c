"""Masked attention in prefill: the same choice and the same answers as with copies of chosen rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.config.engine import pages_for
from dsv3.config.model import PAGE_SIZE
from dsv3.kv_cache.layout import Pool, pool
from dsv3.model import AttentionForm, PrefillBatch, prefill
from dsv3.model.layers.expanded import pack
from dsv3.model.params import Params, abstract
from tests.dsv3.model import needle

CFG = needle.config(interleaved=True)
T, B, TABLE, ROOM = 96, 3, 3, 256
TABLES = np.random.default_rng(0).permutation(B * TABLE).reshape(B, TABLE).astype(np.int32)
chunks = st.lists(st.lists(st.integers(0, 64), min_size=B, max_size=B), min_size=1, max_size=5)


@functools.cache
def params() -> Params:
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: rng.normal(0, 0.4, s.shape).astype(s.dtype), abstract(CFG, jnp.float32))


@jax.jit
def step(params: Params, batch: PrefillBatch, pages: Pool) -> tuple[jax.Array, Pool]:
    out = prefill(params, CFG, batch, pages)
    return out.hidden, out.pages


packed = jax.jit(functools.partial(pack, pages=B * TABLE + 1, page_size=PAGE_SIZE))


def steps(asked: list[list[int]], room: int, cache_dtype: str = "float32") -> tuple[list[np.ndarray], Pool, set[bool]]:
    """Runs chunks of three prompts; those masked whose requests fit in the `room`. Returns also which forms ran."""
    pages = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), pool(CFG, cache_dtype, B * TABLE))
    texts = np.random.default_rng(2).integers(0, CFG.vocab_size, (B, TABLE * PAGE_SIZE)).astype(np.int32)
    done, found, forms = np.zeros(B, np.int32), [], set()
    for counts in asked:
        counts = np.minimum(counts, np.minimum(TABLE * PAGE_SIZE - done, T // B))
        tokens, positions = np.zeros(T, np.int32), np.zeros(T, np.int32)
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for row, (start, count) in enumerate(zip(done, counts, strict=True)):
            positions[ends[row] : ends[row + 1]] = np.arange(start, start + count)
            tokens[ends[row] : ends[row + 1]] = texts[row, start : start + count]
        keys = sum(PAGE_SIZE * pages_for(int(n), PAGE_SIZE) for n in (done + counts)[counts > 0])
        masked = 0 < keys <= room
        form = AttentionForm.TOPK_MATERIALIZED if masked else AttentionForm.TOPK
        batch = PrefillBatch(tokens, positions, ends, done.copy(), TABLES, form, ROOM * masked)
        hidden, pages = step(params(), batch, pages)
        done += counts
        forms.add(masked)
        found.append(np.asarray(hidden)[: ends[-1]])
    return found, pages, forms


@settings(max_examples=25, deadline=None)
@given(chunks)
def test_both_forms_answer_alike_around_the_crossover(asked: list[list[int]]) -> None:
    """The texts pass the 16 tokens that are chosen, and together the room; unwritten rows of pages are NaN."""
    copied, pages, _ = steps(asked, room=0)
    masked, same_pages, _ = steps(asked, room=ROOM)
    for one, other in zip(copied, masked, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-5 * np.abs(one).max(initial=0))
    for one, other in zip(jax.tree.leaves(pages), jax.tree.leaves(same_pages), strict=True):
        np.testing.assert_array_equal(one, other)


def test_both_forms_read_the_same_rounded_pages() -> None:
    """Keys of new tokens, too, are those that FP8 pages hold."""
    asked = [[32, 20, 0], [32, 32, 9]]
    copied, masked = (steps(asked, room, "fp8")[0] for room in (0, ROOM))
    for one, other in zip(copied, masked, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-3 * np.abs(one).max())


def test_both_forms_run_in_one_prompt() -> None:
    assert steps([[32, 32, 32]] * 4, room=ROOM)[2] == {True, False}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 3 * PAGE_SIZE), min_size=3, max_size=3))
def test_pages_lie_side_by_side(lengths: list[int]) -> None:
    found = jax.tree.map(np.asarray, packed(TABLES, np.array(lengths, np.int32)))
    wanted = [int(page) for row, n in enumerate(lengths) for page in TABLES[row, : pages_for(n, PAGE_SIZE)]]
    assert found.page_ids.tolist() == wanted + [0] * (B * TABLE + 1 - len(wanted))
    for start, length in zip(found.starts, lengths, strict=True):
        counts = found.counts[start // PAGE_SIZE :][: pages_for(length, PAGE_SIZE)]
        assert start % PAGE_SIZE == 0 and counts.sum() == length
    assert not found.counts[len(wanted) :].any()
