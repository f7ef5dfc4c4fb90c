"""The decode state on the device, one row per batch slot; how requests' parameters get into it; and the prefill batch.

The arrays here are one rank's; the engine adds a leading rank axis. Letters besides the glossary's: `Ns` slots of a
rank. Scatters to slot `Ns` are padding and are dropped.
"""

import dataclasses
import enum
import struct
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv3.config.engine import EngineConfig
from dsv3.engine.device.sampling import Adjustments, Controls
from dsv3.model.batch import AttentionForm, DecodeBatch, PrefillBatch
from dsv3.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from dsv3.scheduler.sequence import FULL, Sequence
from pallas_kernels.search import search

NO_DRAFT = -1
"""Stands in `DecodeState.tokens` where there is no draft; no token equals it."""
_MAX_EOS = 16
MAX_FORBIDDEN = MAX_STOP_TOKEN_IDS + _MAX_EOS


class Field(enum.IntEnum):
    """Columns of `DecodeState.controls`; the first six are float32 bit patterns."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5
    TOP_K = 6
    SEED_HIGH = 7
    SEED_LOW = 8
    MIN_LENGTH = 9
    ADJUSTED = 10


NUM_FIELDS = len(Field)
HEADER = 4 + NUM_FIELDS
"""Columns of a chunk on the device before its page table, behind which its window pages are, for a model with a window.

They are: slot, its tokens, tokens before it, the token that follows it in the prompt (-1: none, the chunk samples), and
sampling parameters.
"""
_CONTROLS = struct.Struct("=6fiiIii")  # a row, in the order of `Field`: five times as fast as column by column


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """The running requests by slot.

    `lengths` counts a slot's tokens, including the last sampled one, which is not yet in the cache. That is column 0 of
    `tokens`; the other columns are drafts of the next ones, or `NO_DRAFT`. `counters` are those of the routed experts
    (`dsv3.engine.functions.SpreadExperts`), if there are some.
    """

    tokens: Any  # [Ns, S] int32
    lengths: Any  # [Ns] int32
    page_table: Any  # [Ns, Mp] int32
    controls: Any  # [Ns, NUM_FIELDS] int32
    counters: Any = None  # [n] int32
    window_table: Any = None  # [Ns, Mp] int32, for a model with a window
    texts: Any = None  # [Ns, max_model_len] int32, for drafts by prompt lookup


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdjustState:
    """State of penalties, logit_bias and min_tokens, allocated once a request uses one of them."""

    counts: Any  # [Ns, W] int32
    in_prompt: Any  # [Ns, W] bool
    bias_ids: Any  # [Ns, 300] int32
    bias: Any  # [Ns, 300] float32
    forbidden_ids: Any  # [Ns, 144] int32


def decode_state_shapes(cfg: EngineConfig, num_counters: int | None) -> DecodeState:
    """Returns shapes and dtypes for all ranks."""
    lead = (cfg.num_ranks, cfg.max_num_seqs)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *shape), jnp.int32)

    counters = None if num_counters is None else jax.ShapeDtypeStruct((cfg.num_ranks, num_counters), jnp.int32)
    table = ints(cfg.pages_per_seq)
    windows = table if cfg.has_window else None
    looks_up = cfg.speculative is not None and cfg.speculative.method == "ngram"
    texts = ints(cfg.max_model_len) if looks_up else None
    return DecodeState(ints(cfg.tokens_per_row), ints(), table, ints(NUM_FIELDS), counters, windows, texts)


def adjust_state_shapes(cfg: EngineConfig, vocab_size: int) -> AdjustState:
    """Returns shapes and dtypes for all ranks: 5 bytes per slot and vocabulary entry."""
    lead = (cfg.num_ranks, cfg.max_num_seqs)

    def array(width: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, width), dtype)

    return AdjustState(
        counts=array(vocab_size, jnp.int32),
        in_prompt=array(vocab_size, jnp.bool),
        bias_ids=array(MAX_LOGIT_BIAS, jnp.int32),
        bias=array(MAX_LOGIT_BIAS, jnp.float32),
        forbidden_ids=array(MAX_FORBIDDEN, jnp.int32),
    )


def with_drafts(state: DecodeState, slots: jax.Array, drafts: jax.Array, first: int = 1) -> DecodeState:
    """Returns the state of one rank with `drafts` `[B, n]` of `slots` `[B]` from column `first` on, and none behind."""
    columns = jnp.arange(first, state.tokens.shape[1])
    drafts = jnp.pad(drafts, ((0, 0), (0, len(columns) - drafts.shape[1])), constant_values=NO_DRAFT)
    return dataclasses.replace(state, tokens=state.tokens.at[slots[:, None], columns].set(drafts, mode="drop"))


def control_rows(sequences: Iterable[Sequence]) -> np.ndarray:
    """Returns requests' rows of `DecodeState.controls`, `[n, NUM_FIELDS]` int32."""
    rows = bytearray().join([s.controls or _packed_controls(s) for s in sequences])
    return np.frombuffer(rows, np.int32).reshape(-1, NUM_FIELDS)


