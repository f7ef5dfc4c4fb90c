"""The decode state on the device, one row a slot, and how a request's parameters get into it.

The arrays here are one rank's; the engine carries them with a leading rank axis. Scatters to row `max_num_seqs` are
padding and are dropped.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv3.engine.config import EngineConfig
from dsv3.engine.sampling import Adjustments, Controls
from dsv3.engine.sequence import FULL, Sequence
from dsv3.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

_MAX_EOS = 16
_MAX_FORBIDDEN = MAX_STOP_TOKEN_IDS + _MAX_EOS


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """`lengths` counts a slot's tokens, the last sampled one (in `tokens`, not yet in the cache) included."""

    tokens: Any  # [N] int32
    lengths: Any  # [N] int32
    page_table: Any  # [N, MP] int32
    controls: Any  # [N, NUM_FIELDS] int32
    load: Any = None  # int32: `step_bodies.split_load`; None where experts are not spread


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdjustState:
    """What only penalties, logit_bias and min_tokens need; it exists once a request has asked for one of them."""

    counts: Any  # [N, W] int32
    in_prompt: Any  # [N, W] bool
    bias_ids: Any  # [N, 300] int32
    bias: Any  # [N, 300] float32
    forbidden_ids: Any  # [N, 144] int32


def decode_state_shapes(cfg: EngineConfig, load_size: int | None = None) -> DecodeState:
    """Shapes and dtypes for all ranks; `load_size` is the length of `load`."""
    lead = (cfg.num_ranks, cfg.max_num_seqs)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *shape), jnp.int32)

    load = None if load_size is None else jax.ShapeDtypeStruct((cfg.num_ranks, load_size), jnp.int32)
    return DecodeState(ints(), ints(), ints(cfg.pages_per_seq), ints(NUM_FIELDS), load)


def adjust_state_shapes(cfg: EngineConfig, vocab_size: int) -> AdjustState:
    """Shapes and dtypes for all ranks: 5 bytes a slot and vocabulary entry."""
    lead = (cfg.num_ranks, cfg.max_num_seqs)

    def array(width: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, width), dtype)

    return AdjustState(
        counts=array(vocab_size, jnp.int32),
        in_prompt=array(vocab_size, jnp.bool),
        bias_ids=array(MAX_LOGIT_BIAS, jnp.int32),
        bias=array(MAX_LOGIT_BIAS, jnp.float32),
        forbidden_ids=array(_MAX_FORBIDDEN, jnp.int32),
    )


def control_row(sequence: Sequence) -> np.ndarray:
    """A request's row of `DecodeState.controls`, `[NUM_FIELDS]` int32."""
    s = sequence.sampling
    row = np.zeros(NUM_FIELDS, np.int32)
    floats = (s.temperature, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
    row[: len(floats)] = np.array(floats, np.float32).view(np.int32)
    row[Field.TOP_K] = max(0, s.top_k)
    row[Field.SEED_LOW : Field.SEED_LOW - 2 : -1] = np.array([sequence.seed], np.int64).view(np.int32)
    row[Field.MIN_LENGTH] = min(sequence.prompt_length + s.min_tokens, 2**31 - 1)
    row[Field.ADJUSTED] = sequence.variant == FULL
    return row


def controls_at(state: DecodeState, slots: jax.Array) -> Controls:
    """Sampling parameters of the rows `slots` ([B] int32)."""
    rows = state.controls[slots]
    floats = lax.bitcast_convert_type(rows[:, : Field.TOP_K], jnp.float32)
    seed = lax.bitcast_convert_type(rows[:, Field.SEED_HIGH : Field.SEED_LOW + 1], jnp.uint32)
    return Controls(
        temperature=floats[:, Field.TEMPERATURE],
        top_p=floats[:, Field.TOP_P],
        min_p=floats[:, Field.MIN_P],
        top_k=rows[:, Field.TOP_K],
        seed=seed,
        position=state.lengths[slots],
    )


def adjustments_at(state: DecodeState, adjust: AdjustState, slots: jax.Array) -> Adjustments:
    """What changes the logits of the rows `slots`; neutral for rows that asked for nothing."""
    rows = state.controls[slots]
    floats = lax.bitcast_convert_type(rows[:, : Field.TOP_K], jnp.float32)
    vocab_size = adjust.counts.shape[-1]
    on = rows[:, Field.ADJUSTED, None] > 0
    early = on & (state.lengths[slots] < rows[:, Field.MIN_LENGTH])[:, None]
    return Adjustments(
        repetition=floats[:, Field.REPETITION],
        presence=floats[:, Field.PRESENCE],
        frequency=floats[:, Field.FREQUENCY],
        counts=adjust.counts[slots],
        in_prompt=adjust.in_prompt[slots],
        bias_ids=jnp.where(on, adjust.bias_ids[slots], vocab_size),
        bias=adjust.bias[slots],
        forbidden_ids=jnp.where(early, adjust.forbidden_ids[slots], vocab_size),
    )


@dataclasses.dataclass(frozen=True)
class AdjustRequest:
    """Host arrays that set one slot's row of `AdjustState`, all of fixed shape."""

    slot: np.ndarray  # [ranks] int32, max_num_seqs on the ranks that have nothing to set
    tokens: np.ndarray  # [ranks, max_model_len] int32, vocabulary size in padding
    in_answer: np.ndarray  # [ranks, max_model_len] bool
    bias_ids: np.ndarray  # [ranks, 300] int32
    bias: np.ndarray  # [ranks, 300] float32
    forbidden_ids: np.ndarray  # [ranks, 144] int32


def adjust_request(sequence: Sequence, cfg: EngineConfig, vocab_size: int) -> AdjustRequest:
    """What a request that starts (again, after a pre-emption) writes into its slot."""
    rank, slot = divmod(sequence.slot, cfg.max_num_seqs)
    request = empty_adjust_request(cfg, vocab_size)
    count = len(sequence.tokens)
    request.slot[rank] = slot
    request.tokens[rank, :count] = sequence.tokens
    request.in_answer[rank, sequence.prompt_length : count] = True
    bias = sequence.sampling.logit_bias
    request.bias_ids[rank, : len(bias)] = list(bias)
    request.bias[rank, : len(bias)] = list(bias.values())
    stop = sorted(sequence.stop_ids)[:_MAX_FORBIDDEN]
    request.forbidden_ids[rank, : len(stop)] = stop
    return request


def empty_adjust_request(cfg: EngineConfig, vocab_size: int) -> AdjustRequest:
    """A request that sets nothing."""
    ranks = cfg.num_ranks
    return AdjustRequest(
        slot=np.full(ranks, cfg.max_num_seqs, np.int32),
        tokens=np.full((ranks, cfg.max_model_len), vocab_size, np.int32),
        in_answer=np.zeros((ranks, cfg.max_model_len), bool),
        bias_ids=np.full((ranks, MAX_LOGIT_BIAS), vocab_size, np.int32),
        bias=np.zeros((ranks, MAX_LOGIT_BIAS), np.float32),
        forbidden_ids=np.full((ranks, _MAX_FORBIDDEN), vocab_size, np.int32),
    )
