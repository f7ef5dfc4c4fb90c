"""The bodies of the compiled programs, written for one rank: pure functions without the rank axis.

A step is three programs: the model's forward pass (prefill or decode), the sampler, and, where a request asked for
them, log-probabilities. The sampler stands apart so that its variants do not multiply the forward programs to compile.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dsv3.cache.page import PAGE_SIZE
from dsv3.config import ModelConfig
from dsv3.engine import sampling
from dsv3.engine.config import EngineConfig
from dsv3.engine.sequence import FULL, GREEDY
from dsv3.engine.state import NUM_FIELDS, AdjustState, DecodeState, adjustments_at, controls_at
from dsv3.model import decoder, steps
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.sampling_params import MAX_LOGPROBS
from pallas_kernels.backend import Backend
from sharding.placement import Placement
from sharding.rules import RANKS
from sharding.transport import MAX_HOPS, Machine, StepTraffic

PREFILL_HEADER = 4 + NUM_FIELDS
"""Columns of a prefill row before its page table: slot, tokens in the chunk, tokens before it, 1 if it samples."""


class StepResult(Protocol):
    """What a step function returns; `dsv3.model.steps.StepOutput` is one."""

    @property
    def hidden(self) -> Any: ...

    @property
    def pages(self) -> Any: ...

    @property
    def expert_counts(self) -> Any: ...

    @property
    def rounds(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class SpreadExperts:
    """Routed experts in slots on all devices, for an engine that counts their load and moves them.

    `take(params)` gives the stacks, a tree of `[L, R, ...]` arrays, and their `Placement`; `put(params, stacks,
    placement)` the parameters with these in their place. Both work on trees of shapes and of partitions too.
    """

    num_layers: int
    num_experts: int
    num_slots: int
    num_groups: int
    machine: Machine
    take: Callable[[Any], tuple[Any, Placement]]
    put: Callable[[Any, Any, Placement], Any]


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """The model, as the engine sees it.

    `prefill(params, cfg, PrefillBatch, pages)` gives hidden `[T, D]`, `decode(params, cfg, DecodeBatch, pages)` hidden
    `[B, S, D]`, both with the new pages; `logits(params, cfg, hidden)` is float32 `[..., W]`. `param_specs` says how
    the parameters lie on the ranks: a tree of partitions, or one for all of them. With `experts` the results have
    `expert_counts` `[L, E]` and `rounds` `[2]` too, and `traffic(tokens, is_prefill)` tells what a device sends in the
    MoE layers of a step with this many tokens on each rank.
    """

    prefill: Callable[[Any, ModelConfig, PrefillBatch, jax.Array], StepResult]
    decode: Callable[[Any, ModelConfig, DecodeBatch, jax.Array], StepResult]
    logits: Callable[[Any, ModelConfig, jax.Array], jax.Array]
    param_specs: Any = dataclasses.field(default_factory=PartitionSpec)
    experts: SpreadExperts | None = None
    traffic: Callable[[int, bool], StepTraffic] | None = None


def model_functions(backend: Backend | None = None) -> StepFunctions:
    """The served model with kernels of `backend` (None: those that suit the device)."""

    def prefill(params: Any, cfg: ModelConfig, batch: PrefillBatch, pages: jax.Array) -> StepResult:
        return steps.prefill(params, cfg, batch, pages, backend=backend)

    def decode(params: Any, cfg: ModelConfig, batch: DecodeBatch, pages: jax.Array) -> StepResult:
        return steps.decode(params, cfg, batch, pages, backend=backend)

    return StepFunctions(prefill, decode, decoder.logits)


def prefill_body(
    functions: StepFunctions,
    cfg: ModelConfig,
    params: Any,
    pages: jax.Array,
    state: DecodeState,
    tokens: jax.Array,
    rows: jax.Array,
    *,
    program: int = 0,
) -> tuple[jax.Array, DecodeState, jax.Array, jax.Array]:
    """Runs the chunks `rows` `[G, PREFILL_HEADER + MP]` over `tokens` `[T]` and enters them into the decode state.

    Returns pages, state, logits `[G, W]` after each chunk's last token, and the slots `[G]` that shall sample.
    `program` is this program's number in `EngineConfig.forward_programs`, under which it counts.
    """
    slots, count, context, samples = (rows[:, i] for i in range(4))
    num_slots = state.tokens.shape[0]
    ends = jnp.cumsum(count)
    cu_lengths = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    chunk = jnp.searchsorted(ends, jnp.arange(tokens.shape[0]), side="right")
    chunk = jnp.minimum(chunk, rows.shape[0] - 1)
    positions = jnp.maximum(context[chunk] + jnp.arange(tokens.shape[0]) - cu_lengths[chunk], 0)
    table = rows[:, PREFILL_HEADER:]
    out = functions.prefill(params, cfg, PrefillBatch(tokens, positions, cu_lengths, context, table), pages)
    logits = functions.logits(params, cfg, out.hidden[jnp.maximum(ends - 1, 0)])
    state = DecodeState(
        tokens=state.tokens,
        lengths=state.lengths.at[slots].set(context + count, mode="drop"),
        page_table=state.page_table.at[slots].set(table, mode="drop"),
        controls=state.controls.at[slots].set(rows[:, 4:PREFILL_HEADER], mode="drop"),
        load=counted(state.load, out, program),
    )
    return out.pages, state, logits, jnp.where(samples > 0, slots, num_slots)


def decode_body(
    functions: StepFunctions,
    cfg: ModelConfig,
    params: Any,
    pages: jax.Array,
    state: DecodeState,
    rows: jax.Array,
    *,
    program: int = 0,
) -> tuple[jax.Array, DecodeState, jax.Array, jax.Array]:
    """Runs the last token of the slots in `rows` `[B, 2]` (slot, new page or -1).

    Returns pages, state, logits `[B, W]` and the slots `[B]` that shall sample. `program` as in `prefill_body`.
    """
    slots, new_page = rows[:, 0], rows[:, 1]
    num_slots = state.tokens.shape[0]
    held = jnp.minimum(slots, num_slots - 1)
    lengths = jnp.where(slots < num_slots, state.lengths[held], 0)
    page_index = jnp.maximum(lengths - 1, 0) // PAGE_SIZE
    page_table = state.page_table.at[jnp.where(new_page >= 0, slots, num_slots), page_index].set(new_page, mode="drop")
    batch = DecodeBatch(state.tokens[held][:, None], lengths, page_table[held])
    out = functions.decode(params, cfg, batch, pages)
    logits = functions.logits(params, cfg, out.hidden[:, -1])
    state = dataclasses.replace(state, page_table=page_table, load=counted(state.load, out, program))
    return out.pages, state, logits, slots


def load_size(experts: SpreadExperts, cfg: EngineConfig) -> int:
    """Length of `DecodeState.load`: see `split_load`."""
    return experts.num_layers * experts.num_experts + len(cfg.forward_programs) * (MAX_HOPS + 1)


def counted(load: jax.Array | None, out: StepResult, program: int) -> jax.Array | None:
    """`DecodeState.load` after a step."""
    if load is None:
        return None
    counts = out.expert_counts.ravel()
    first = counts.size + program * (MAX_HOPS + 1)
    load = load.at[: counts.size].add(counts)
    return load.at[first : first + MAX_HOPS + 1].add(jnp.append(out.rounds, 1))


def split_load(load: np.ndarray, experts: SpreadExperts, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """What was read of all ranks: (token, expert) pairs `[L, E]`; by forward program rounds of each hop, and steps."""
    pairs = experts.num_layers * experts.num_experts
    programs = load[pairs:].reshape(-1, MAX_HOPS + 1) // num_ranks  # equal on every rank
    return load[:pairs].reshape(experts.num_layers, -1).astype(np.int64), programs.astype(np.int64)


def read_load_body(load: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Starts counting anew; also returns the sum of the ranks' loads."""
    return jnp.zeros_like(load), jax.lax.psum(load, RANKS)