def _packed_controls(sequence: Sequence) -> bytes:
    """Returns a request's row, and caches it: each chunk of its prompt has the same."""
    s = sequence.request.sampling
    sequence.controls = _CONTROLS.pack(
        *(s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty),
        max(0, s.top_k),
        sequence.seed >> 32,
        sequence.seed & 2**32 - 1,
        min(sequence.prompt_length + s.min_tokens, 2**31 - 1),
        sequence.variant == FULL,
    )
    return sequence.controls


def controls_at(state: DecodeState, slots: jax.Array, offset: int | jax.Array = 0) -> Controls:
    """Returns sampling parameters of the requests in `slots` ([B] int32) for a token `offset` behind their lengths.

    The offset is one for all, or `[B]`.
    """
    rows = state.controls[slots]
    floats = lax.bitcast_convert_type(rows[:, : Field.TOP_K], jnp.float32)
    seed = lax.bitcast_convert_type(rows[:, Field.SEED_HIGH : Field.SEED_LOW + 1], jnp.uint32)
    return Controls(
        temperature=floats[:, Field.TEMPERATURE],
        top_p=floats[:, Field.TOP_P],
        min_p=floats[:, Field.MIN_P],
        top_k=rows[:, Field.TOP_K],
        seed=seed,
        position=state.lengths[slots] + offset,
    )


def adjustments_at(
    state: DecodeState, adjust: AdjustState, slots: jax.Array, offset: int | jax.Array = 0
) -> Adjustments:
    """Returns the logit adjustments of the requests in `slots`; neutral for requests without."""
    rows = state.controls[slots]
    floats = lax.bitcast_convert_type(rows[:, : Field.TOP_K], jnp.float32)
    vocab_size = adjust.counts.shape[-1]
    adjusted = rows[:, Field.ADJUSTED, None] > 0
    early = adjusted & (state.lengths[slots] + offset < rows[:, Field.MIN_LENGTH])[:, None]
    return Adjustments(
        repetition=floats[:, Field.REPETITION],
        presence=floats[:, Field.PRESENCE],
        frequency=floats[:, Field.FREQUENCY],
        counts=adjust.counts[slots],
        in_prompt=adjust.in_prompt[slots],
        bias_ids=jnp.where(adjusted, adjust.bias_ids[slots], vocab_size),
        bias=adjust.bias[slots],
        forbidden_ids=jnp.where(early, adjust.forbidden_ids[slots], vocab_size),
    )


def chunk_columns(cfg: EngineConfig) -> int:
    """Returns the columns of a chunk on the device: `HEADER + Mp`, or `HEADER + 2 * Mp` with window pages."""
    return HEADER + cfg.pages_per_seq * (2 if cfg.has_window else 1)


def ragged_batch(
    cfg: EngineConfig,
    tokens: jax.Array,
    rows: jax.Array,
    form: AttentionForm = AttentionForm.ANY,
    capacity: int = 0,
) -> PrefillBatch:
    """Returns the model's flat batch of the chunks `rows` `[B, columns]` over `tokens` `[T]`."""
    count, context = rows[:, 1], rows[:, 2]
    ends = jnp.cumsum(count)
    cu_lengths = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    chunk = search(ends, jnp.arange(tokens.shape[0]), side="right")
    chunk = jnp.minimum(chunk, rows.shape[0] - 1)
    positions = jnp.maximum(context[chunk] + jnp.arange(tokens.shape[0]) - cu_lengths[chunk], 0)
    batch = PrefillBatch(tokens, positions, cu_lengths, context, rows[:, HEADER:], form, capacity)
    if not cfg.has_window:
        return batch
    pages, windows = jnp.split(rows[:, HEADER:], 2, axis=1)
    return dataclasses.replace(batch, page_table=pages, window_table=windows, slots=rows[:, 0])


def existing(state: DecodeState, slots: jax.Array) -> jax.Array:
    """Returns the slots `[B]` of rows, for padding any slot."""
    return jnp.minimum(slots, state.lengths.shape[0] - 1)


def decode_batch(
    state: DecodeState,
    slots: jax.Array,
    tokens: jax.Array,
    ahead: int | jax.Array,
    form: AttentionForm = AttentionForm.ANY,
) -> DecodeBatch:
    """Returns the model's batch of `tokens` `[B, S]` of `slots` `[B]`, the last of them `ahead` of the slots' lengths.

    That is one number for all, or `[B]`. Rows of padding have length 0.
    """
    mine = existing(state, slots)
    lengths = jnp.where(slots < state.lengths.shape[0], state.lengths[mine] + ahead, 0)
    batch = DecodeBatch(tokens, lengths, state.page_table[mine], form)
    if state.window_table is None:
        return batch
    return dataclasses.replace(batch, window_table=state.window_table[mine], slots=mine)


def last_rows(batch: PrefillBatch) -> jax.Array:
    """Returns the row of each chunk's last token, `[B]`; any row for padding."""
    return jnp.maximum(batch.cu_lengths[1:] - 1, 0)


def next_tokens(batch: PrefillBatch, rows: jax.Array, sampled: jax.Array) -> jax.Array:
    """Returns the token that follows each token of the batch, `[T]`: in the prompt, or `sampled` `[B]` at its end."""
    count, follows = rows[:, 1], rows[:, 3]
    last = jnp.where(count > 0, last_rows(batch), batch.tokens.shape[0])
    after = jnp.where(follows < 0, jnp.maximum(sampled, 0), follows)
    return jnp.roll(batch.tokens, -1).at[last].set(after, mode="drop")
