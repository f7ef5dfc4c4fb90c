"""The MTP module of DeepSeek-V4's previews computes what its formulas say, in float64 and without our code; whole and
served."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.kv_cache import layout
from dsv3.model import DecodeBatch, Params, PrefillBatch, logits, prefill
from dsv3.model.steps import predict
from tests.dsv3.model.deepseek_v4 import with_module
from tests.dsv3.model.deepseek_v4_formulas import Array, collapsed, layer, rms
from tests.dsv3.model.golden import relative_error, run

MEMBER = "deepseek_v4_plain", 1
"""A golden model, and its layer before the module, which has entries, as the module has not."""
LENGTH, CHUNK, S = 268, 128, 3
"""Tokens, of which the last are on the second page; rows of a chunk; rows of a decode step."""
TOLERANCE = 2e-5


def reference(params: Params, cfg: ModelConfig, streams: Array, following: Array) -> tuple[Array, Array]:
    """The module's streams `[T, n, D]` and its hidden states `[T, D]`, from the streams of as many tokens."""
    mtp = jax.tree.map(lambda a: np.asarray(a[0], np.float64), params.mtp)
    embed, D = np.asarray(params.embed, np.float64), cfg.hidden_size
    e_proj, h_proj = mtp.proj[:, :D], mtp.proj[:, D:]
    embedded = rms(embed[following], mtp.embed_norm) @ e_proj.T
    x = embedded[:, None] + rms(streams, mtp.hidden_norm) @ h_proj.T
    x = layer(x, mtp.layers, cfg)
    return x, rms(collapsed(x, mtp.head_mixing), mtp.norm)


@functools.cache
def sequence() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 64, LENGTH + 1).astype(np.int32)


def tables() -> dict[str, jax.Array]:
    """The pages of one request, two in an order of chance, and its slot."""
    return dict(page_table=jnp.array([[2, 0]]), window_table=jnp.array([[1, 2]]), slots=jnp.array([1]))


def empty_pool(cfg: ModelConfig) -> layout.Pool:
    return {name: jnp.full(a.shape, jnp.nan, a.dtype) for name, a in layout.pool(cfg, "float32", 3, 3, 2).items()}


def chunk(start: int, tokens: np.ndarray, rows: int) -> PrefillBatch:
    ints = functools.partial(jnp.asarray, dtype=jnp.int32)
    padded = np.zeros(rows, np.int32)
    padded[: len(tokens)] = tokens
    return PrefillBatch(ints(padded), ints(start + np.arange(rows)), ints([0, len(tokens)]), ints([start]), **tables())


@functools.cache
def streams() -> Array:
    """The main model's streams of the sequence, `[LENGTH, n, D]`."""
    params, cfg = with_module(*MEMBER)
    step = jax.jit(lambda p, batch, pool: prefill(p, cfg, batch, pool).draft_input)
    found = step(params, chunk(0, sequence()[:-1], LENGTH), empty_pool(cfg))
    return np.asarray(found, np.float64).reshape(LENGTH, 4, -1)


@functools.cache
def wanted() -> tuple[Array, Array]:
    return reference(*with_module(*MEMBER), streams(), sequence()[1:])


def test_the_module_over_whole_sequences() -> None:
    params, cfg = with_module(*MEMBER)
    found = run(params, cfg, sequence()[None])
    (scores,) = found.mtp_logits
    assert relative_error(scores[0], wanted()[1] @ np.asarray(params.head, np.float64).T) < TOLERANCE
    assert found.expert_counts[-1].sum() == LENGTH * cfg.num_experts_per_tok


def test_the_module_depends_on_each_stream_and_on_the_next_token() -> None:
    """Otherwise the comparison would not show what is left out."""
    params, cfg = with_module(*MEMBER)
    (_, right), following = wanted(), sequence()[1:]
    for stream in range(4):
        changed = streams().copy()
        changed[:, stream] = changed[:, (stream + 1) % 4]
        assert relative_error(reference(params, cfg, changed, following)[1], right) > 0.01
    assert relative_error(reference(params, cfg, streams(), np.roll(following, 1))[1], right) > 0.01


def test_chunks_then_drafts_that_are_rejected() -> None:
    """Drafts are chained from the module's own streams, and what they leave is overwritten when tokens are known."""
    params, cfg = with_module(*MEMBER)
    step = jax.jit(lambda p, batch, pool, given: predict(p, cfg, batch, pool, given))
    pool, given, prompt = empty_pool(cfg), streams().reshape(LENGTH, -1), 250
    (all_streams, hidden), following = wanted(), sequence()[1:]
    for start in range(0, prompt, CHUNK):
        rows = slice(start, min(start + CHUNK, prompt))
        padded = np.full((CHUNK, given.shape[1]), np.nan, np.float32)
        padded[: rows.stop - start] = given[rows]
        out = step(params, chunk(start, following[rows], CHUNK), pool, padded)
        pool = out.pages
        assert relative_error(out.hidden[: rows.stop - start], hidden[rows]) < TOLERANCE
    after, known = np.asarray(out.draft_input)[prompt - start - 1], prompt  # `known` rows of the module are right
    while known + S <= LENGTH:
        assert relative_error(after, all_streams[known - 1].ravel()) < TOLERANCE
        pool = chained(params, cfg, step, pool, after, known)
        tokens = following[known : known + S].copy()
        tokens[2:] += 1  # a draft that is rejected
        batch = DecodeBatch(jnp.asarray(tokens[None]), jnp.array([known + S]), **tables())
        out = step(params, batch, pool, jnp.asarray(given[None, known : known + S], jnp.float32))
        pool = out.pages
        assert relative_error(out.hidden[0, :2], hidden[known : known + 2]) < TOLERANCE
        after, known = np.asarray(out.draft_input)[0, 1], known + 2


def chained(params: Params, cfg: ModelConfig, step: Any, pool: layout.Pool, after: np.ndarray, known: int) -> Any:
    """Two drafts behind `known` rows, each from the streams of the one before; returns the pool."""
    before, tokens = list(streams()[:known]), list(sequence()[1 : known + 1])
    x = np.asarray(after, np.float64).reshape(4, -1)
    for draft in (7, 11):
        before, tokens = [*before, x], [*tokens, draft]
        batch = DecodeBatch(jnp.array([[draft]]), jnp.array([len(tokens)]), **tables())
        out = step(params, batch, pool, jnp.asarray(after, jnp.float32)[None, None])
        pool, after = out.pages, np.asarray(out.draft_input)[0, 0]
        found, hidden = reference(params, cfg, np.stack(before), np.array(tokens))
        x = found[-1]
        assert relative_error(out.hidden[0, 0], hidden[-1]) < TOLERANCE
        scores = logits(params, cfg, out.hidden[0, 0])
        assert relative_error(scores, hidden[-1] @ np.asarray(params.head, np.float64).T) < TOLERANCE
    return pool
