"""A stand-in for the model whose every logit depends on all earlier tokens *as read back from the pages*.

A wrong page, a lost write or a stray one changes the text. Latents are (token, position); the hidden state is a hash of
all the latents of the request, read through its page table.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import LATENTS, PAGE_SIZE, ModelConfig
from dsv3.engine.functions import DraftFunctions, StepFunctions
from dsv3.kv_cache.layout import Pool
from dsv3.model.batch import DecodeBatch, PrefillBatch
from sharding.mesh import RANKS

VOCAB = 67
EOS = 0
POISON = VOCAB - 1
"""A prompt that ends in this token gets NaN logits; no answer ever contains it."""


class ToyOutput(NamedTuple):
    hidden: Any
    pages: Any


def toy_config(**changes: Any) -> ModelConfig:
    """A configuration with the cache layout the toy needs: one layer, two values a token."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "kv_lora_rank": 1,
        "qk_nope_head_dim": 1,
        "qk_rope_head_dim": 1,
        "v_head_dim": 1,
        "intermediate_size": 2,
        "moe_intermediate_size": 2,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "eos_token_ids": (EOS,),
    }
    return ModelConfig(**(fields | changes))


def _hash(pages: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
    """Hash [2] of the first `length` latents of a request with page table [MP]."""
    latents = pages[jnp.clip(table, 0, pages.shape[0] - 1)].reshape(-1, 2).astype(jnp.uint32)
    index = jnp.arange(latents.shape[0], dtype=jnp.uint32)
    return hidden_of(jnp.sum(jnp.where(index < length, mixed(latents[:, 0], latents[:, 1], index), 0)))


def mixed(tokens: jax.Array, positions: jax.Array, index: jax.Array) -> jax.Array:
    """What tokens add to the sum of a text, uint32; `positions` are what was written beside them, and equal `index`."""
    return (tokens + 1) * (index * jnp.uint32(2654435761) + 97) ^ (positions * 40503)


def hidden_of(total: jax.Array) -> jax.Array:
    """Hidden state [2] from the sum over a text, uint32."""
    total = (total ^ (total >> 15)) * jnp.uint32(2246822519)
    return jnp.stack([total & 0xFFF, (total >> 12) & 0xFFF]).astype(jnp.float32)


def _write(pages: jax.Array, table: jax.Array, tokens: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
    page = jnp.take_along_axis(table, (positions // PAGE_SIZE)[:, None], axis=1)[:, 0]
    page = jnp.where(valid, page, pages.shape[0])
    latents = jnp.stack([tokens, positions], -1).astype(pages.dtype)
    return pages.at[page, positions % PAGE_SIZE].set(latents, mode="drop")


def prefill(params: Any, cfg: ModelConfig, batch: PrefillBatch, pages: Pool) -> ToyOutput:
    rows = jnp.arange(batch.tokens.shape[0])
    chunk = jnp.minimum(jnp.searchsorted(batch.cu_lengths[1:], rows, side="right"), batch.context_lengths.shape[0] - 1)
    table = batch.page_table[chunk]
    latents = _write(pages[LATENTS], table, batch.tokens, batch.positions, rows < batch.cu_lengths[-1])
    hidden = jax.vmap(lambda t, p: _hash(latents, t, p + 1))(table, batch.positions)
    hidden = jnp.where((batch.tokens == POISON)[:, None], jnp.nan, hidden)
    return ToyOutput(hidden + params, {LATENTS: latents})


def decode(params: Any, cfg: ModelConfig, batch: DecodeBatch, pages: Pool) -> ToyOutput:
    """Each token of a row reads from the pages what stands before it."""
    hidden, latents = [], pages[LATENTS]
    for i in range(batch.tokens.shape[1]):
        lengths = _length_at(batch, i)
        latents = _write(latents, batch.page_table, batch.tokens[:, i], jnp.maximum(lengths - 1, 0), lengths > 0)
        hidden.append(jax.vmap(lambda t, n, p=latents: _hash(p, t, n))(batch.page_table, lengths))
    return ToyOutput(jnp.stack(hidden, axis=1) + params, {LATENTS: latents})


def _length_at(batch: DecodeBatch, i: int) -> jax.Array:
    """Tokens up to column i of a row, 0 for padding."""
    return jnp.where(batch.lengths > 0, batch.lengths - (batch.tokens.shape[1] - 1 - i), 0)


def logits(params: Any, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
    state = hidden[..., 0].astype(jnp.uint32) | (hidden[..., 1].astype(jnp.uint32) << 12)
    mixed = (state[..., None] + 1) * (jnp.arange(cfg.vocab_size, dtype=jnp.uint32) * jnp.uint32(2654435761) + 12345)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(3266489917)
    scores = ((mixed >> 8) & 0xFFFF).astype(jnp.float32) / 8192.0
    scores = jnp.where(jnp.arange(cfg.vocab_size) == POISON, -1.0, scores)
    return jnp.where(jnp.isnan(hidden[..., :1]), jnp.nan, scores)


FUNCTIONS = StepFunctions(prefill, decode, logits)


def drafting(right_of: int | None) -> StepFunctions:
    """The toy with a module that is right but at each `right_of`-th place; 1 is never, 0 always.

    None: the parameters are this number (int32), and engines with other numbers share programs.

    The module owns the second cache layer. Its latent of a position is that of the next token, so a lost or stray write
    there makes right drafts wrong. A wrong draft is `POISON`, which no answer contains: NaN has it for its maximum.
    """

    def ahead(every: Any, pages: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
        """Hash of the first `length + 1` tokens, of which only the first is read from the main model's layer."""
        half = pages.shape[0] // 2
        first = pages[table[0], :1]
        own = pages[jnp.clip(table, 0, half - 1) + half].reshape(-1, 2)
        shifted = jnp.concatenate([first, own[:-1]]).reshape(-1, PAGE_SIZE, 2)
        hidden = _hash(shifted, jnp.arange(len(table)), length + 1)
        return jnp.where((every > 0) & (length % jnp.maximum(every, 1) == 0), jnp.nan, hidden)

    def write(pages: jax.Array, table: jax.Array, tokens: jax.Array, at: jax.Array, valid: jax.Array) -> jax.Array:
        half = pages.shape[0] // 2
        page = jnp.take_along_axis(table, (at // PAGE_SIZE)[:, None], axis=1)[:, 0] + half
        latents = jnp.stack([tokens, at + 1], -1).astype(pages.dtype)
        return pages.at[jnp.where(valid, page, 2 * half), at % PAGE_SIZE].set(latents, mode="drop")

    def draft_prefill(params: Any, cfg: ModelConfig, batch: PrefillBatch, pages: Pool, hidden: jax.Array) -> ToyOutput:
        rows = jnp.arange(batch.tokens.shape[0])
        chunk = jnp.searchsorted(batch.cu_lengths[1:], rows, side="right")
        table = batch.page_table[jnp.minimum(chunk, batch.context_lengths.shape[0] - 1)]
        own = write(pages[LATENTS], table, batch.tokens, batch.positions, rows < batch.cu_lengths[-1])
        hidden = jax.vmap(lambda t, p: ahead(_every(params), own, t, p + 1))(table, batch.positions)
        return ToyOutput(hidden, {LATENTS: own})

    def draft_decode(params: Any, cfg: ModelConfig, batch: DecodeBatch, pages: Pool, hidden: jax.Array) -> ToyOutput:
        out, own = [], pages[LATENTS]
        for i in range(batch.tokens.shape[1]):
            lengths = _length_at(batch, i)
            own = write(own, batch.page_table, batch.tokens[:, i], jnp.maximum(lengths - 1, 0), lengths > 0)
            out.append(jax.vmap(lambda t, n, p=own: ahead(_every(params), p, t, n))(batch.page_table, lengths))
        return ToyOutput(jnp.stack(out, axis=1), {LATENTS: own})

    def _every(params: Any) -> Any:
        return params if right_of is None else right_of

    def main(step: Any) -> Any:
        return lambda params, *args: step(PARAMS if right_of is None else params, *args)

    def predict(params: Any, cfg: ModelConfig, batch: PrefillBatch | DecodeBatch, *given: Any) -> ToyOutput:
        return (draft_prefill if isinstance(batch, PrefillBatch) else draft_decode)(params, cfg, batch, *given)

    draft = DraftFunctions(jnp.float32, predict)
    return StepFunctions(main(prefill), main(decode), logits, draft=draft)


class CrampedOutput(NamedTuple):
    hidden: Any
    pages: Any
    overflows: Any


def cramped(functions: StepFunctions = FUNCTIONS) -> StepFunctions:
    """The toy behind buffers that hold a third of a bucket's tokens, if they are even: those choose one device.

    A step that overflows computes other tokens, so what it writes and what comes out of it is wrong on every rank.
    """

    def agreed(tokens: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        room = max(tokens.shape[-1], tokens.size // 3) if tokens.ndim > 1 else max(1, tokens.size // 3)
        lost = jnp.sum(valid & (tokens % 2 == 0)) > room
        overflows = jax.lax.pmax(lost.astype(jnp.int32), RANKS)
        return jnp.where(overflows > 0, tokens + 1, tokens), overflows

    def cramped_prefill(params: Any, cfg: ModelConfig, batch: PrefillBatch, pages: Pool) -> CrampedOutput:
        tokens, overflows = agreed(batch.tokens, jnp.arange(batch.tokens.size) < batch.cu_lengths[-1])
        out = functions.prefill(params, cfg, dataclasses.replace(batch, tokens=tokens), pages)
        return CrampedOutput(*out, overflows)

    def cramped_decode(params: Any, cfg: ModelConfig, batch: DecodeBatch, pages: Pool) -> CrampedOutput:
        tokens, overflows = agreed(batch.tokens, batch.lengths[:, None] > 0)
        out = functions.decode(params, cfg, dataclasses.replace(batch, tokens=tokens), pages)
        return CrampedOutput(*out, overflows)

    return dataclasses.replace(functions, prefill=cramped_prefill, decode=cramped_decode, may_overflow=True)


PARAMS = jnp.zeros(())


def expected_tokens(prompt: list[int], count: int, stop: tuple[int, ...] = (EOS,)) -> list[int]:
    """Greedy answer of the toy, computed without pages."""
    answer, total = [], _total(prompt)
    for _ in range(count):
        answer.append(int(_scores(total).argmax()))
        if answer[-1] in stop:
            break
        total += _mixed(answer[-1], len(prompt) + len(answer) - 1)
    return answer


def scores(tokens: list[int]) -> list[int]:
    """The toy's logits after `tokens`, times 8192."""
    return [*_scores(_total(tokens)).tolist(), -8192]


def _total(tokens: list[int]) -> int:
    """The sum that `_hash` begins with, of which 32 bits count."""
    return int(_mixed(np.array(tokens, np.int64), np.arange(len(tokens))).sum())


def _mixed(token: Any, i: Any) -> Any:
    """What a token at position i adds to it: of a number or of an array."""
    return (token + 1) * (i * 2654435761 + 97) & _MASK ^ i * 40503


def _scores(total: int) -> np.ndarray:
    """The toy's logits but the last, times 8192, from the sum over all tokens."""
    total &= _MASK
    total = ((total ^ (total >> 15)) * 2246822519) & _MASK
    state = (total & 0xFFF) | (((total >> 12) & 0xFFF) << 12)
    mixed = np.uint32(state + 1) * _WORDS
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(3266489917)
    return (mixed >> 8) & 0xFFFF


_MASK = 0xFFFFFFFF
_WORDS = np.arange(POISON, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(12345)