def sample_body(
    variant: int, state: DecodeState, adjust: AdjustState | None, logits: jax.Array, slots: jax.Array
) -> tuple[DecodeState, AdjustState | None, jax.Array]:
    """Samples a token for each of `slots` `[B]` from `logits` `[B, W]` and advances their state.

    Returns state, adjust state and tokens `[B]`, -1 where the logits were not finite (the state then gets token 0).
    """
    num_slots = state.tokens.shape[0]
    held = jnp.minimum(slots, num_slots - 1)
    if variant == FULL and adjust is not None:
        logits = sampling.adjusted(logits, adjustments_at(state, adjust, held))
    drawn = sampling.greedy(logits) if variant == GREEDY else sampling.sample(logits, controls_at(state, held))
    tokens = sampling.guard(logits, drawn)
    kept = jnp.maximum(tokens, 0)
    if variant == FULL and adjust is not None:
        adjust = dataclasses.replace(adjust, counts=adjust.counts.at[slots, kept].add(1, mode="drop"))
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[slots].set(kept, mode="drop"),
        lengths=state.lengths.at[slots].add(1, mode="drop"),
    )
    return state, adjust, tokens


def logprobs_body(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of `tokens` `[B]` and of the 20 best, of the model's own distribution."""
    return sampling.log_probabilities(logits, tokens, MAX_LOGPROBS)


def adjust_body(
    adjust: AdjustState,
    slot: jax.Array,
    tokens: jax.Array,
    in_answer: jax.Array,
    bias_ids: jax.Array,
    bias: jax.Array,
    forbidden_ids: jax.Array,
) -> AdjustState:
    """Sets one slot's row: `tokens` are counted as the answer's where `in_answer`, else noted as the prompt's."""
    vocab_size = adjust.counts.shape[-1]
    counts = jnp.zeros(vocab_size, jnp.int32).at[tokens].add(in_answer.astype(jnp.int32), mode="drop")
    prompt_ids = jnp.where(in_answer, vocab_size, tokens)
    in_prompt = jnp.zeros(vocab_size, jnp.bool).at[prompt_ids].set(True, mode="drop")
    return AdjustState(
        counts=adjust.counts.at[slot].set(counts, mode="drop"),
        in_prompt=adjust.in_prompt.at[slot].set(in_prompt, mode="drop"),
        bias_ids=adjust.bias_ids.at[slot].set(bias_ids, mode="drop"),
        bias=adjust.bias.at[slot].set(bias, mode="drop"),
        forbidden_ids=adjust.forbidden_ids.at[slot].set(forbidden_ids, mode="drop"),
    )
