"""Drafts by the model's own MTP module.

After each forward job the module runs over the rows that this has just computed, now that the token after each of them
is known. So its own cache layer keeps step with the main model's. The row of a request's last token gives its first
draft. Further drafts are chained: the module takes its own hidden state and its own draft, one place further.

Nothing is ever rolled back. A place behind a request's length holds what a wrong draft has left; it is written again
before a length covers it. Drafts live in `DecodeState.tokens` behind the last token, one line per slot, so none
outlives its request's slot.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.engine.device import sampling
from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import DecodeState
from dsv3.engine.functions import DraftFunctions
from dsv3.engine.jobs import decode, prefill
from dsv3.engine.jobs.draft_command import DraftCommand
from dsv3.engine.requests.rows import NOTHING
from dsv3.model.batch import DecodeBatch


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket of prefill, and of decode where that takes drafts."""
    cfg, width, dtype = layout.cfg, layout.model_cfg.hidden_size, _module(layout).dtype
    for size in cfg.prefill_buckets:
        rows = cfg.prefill_rows(size)
        chunks = layout.array(size), layout.array(rows, prefill.HEADER + cfg.pages_per_seq)
        hidden, sampled = layout.array(size, width, dtype=dtype), (layout.array(rows), layout.array(rows, 1))
        key, drafts = Key(f"mtp {prefill.NAME}", size), cfg.tokens_per_row - 1
        yield _program(layout, key, prefill_body, drafts, (hidden, *chunks, *sampled))
    for size in cfg.decode_buckets:
        S = cfg.width(size)
        if S > 1:
            hidden, sampled = layout.array(size, S, width, dtype=dtype), (layout.array(size), layout.array(size, S))
            key = Key(f"mtp {decode.NAME}", size, width=S)
            yield _program(layout, key, decode_body, S - 1, (hidden, *sampled))


def _program(
    layout: Layout, key: Key, body: Callable[..., Any], drafts: int, arguments: tuple[Any, ...]
) -> ProgramSpec:
    arguments = (layout.params, layout.pages, layout.state, *arguments)
    return layout.per_rank(key, functools.partial(body, layout, drafts), arguments, donated=(1, 2), takes_params=True)


class Drafter:
    """Runs the module."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def launch(self, command: DraftCommand, forward: Forward) -> None:
        """Starts the module after the forward job `command.source`; leaves drafts in the state."""
        devices = self._devices
        program = devices.programs.get(Key(f"mtp {command.source}", command.size, width=command.width))
        given = (forward.hidden, *forward.batch, forward.slots, forward.tokens)
        devices.pages, devices.state = program(devices.params, devices.pages, devices.state, *given)


def prefill_body(
    layout: Layout,
    drafts: int,
    params: object,
    pages: jax.Array,
    state: DecodeState,
    hidden: jax.Array,
    tokens: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    sampled: jax.Array,
) -> tuple[jax.Array, DecodeState]:
    """Runs the module over chunks of prompts, for one rank; the requests in `slots` `[B]` get drafts.

    `hidden` `[T, D]`, `tokens` and `rows` are those of `prefill.prefill_body`, `sampled` `[B, 1]` the first tokens.
    """
    batch = prefill.ragged_batch(tokens, rows)
    shifted = dataclasses.replace(batch, tokens=prefill.next_tokens(batch, rows, sampled[:, 0]))
    out = _module(layout).prefill(params, layout.model_cfg, shifted, pages, hidden)
    return _propose(layout, drafts, params, out.pages, state, out.hidden[prefill.last_rows(batch)], slots)


def decode_body(
    layout: Layout,
    drafts: int,
    params: object,
    pages: jax.Array,
    state: DecodeState,
    hidden: jax.Array,
    slots: jax.Array,
    sampled: jax.Array,
) -> tuple[jax.Array, DecodeState]:
    """Runs the module over a decode batch, for one rank; the requests in `slots` `[B]` get drafts.

    `hidden` `[B, S, D]` belongs to the last token and the drafts that were verified, `sampled` `[B, S]` are the tokens
    that really follow them. Rows behind the accepted ones mean nothing, and what they write is written again.
    """
    num_slots, S = state.lengths.shape[0], sampled.shape[1]
    held = jnp.minimum(slots, num_slots - 1)
    accepted = jnp.sum(sampled != NOTHING, axis=1, dtype=jnp.int32)
    lengths = jnp.where(slots < num_slots, state.lengths[held] - accepted - 1 + S, 0)
    batch = DecodeBatch(jnp.maximum(sampled, 0), lengths, state.page_table[held])
    out = _module(layout).decode(params, layout.model_cfg, batch, pages, hidden)
    last = jnp.maximum(accepted - 1, 0)
    return _propose(layout, drafts, params, out.pages, state, out.hidden[jnp.arange(len(last)), last], slots)


def _propose(
    layout: Layout,
    drafts: int,
    params: object,
    pages: jax.Array,
    state: DecodeState,
    hidden: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, DecodeState]:
    """Chains `drafts` drafts from the module's `hidden` states `[B, D]` at the last tokens of `slots` `[B]`."""
    cfg, num_slots = layout.model_cfg, state.lengths.shape[0]
    held = jnp.minimum(slots, num_slots - 1)
    table = state.page_table[held]
    proposed: list[jax.Array] = []
    for i in range(drafts):
        if i:
            lengths = jnp.where(slots < num_slots, state.lengths[held] - 1 + i, 0)
            batch = DecodeBatch(proposed[-1][:, None], lengths, table)
            out = _module(layout).decode(params, cfg, batch, pages, hidden[:, None])
            pages, hidden = out.pages, out.hidden[:, 0]
        proposed.append(sampling.greedy(layout.functions.logits(params, cfg, hidden)))
    columns = jnp.arange(1, drafts + 1)
    tokens = state.tokens.at[slots[:, None], columns].set(jnp.stack(proposed, axis=1), mode="drop")
    return pages, dataclasses.replace(state, tokens=tokens)


def _module(layout: Layout) -> DraftFunctions:
    assert layout.functions.draft is not None  # `build` makes it for this method
    return layout.functions.draft
