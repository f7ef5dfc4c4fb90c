"""The stages of DSpark compute what their formulas say, in float64 and without our code, from a paged cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3.config.hugging_face import from_hf
from dsv3.config.model import ModelConfig
from dsv3.kv_cache import layout
from dsv3.model import DecodeBatch, Params, dspark, logits, prefill
from dsv3.model.params import abstract
from dsv3.model.vocabulary import WHOLE
from pallas_kernels import bodies
from pallas_kernels.aot import compile_to_read, lower_for
from pallas_kernels.backend import Backend
from tests.dsv3.deepseek_v4 import FLASH_0731
from tests.dsv3.model.deepseek_v4 import STAGES, model, with_stages
from tests.dsv3.model.deepseek_v4_formulas import (
    Array,
    collapsed,
    heads_output,
    layer,
    queries_and_keys,
    rms,
    sigmoid,
)
from tests.dsv3.model.golden import relative_error
from tests.dsv3.model.test_deepseek_v4_mtp import chunk, empty_pool, tables

MEMBER, LAYERS = "deepseek_v4_plain", (0, 1)
LENGTH, CHUNK, S = 268, 128, 4
"""Tokens, of which the last are on the second page; rows of a chunk; rows of a decode step."""
TOLERANCE = 2e-5


def reference(params: Params, cfg: ModelConfig, means: Array, last: int) -> tuple[Array, Array]:
    """States `[n, D]` of a block behind tokens with `means` `[T, M * D]`, before and behind their norm."""
    stages = jax.tree.map(lambda a: np.asarray(a, np.float64), params.mtp)
    main = rms(means @ stages.main_proj[0].T, stages.main_norm[0])
    T, n = len(means), cfg.dspark.block_size
    first = max(0, T - cfg.compressed.window)
    before, positions = np.arange(first, T), T + np.arange(n)
    embedded = np.asarray(params.embed, np.float64)[[last, *[cfg.dspark.noise_token_id] * (n - 1)]]
    x = np.repeat(embedded[:, None], 4, axis=1)
    for stage in range(cfg.dspark.stages):
        mine = jax.tree.map(lambda a, stage=stage: a[stage], stages.layers)
        _, context = queries_and_keys(main[first:], mine.attention, cfg, before)

        def attend(a: Array, mine: Any = mine, context: Array = context) -> Array:
            q, k = queries_and_keys(a, mine.attention, cfg, positions)
            keys = np.concatenate([context, k])
            return heads_output(q, keys, np.ones((n, len(keys)), bool), mine.attention, cfg, positions)

        x = layer(x, mine, cfg, attend)
    states = collapsed(x, stages.head_mixing)
    return states, rms(states, stages.norm[0])


def reference_drafts(params: Params, states: Array, hidden: Array, last: int) -> tuple[list[int], list[float]]:
    stages = jax.tree.map(lambda a: np.asarray(a, np.float64), params.mtp)
    scores, tokens, confidence = hidden @ np.asarray(params.head, np.float64).T, [], []
    for state, row in zip(states, scores, strict=True):
        embedded = stages.markov_embed[last]
        confidence.append(float(sigmoid(np.concatenate([state, embedded]) @ stages.confidence[0])))
        last = int(np.argmax(row + stages.markov_head @ embedded))
        tokens.append(last)
    return tokens, confidence


@functools.cache
def sequence() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 64, LENGTH + 1).astype(np.int32)


def taken(params: Params, cfg: ModelConfig) -> np.ndarray:
    """What layers that make drafts take of the sequence, `[LENGTH, W]`."""
    step = jax.jit(lambda p, batch, pool: prefill(p, cfg, batch, pool).draft_input)
    return np.asarray(step(params, chunk(0, sequence()[:-1], LENGTH), empty_pool(cfg)))


@functools.cache
def draft_input() -> np.ndarray:
    return taken(*with_stages(MEMBER, layers=LAYERS))


def test_the_main_model_gives_the_mean_of_its_streams_behind_target_layers() -> None:
    """They are what a model that ends there carries."""
    first, second = np.split(draft_input(), 2, axis=1)
    streams = taken(*model(MEMBER, LAYERS[0])).reshape(LENGTH, 4, -1)
    assert relative_error(first, streams.mean(1)) < 1e-6
    assert relative_error(second, first) > 0.01


@functools.cache
def write() -> Any:
    params, cfg = with_stages(MEMBER, layers=LAYERS)
    return jax.jit(lambda batch, pool, given: dspark.write_context(params, cfg, batch, pool, given))


@functools.cache
def propose() -> Any:
    params, cfg = with_stages(MEMBER, layers=LAYERS)
    return jax.jit(lambda batch, pool: dspark.propose(params, cfg, batch, pool))


def best(scores: jax.Array) -> jax.Array:
    return scores[0].argmax(-1)


def expect_block(pool: layout.Pool, known: int, last: int) -> None:
    params, cfg = with_stages(MEMBER, layers=LAYERS)
    means = draft_input().astype(np.float64)[:known]
    found = propose()(DecodeBatch(jnp.array([[last]]), jnp.array([known + 1]), **tables()), pool)
    scores = logits(params, cfg, found.hidden)[None]
    chosen = dspark.choose(params, WHOLE, best, scores, found.draft_input, jnp.array([last]))
    states, hidden = reference(params, cfg, means, last)
    assert relative_error(found.draft_input[0], states) < TOLERANCE
    assert relative_error(found.hidden[0], hidden) < TOLERANCE
    drafts, sure = reference_drafts(params, states, hidden, last)
    assert chosen[0][0].tolist() == drafts
    np.testing.assert_allclose(chosen[1][0], sure, atol=1e-4)
    assert int(found.expert_counts.sum()) == STAGES.stages * STAGES.block_size * cfg.num_experts_per_tok


def test_chunks_then_steps_with_drafts_that_are_rejected() -> None:
    """Each block sees the window of what is known, whatever rejected drafts have written."""
    _, cfg = with_stages(MEMBER, layers=LAYERS)
    pool, given = empty_pool(cfg), draft_input()
    expect_block(pool, 0, 7)  # nothing is in the cache
    prompt = 250
    for start in range(0, prompt, CHUNK):
        rows = slice(start, min(start + CHUNK, prompt))
        padded = np.full((CHUNK, given.shape[1]), np.nan, np.float32)
        padded[: rows.stop - start] = given[rows]
        pool = write()(chunk(start, sequence()[rows], CHUNK), pool, padded)
        expect_block(pool, rows.stop, int(sequence()[rows.stop]))
    known = prompt
    while known + S <= LENGTH:
        step = given[None, known : known + S].copy()
        step[:, 2:] = 1e3 * step[:, ::-1][:, 2:]  # of drafts that are rejected
        batch = DecodeBatch(jnp.zeros((1, S), jnp.int32), jnp.array([known + S]), **tables())
        pool, known = write()(batch, pool, jnp.asarray(step)), known + 2
        expect_block(pool, known, int(sequence()[known]))


def test_a_block_depends_on_the_window_the_last_token_and_the_placeholders() -> None:
    """Otherwise the comparison would not show what is left out."""
    params, cfg = with_stages(MEMBER, layers=LAYERS)
    means = draft_input().astype(np.float64)[:100]
    oldest, window = means.copy(), cfg.compressed.window
    oldest[-window] = means[-window][::-1]
    placeholder = dataclasses.replace(cfg, dspark=dataclasses.replace(STAGES, noise_token_id=1))
    _, right = reference(params, cfg, means, 5)
    for other in ((cfg, oldest, 5), (cfg, means, 6), (placeholder, means, 5)):
        _, changed = reference(params, *other)
        assert relative_error(changed[0], right[0]) > 1e-3  # of the first row, which no placeholder precedes


def test_rows_without_a_request_change_nothing() -> None:
    _, cfg = with_stages(MEMBER, layers=LAYERS)
    pool = write()(chunk(0, sequence()[:CHUNK], CHUNK), empty_pool(cfg), draft_input()[:CHUNK])
    (alone,) = propose()(DecodeBatch(jnp.array([[9]]), jnp.array([CHUNK + 1]), **tables()), pool).hidden
    where = {name: jnp.concatenate([table, table]) for name, table in tables().items()}
    batch = DecodeBatch(jnp.array([[0], [9]]), jnp.array([0, CHUNK + 1]), **where)
    found = propose()(batch, pool)
    assert relative_error(found.hidden[1], alone) < 1e-6
    assert int(found.expert_counts.sum()) == STAGES.stages * STAGES.block_size * cfg.num_experts_per_tok


def test_a_model_without_stages_is_refused() -> None:
    params, cfg = model(MEMBER)
    batch = DecodeBatch(jnp.array([[0]]), jnp.array([1]), **tables())
    with pytest.raises(ValueError, match="no stages of DSpark"):
        dspark.propose(params, cfg, batch, empty_pool(cfg))


@pytest.mark.aot
def test_blocks_of_flash_compile_for_an_h200_and_write_the_pool_in_place() -> None:
    cfg = from_hf(FLASH_0731)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    params = dataclasses.replace(abstract(cfg, jnp.bfloat16), moe=None)  # the main model has run before
    pool = layout.pool(cfg, "fp8", num_pages=256, num_window_pages=256, num_slots=64)
    where = dict(page_table=ints((64, 64)), window_table=ints((64, 64)), slots=ints((64,)))
    batch, last = DecodeBatch(ints((64, 6)), ints((64,)), **where), DecodeBatch(ints((64, 1)), ints((64,)), **where)
    given = jax.ShapeDtypeStruct((64, 6, 3 * cfg.hidden_size), jnp.bfloat16)

    def both(params: Params, pool: layout.Pool, given: jax.Array, batch: DecodeBatch, last: DecodeBatch) -> Any:
        pool = dspark.write_context(params, cfg, batch, pool, given, backend=Backend.MOSAIC)
        out = dspark.propose(params, cfg, last, pool, backend=Backend.MOSAIC)
        return dataclasses.replace(out, pages=pool)

    with bodies.left_out():
        lowered = lower_for(jax.jit(both, donate_argnums=1), params, pool, given, batch, last)
    memory = compile_to_read(lowered).memory_analysis()
    assert memory.alias_size_in_bytes == sum(a.size * a.dtype.itemsize for a in pool.values())
    assert memory.temp_size_in_bytes < 300e6  # a copy of the windows would be 935 MB
