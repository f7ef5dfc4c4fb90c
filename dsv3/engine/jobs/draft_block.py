"""Drafts by the model's own stages of DSpark, a whole block at once.

After each forward job the stages' cache gets what they see of the tokens that it has computed. Then they run over a
block per request, its last token and placeholders, which gives all drafts of its next step. After a decode step without
drafts the cache is written too, so that it has no holes when drafts are wanted again.

Blocks are not cached, so nothing is rolled back: rows of rejected drafts are written again before a block sees them.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.sampling import best_tokens
from dsv3.engine.device.state import NO_DRAFT, DecodeState, decode_batch, existing, ragged_batch, with_drafts
from dsv3.engine.functions import BlockFunctions
from dsv3.engine.jobs import decode, prefill
from dsv3.engine.jobs.draft import DraftCommand, draft_kind, forward_program, verified_batch

PREFILL, DECODE = f"dspark {prefill.NAME}", f"dspark {decode.NAME}"
"""Kinds of programs, as `EngineConfig.forward_programs` numbers them."""

LEAST_CONFIDENCE = 0.05
"""A draft that the stages expect to be accepted less often than this ends the drafts of its row before it.

The width of a step does not depend on it. A request with a grammar is spared bitmasks, and the share of accepted drafts
says how good the others are.
"""


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket of prefill and of decode."""
    cfg, width, dtype = layout.cfg, layout.model_cfg.draft_input_width, _stages(layout).dtype
    for size in cfg.prefill_buckets:
        rows = cfg.prefill_rows(size)
        given = layout.array(size, width, dtype=dtype), *layout.chunks(size), layout.array(rows)
        padding = {5: layout.padding_chunk, 6: layout.padding_slot}
        yield forward_program(layout, Key(PREFILL, size), prefill_body, given, padding)
    for size in cfg.decode_buckets:
        S = cfg.width(size)
        rows_given = layout.array(size, S, width, dtype=dtype), layout.array(size), layout.array(size, S)
        yield forward_program(layout, Key(DECODE, size, width=S), decode_body, rows_given, {4: layout.padding_slot})


def run_stages(devices: Devices, command: DraftCommand, forward: Forward) -> None:
    """Starts the stages."""
    program = devices.programs.get(Key(f"dspark {command.source}", command.size, width=command.width))
    given: tuple[Any, ...] = (forward.draft_input, *forward.batch, forward.slots)
    if command.source == decode.NAME:
        given = (*given, forward.tokens)
    devices.pages, devices.state = program(devices.params, devices.pages, devices.state, *given)


def prefill_body(
    layout: Layout,
    params: object,
    pages: Any,
    state: DecodeState,
    draft_input: jax.Array,
    tokens: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    *,
    program: int,
) -> tuple[Any, DecodeState]:
    """Writes what the stages see of chunks of prompts, for one rank; the requests in `slots` `[B]` get drafts.

    `draft_input` `[T, M * D]`, `tokens` and `rows` are those of `prefill.prefill_body`. Returns pages and state.
    `program` is the number of its counters.
    """
    batch = ragged_batch(layout.cfg, tokens, rows)
    pages = _stages(layout).write(params, layout.model_cfg, batch, pages, draft_input)
    return pages, _with_block(layout, params, pages, state, slots, layout.cfg.tokens_per_row - 1, program)


def decode_body(
    layout: Layout,
    params: object,
    pages: Any,
    state: DecodeState,
    draft_input: jax.Array,
    slots: jax.Array,
    sampled: jax.Array,
    *,
    program: int,
) -> tuple[Any, DecodeState]:
    """Writes what the stages see of a decode batch, for one rank; the requests in `slots` `[B]` get S - 1 drafts.

    `draft_input` `[B, S, M * D]` belongs to the last token and the verified drafts, `sampled` `[B, S]` are the tokens
    that really follow them. Returns as `prefill_body` does.
    """
    batch, _ = verified_batch(state, slots, sampled)
    pages = _stages(layout).write(params, layout.model_cfg, batch, pages, draft_input)
    if (drafts := sampled.shape[1] - 1) == 0:
        return pages, with_drafts(state, slots, jnp.zeros((slots.shape[0], 0), jnp.int32))
    return pages, _with_block(layout, params, pages, state, slots, drafts, program)


def _with_block(
    layout: Layout, params: object, pages: Any, state: DecodeState, slots: jax.Array, count: int, program: int
) -> DecodeState:
    """Returns the state with `count` drafts of `slots` `[B]`."""
    functions, stages, cfg = layout.functions, _stages(layout), layout.model_cfg
    last = state.tokens[existing(state, slots), 0]
    out = stages.propose(params, cfg, decode_batch(state, slots, last[:, None], 0), pages)
    scores = functions.scores(params, cfg, out.hidden[:, :count])
    vocabulary = functions.vocabulary

    def best(scores: jax.Array) -> jax.Array:
        return best_tokens(vocabulary, scores).tokens

    drafts, confidence = stages.choose(params, vocabulary, best, scores, out.draft_input[:, :count], last)
    sure = jnp.cumprod(confidence >= LEAST_CONFIDENCE, axis=1) > 0
    state = layout.update_counters(state, out, program)
    return with_drafts(state, slots, jnp.where(sure, drafts, NO_DRAFT))


def _stages(layout: Layout) -> BlockFunctions:
    assert isinstance(layout.functions.draft, BlockFunctions)  # `build` makes them for this method
    return layout.functions.draft


KIND = draft_kind("dspark", programs, run_stages)
