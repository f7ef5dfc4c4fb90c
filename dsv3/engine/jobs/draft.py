"""Drafts by the model's own MTP module: proposes the tokens that the next decode step verifies.

A draft job follows each forward job. It runs the module over the rows that the forward job has just computed, now that
the token after each of them is known, and so keeps the module's own cache layer in step with the main model's. The row
of a request's last token gives its first draft. Further drafts are chained: the module takes its own hidden state and
its own draft, one place further.

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
import numpy as np

from dsv3.engine.device import sampling
from dsv3.engine.device.devices import Devices
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import DecodeState
from dsv3.engine.functions import DraftFunctions
from dsv3.engine.job import Command, EngineView, JobKind, Planned
from dsv3.engine.jobs import decode, prefill
from dsv3.engine.parts import Parts
from dsv3.engine.requests.rows import NOTHING
from dsv3.model.batch import DecodeBatch
from dsv3.request import StepOutputs

NAME = "draft"


class DraftCommand(Command, frozen=True):
    """Drafts for the requests of the forward job `source` of the same step, whose bucket is `size`.

    `width` are the tokens per row of a decode job.
    """

    source: str
    size: int
    width: int


@dataclasses.dataclass(frozen=True)
class DraftStats:
    """Totals since the start, under vLLM's names.

    `num_drafts` counts rows that brought drafts, `num_draft_tokens` the drafts, `num_accepted_tokens` those that were
    right, and `num_accepted_tokens_per_pos` the same by their place in the row.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]


class DraftPlanner:
    """Adds a draft job for each forward job whose requests will bring drafts."""

    def __init__(self, view: EngineView) -> None:
        self._counts = view.scheduler.drafts

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Plans one job per forward job of the step; decode steps too large for drafts get none."""
        commands = []
        for job in step:
            if isinstance(job.command, decode.DecodeCommand) and job.command.width > 1:
                commands.append(DraftCommand(job.kind, job.command.rows.shape[1], job.command.width))
            elif isinstance(job.command, prefill.PrefillCommand):
                commands.append(DraftCommand(job.kind, job.command.bucket, 1))
        return [Planned(NAME, command) for command in commands]

    def collect(self, planned: Planned, results: list[np.ndarray], outputs: StepOutputs) -> None:
        """Has nothing to note: the sampler of the next step says which drafts were right."""

    def stats(self) -> DraftStats:
        """Returns how many drafts there were, and how many were right."""
        accepted = self._counts.accepted.tolist()
        return DraftStats(self._counts.rows, self._counts.tokens, sum(accepted), tuple(accepted))


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket of prefill, and of decode where that takes drafts."""
    cfg, width, dtype = layout.cfg, layout.model_cfg.hidden_size, _module(layout).dtype
    for size in cfg.prefill_buckets:
        rows = cfg.prefill_rows(size)
        chunks = layout.array(size), layout.array(rows, prefill.HEADER + cfg.pages_per_seq)
        hidden, sampled = layout.array(size, width, dtype=dtype), (layout.array(rows), layout.array(rows, 1))
        key, drafts = Key(f"{NAME} {prefill.NAME}", size), cfg.tokens_per_row - 1
        yield _program(layout, key, prefill_body, drafts, (hidden, *chunks, *sampled))
    for size in cfg.decode_buckets:
        S = cfg.width(size)
        if S > 1:
            hidden, sampled = layout.array(size, S, width, dtype=dtype), (layout.array(size), layout.array(size, S))
            key = Key(f"{NAME} {decode.NAME}", size, width=S)
            yield _program(layout, key, decode_body, S - 1, (hidden, *sampled))


def _program(
    layout: Layout, key: Key, body: Callable[..., Any], drafts: int, arguments: tuple[Any, ...]
) -> ProgramSpec:
    arguments = (layout.params, layout.pages, layout.state, *arguments)
    return layout.per_rank(key, functools.partial(body, layout, drafts), arguments, donated=(1, 2), takes_params=True)


class DraftWorker:
    """Launches the draft program of a forward job."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def launch(self, command: DraftCommand) -> tuple[jax.Array, ...]:
        """Starts the module over what the forward job has left; leaves drafts in the state."""
        devices = self._devices
        forward = devices.handed.pop(command.source)
        program = devices.programs.get(Key(f"{NAME} {command.source}", command.size, width=command.width))
        sampled = forward.tokens if forward.tokens is not None else self._nothing_sampled(command.size)
        given = (forward.hidden, *forward.batch, forward.slots, sampled)
        devices.pages, devices.state = program(devices.params, devices.pages, devices.state, *given)
        return ()

    def _nothing_sampled(self, size: int) -> jax.Array:
        """Returns zeros, which nobody reads, for a prefill in which no chunk was a prompt's last."""
        layout = self._devices.layout
        return self._devices.put(np.zeros((layout.num_local_ranks, layout.cfg.prefill_rows(size), 1), np.int32))


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
    assert layout.functions.draft is not None  # `_applies`
    return layout.functions.draft


def _applies(parts: Parts) -> bool:
    return parts.functions.draft is not None


KIND = JobKind(NAME, DraftCommand, DraftPlanner, programs, DraftWorker, _applies)
