"""Prefill after cached tokens in expanded form: the same answers as absorbed, however prompts are cut and batched."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.config.model import FP8
from dsv3.kv_cache.layout import pool
from dsv3.model import PAGE_SIZE, AttentionForm, PrefillBatch, prefill
from dsv3.model.layers import expanded
from tests.dsv3.model.golden import model
from tests.dsv3.model.test_steps import POOL, TABLE, Cache, T

TABLES = [[7, 2, 9, 4], [1, 8, 3, 0], [11, 5, 10, 6]]
ROOM = 640
chunks = st.lists(st.lists(st.integers(0, T // 3), min_size=3, max_size=3), min_size=1, max_size=4)


class Expanding(Cache):
    """Attends in prefill in expanded form."""

    def _step(self, which, batch, live):
        how = {} if which else {"form": AttentionForm.MATERIALIZED, "room": ROOM}
        return super()._step(which, dataclasses.replace(batch, **how), live)


@pytest.fixture(autouse=True)
def half_of_the_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "heads_at_once", lambda heads, _: heads // 2)


def answers(
    kind: type[Cache], asked: list[list[int]], cache_dtype: str | None = None
) -> tuple[list[np.ndarray], Cache]:
    """Logits of chunks of three prompts, as long as these fit in the room, and the cache behind them."""
    cache = kind("deepseek_v3", TABLES)
    if cache_dtype is not None:
        cache.pages = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), pool(cache.cfg, cache_dtype, POOL))
    texts = np.random.default_rng(0).integers(0, cache.cfg.vocab_size, (3, TABLE * PAGE_SIZE)).astype(np.int32)
    found = []
    for counts in asked:
        stops = np.minimum(cache.lengths + counts, TABLE * PAGE_SIZE)
        parts = [(i, texts[i, cache.lengths[i] : stop]) for i, stop in enumerate(stops) if stop > cache.lengths[i]]
        if parts and sum(-(-int(stops[i]) // PAGE_SIZE) * PAGE_SIZE for i, _ in parts) <= ROOM:
            found += cache.prefill(parts)
    return found, cache


def assert_alike(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-5 * np.abs(a).max(initial=0))


@settings(max_examples=15, deadline=None)
@given(chunks)
def test_both_forms_answer_alike(asked: list[list[int]]) -> None:
    """Some requests have no new tokens, some no cached ones; unwritten rows of pages are NaN."""
    (absorbed, one), (found, other) = (answers(kind, asked) for kind in (Cache, Expanding))
    assert_alike(absorbed, found)
    np.testing.assert_allclose(one.pages["latents"], other.pages["latents"], rtol=1e-4, atol=1e-5)


def test_new_tokens_see_each_other_unrounded() -> None:
    """FP8 pages round what a chunk reads of earlier ones, and nothing of itself."""
    asked = [[40, 53, 0], [10, 10, 50]]
    whole, rounded = (answers(Expanding, asked, dtype)[0] for dtype in (None, FP8))
    assert_alike([*whole[:2], whole[4]], [*rounded[:2], rounded[4]])  # those without cached tokens
    assert 1e-4 < np.abs(whole[2] - rounded[2]).max() / np.abs(whole[2]).max() < 0.2


@pytest.mark.parametrize(("form", "room"), [(AttentionForm.MATERIALIZED, 0), (AttentionForm.ABSORBED, ROOM)])
def test_an_expanded_form_needs_room_and_no_other_has_some(form: AttentionForm, room: int) -> None:
    params, cfg = model("deepseek_v3")
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    batch = PrefillBatch(ints((T,)), ints((T,)), ints((2,)), ints((1,)), ints((1, TABLE)), form, room)
    with pytest.raises(ValueError, match=f"form {form.name} with room for {room} tokens"):
        jax.eval_shape(lambda p, b, g: prefill(p, cfg, b, g), params, batch, pool(cfg, "float32", POOL))


def test_heads_are_divided_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mib = 2**20
    assert [expanded.heads_at_once(128, n * mib) for n in (1, 8, 64, 300, 1024)] == [128, 128, 16, 2, 1]
    assert expanded.heads_at_once(20, 200 * mib) == 5
