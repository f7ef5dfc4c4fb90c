"""Drafts: proposes the tokens that the next decode step verifies.

A draft job follows each forward job, even where the step takes no drafts, so that the drafter has processed every token
when drafts are wanted again. It writes drafts to `DecodeState.tokens` behind each slot's last token. A drafter proposes
them: prompt lookup (`lookup`, here), the model's MTP module (`draft_module`), or its stages of DSpark
(`draft_block`). Draft tokens are verified by the sampler (`sample.sample_body`): a draft is accepted where it equals
the token that is sampled anyway. The host reads drafts only where a request of the job is constrained: its bitmasks
behind drafts depend on them.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.form_selection import ANY_LENGTH
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import NO_DRAFT, DecodeState, decode_batch, existing, ragged_batch, with_drafts
from dsv3.engine.job import Command, EngineView, JobKind, Planned
from dsv3.engine.jobs.decode import NAME as DECODE
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.jobs.prefill import NAME as PREFILL
from dsv3.engine.jobs.prefill import PrefillCommand
from dsv3.model.batch import AttentionForm, DecodeBatch
from dsv3.scheduler.batch_slots import NOTHING
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.sequence import Chunk
from pallas_kernels.search import search

NAME = "draft"
READ_DRAFTS = "read drafts"
_LOAD_TEXT = Key("lookup load")


class CachedText(Command, frozen=True):
    """Tokens of a request whose pages were found in the cache, so that no forward job has processed them."""

    rank: int
    slot: int  # within the rank
    tokens: np.ndarray  # [n] int32


class DraftCommand(Command, frozen=True):
    """Drafts for the requests of the forward job `source` of the same step, whose bucket is `size`.

    `width` are the tokens per row of a decode job. `texts` precede what the job has computed, at most one per rank in
    each of `text_launches`. With `returns_drafts` the host reads the drafts. `longest` is that of the forward job.
    """

    source: str
    size: int
    width: int
    texts: list[CachedText]
    text_launches: int
    returns_drafts: bool
    longest: int = ANY_LENGTH

    def part(self, ranks: range) -> "DraftCommand":
        """Returns the command with the texts of `ranks` only."""
        mine = [
            msgspec.structs.replace(text, rank=text.rank - ranks.start) for text in self.texts if text.rank in ranks
        ]
        return msgspec.structs.replace(self, texts=mine)


@dataclasses.dataclass(frozen=True)
class DraftStats:
    """Totals since the start, under vLLM's names.

    `num_drafts` counts rows with drafts, `num_draft_tokens` the drafts, `num_accepted_tokens` the accepted ones, and
    `num_accepted_tokens_per_pos` these by position.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]


class DraftPlanner:
    """Adds a draft job for each forward job."""

    def __init__(self, view: EngineView) -> None:
        self._masks = view.masks
        self._counts, self._cfg = view.scheduler.drafts, view.scheduler.cfg
        self._reads_text = self._cfg.speculative is not None and self._cfg.speculative.method == "ngram"
        # By slot: the epoch whose prompt has begun.
        self._begun = np.full(len(view.scheduler.slots.epoch), -1, np.int64)

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Schedules one job per forward job of the step."""
        planned = []
        for job in step:
            returns_drafts = job.deferred is not None  # a request of the job is constrained
            if isinstance(job.command, DecodeCommand):
                done = job.command
                command = DraftCommand(job.kind, done.rows.shape[1], done.width, [], 0, returns_drafts, done.longest)
            elif isinstance(job.command, PrefillCommand):
                size, texts = job.command.bucket, self._cached(job.context.chunks)
                turns = max(Counter(text.rank for text in texts).values(), default=0)
                command = DraftCommand(job.kind, size, 1, texts, turns, returns_drafts, job.command.longest)
            else:
                continue
            planned.append(Planned(NAME, command, job.context.rows))
        return planned

    def _cached(self, chunks: list[list[Chunk]]) -> list[CachedText]:
        """Returns the cached texts that the chunks continue, for a drafter that reads text."""
        found = []
        for chunk in (c for mine in chunks for c in mine) if self._reads_text else ():
            sequence, slot = chunk.sequence, chunk.sequence.slot
            if chunk.start and self._begun[slot] != chunk.epoch:
                rank, local_slot = divmod(slot, self._cfg.max_num_seqs)
                found.append(
                    CachedText(rank, local_slot, np.ascontiguousarray(sequence.tokens[: chunk.start], np.int32))
                )
            self._begun[slot] = chunk.epoch
        return found

    def on_results(self, planned: Planned, results: tuple[np.ndarray, ...], outputs: StepOutputs) -> None:
        """Records drafts that the host reads; the next step's sampler verifies them."""
        if results and self._masks is not None:
            self._masks.record_drafts(planned.context, results[0])

    def stats(self) -> DraftStats:
        """Returns how many drafts were proposed and accepted."""
        accepted = self._counts.accepted.tolist()
        return DraftStats(self._counts.rows, self._counts.tokens, sum(accepted), tuple(accepted))


Drafter = Callable[[Devices, DraftCommand, Forward], None]
"""Starts programs after the forward job `command.source`, which write drafts to the state."""


def _launch(drafter: Drafter, devices: Devices, command: DraftCommand) -> tuple[jax.Array, ...]:
    """Starts the drafter on what the forward job and the sampler have left."""
    if command.source == DECODE:
        forward, devices.decoded = devices.decoded, None
    else:
        forward, devices.prefilled = devices.prefilled, None
    assert forward is not None  # a forward job of the step has left it
    rows = forward.slots.shape[1]
    if forward.tokens is None:  # a prefill without a prompt's last chunk: zeros, which are ignored
        forward = forward._replace(tokens=devices.put(np.zeros((devices.layout.num_local_ranks, rows, 1), np.int32)))
    drafter(devices, command, forward)
    if not command.returns_drafts:
        return ()
    drafts = devices.programs.get(Key(READ_DRAFTS, rows))(devices.state, forward.slots)
    drafts.copy_to_host_async()
    return (drafts,)


def draft_kind(method: str, programs: Callable[[Layout], Iterator[ProgramSpec]], drafter: Drafter) -> JobKind:
    """Returns the kind of work for engines whose `speculative_config` has this `method`."""

    def applies(components: EngineComponents) -> bool:
        return components.cfg.speculative is not None and components.cfg.speculative.method == method

    def with_read_drafts(layout: Layout) -> Iterator[ProgramSpec]:
        return itertools.chain(programs(layout), read_draft_programs(layout))

    launch = functools.partial(_launch, drafter)
    return JobKind(NAME, DraftCommand, DraftPlanner, with_read_drafts, launch, applies)


def verified_batch(
    state: DecodeState, slots: jax.Array, sampled: jax.Array, form: AttentionForm = AttentionForm.ANY
) -> tuple[DecodeBatch, jax.Array]:
    """Returns the batch of the decode step that has just been sampled, and how many tokens each row gave, `[B]`.

    Its tokens are those that really follow, `sampled` `[B, S]`; behind the accepted ones they are below 0. `slots` are
    `[B]`.
    """
    accepted = jnp.sum(sampled > NOTHING, axis=1, dtype=jnp.int32)
    return decode_batch(state, slots, sampled, sampled.shape[1] - 1 - accepted, form), accepted


def forward_program(
    layout: Layout, key: Key, body: Callable[..., Any], given: tuple[Any, ...], padding: dict[int, Any]
) -> ProgramSpec:
    """Returns a program of a drafter that runs layers: `body` over parameters, pages, state and what is `given`."""
    arguments = (layout.params, layout.pages, layout.state, *given)
    body = functools.partial(body, layout, program=layout.cfg.program_number(key.kind, key.size))
    return layout.per_rank(key, body, arguments, donated=(1, 2), takes_params=True, padding=padding)


def read_draft_programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields the programs that return the drafts of a batch to the host, by its rows."""
    for rows in sorted({rows for rows, _ in layout.sampled_shapes}):
        arguments = (layout.state, layout.array(rows))
        yield layout.per_rank(
            Key(READ_DRAFTS, rows), read_drafts_body, arguments, gathered="all", padding={1: layout.padding_slot}
        )


def read_drafts_body(state: DecodeState, slots: jax.Array) -> jax.Array:
    """Returns the drafts of `slots` `[B]`, `[B, S - 1]` of the widest row, for one rank."""
    return state.tokens[existing(state, slots), 1:]


def lookup_programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket of prefill and of decode: texts grow in steps without drafts too."""
    cfg = layout.cfg
    given = (layout.state, layout.array(), layout.array(cfg.max_model_len))
    yield layout.per_rank(_LOAD_TEXT, load_text_body, given, donated=(0,), padding={1: layout.padding_slot})
    for size in cfg.prefill_buckets:
        count = cfg.prefill_rows(size)
        arguments = (layout.state, *layout.chunks(size), layout.array(count), layout.array(count, 1))
        body = functools.partial(prefill_body, layout, cfg.tokens_per_row - 1)
        padding = {2: layout.padding_chunk, 3: layout.padding_slot}
        yield layout.per_rank(Key(f"lookup {PREFILL}", size), body, arguments, donated=(0,), padding=padding)
    for size in cfg.decode_buckets:
        S = cfg.width(size)
        rows = (layout.state, layout.array(size), layout.array(size, S))
        body = functools.partial(_propose, layout, S - 1)
        key, padding = Key(f"lookup {DECODE}", size, width=S), {1: layout.padding_slot}
        yield layout.per_rank(key, body, rows, donated=(0,), padding=padding)


def lookup(devices: Devices, command: DraftCommand, forward: Forward) -> None:
    """Proposes what followed the last tokens where they occurred before in the request's text.

    It needs no weights, and is accepted where a model repeats what it has read: code, quotations, tables. The text of
    each slot is on the device (`DecodeState.texts`), since the host sees a token one step late.
    """
    for turn in range(command.text_launches):
        _load_text(devices, command.texts, turn)
    program = devices.programs.get(Key(f"lookup {command.source}", command.size, width=command.width))
    devices.state = program(devices.state, *forward.batch, forward.slots, forward.tokens)


def _load_text(devices: Devices, texts: list[CachedText], turn: int) -> None:
    """Loads the `turn`-th text of each rank."""
    cfg, ranks = devices.layout.cfg, devices.layout.num_local_ranks
    slots, tokens = np.full(ranks, cfg.max_num_seqs, np.int32), np.zeros((ranks, cfg.max_model_len), np.int32)
    for rank in range(ranks):
        mine = [text for text in texts if text.rank == rank]
        if turn < len(mine):
            slots[rank], tokens[rank, : len(mine[turn].tokens)] = mine[turn].slot, mine[turn].tokens
    devices.state = devices.programs.get(_LOAD_TEXT)(devices.state, devices.put(slots), devices.put(tokens))


def load_text_body(state: DecodeState, slot: jax.Array, tokens: jax.Array) -> DecodeState:
    """Sets the text of `slot` to `tokens` `[max_model_len]`, for one rank."""
    return dataclasses.replace(state, texts=state.texts.at[slot].set(tokens, mode="drop"))


def prefill_body(
    layout: Layout,
    drafts: int,
    state: DecodeState,
    tokens: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    sampled: jax.Array,
) -> DecodeState:
    """Appends chunks of prompts to the texts, for one rank; proposes drafts for `slots` `[B]`.

    `tokens` and `rows` are those of `prefill.prefill_body`, `sampled` `[B, 1]` the first tokens.
    """
    batch = ragged_batch(layout.cfg, tokens, rows)
    index = jnp.arange(tokens.shape[0])
    chunk = jnp.minimum(search(batch.cu_lengths[1:], index, side="right"), rows.shape[0] - 1)
    owner = jnp.where(index < batch.cu_lengths[-1], rows[chunk, 0], state.texts.shape[0])
    state = dataclasses.replace(state, texts=state.texts.at[owner, batch.positions].set(tokens, mode="drop"))
    return _propose(layout, drafts, state, slots, sampled)


def _propose(layout: Layout, drafts: int, state: DecodeState, slots: jax.Array, sampled: jax.Array) -> DecodeState:
    """Appends `sampled` `[B, S]` to the texts of `slots` `[B]`; writes drafts to the state."""
    speculative, texts = layout.cfg.speculative, state.texts
    assert speculative is not None  # else there is no drafter
    mine = existing(state, slots)
    lengths, counts = state.lengths[mine], jnp.sum(sampled > NOTHING, axis=1, dtype=jnp.int32)
    column = jnp.arange(sampled.shape[1])
    positions = jnp.where(column < counts[:, None], lengths[:, None] - counts[:, None] + column, texts.shape[1])
    texts = texts.at[slots[:, None], positions].set(sampled, mode="drop")
    bounds = speculative.lookup_min, speculative.lookup_max
    found = jax.vmap(lambda text, length: continuation(text, length, drafts, *bounds))(texts[mine], lengths)
    return with_drafts(dataclasses.replace(state, texts=texts), slots, found)


def continuation(text: jax.Array, length: jax.Array, drafts: int, low: int, high: int) -> jax.Array:
    """Returns what followed an earlier occurrence of the last tokens of `text[:length]` `[H]`, `[drafts]` int32.

    The longest match of `low` to `high` tokens wins; of equally long ones that with the longest continuation, then the
    latest. `NO_DRAFT` stands where the text ends, or nothing matches.
    """
    end = jnp.arange(text.shape[0])  # a match ends before this position
    matched, goes_on = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, jnp.bool)
    for i in range(1, high + 1):
        same = jnp.roll(text, i) == text[jnp.maximum(length - i, 0)]
        goes_on &= same & (end >= i) & (length >= i)
        matched += goes_on
    matched = jnp.where((end < length) & (matched >= low), matched, 0)
    followed = jnp.minimum(length - end, drafts)
    score = jnp.where(matched > 0, (matched * (drafts + 1) + followed) * text.shape[0] + end, -1)
    start = jnp.where(jnp.any(matched > 0), jnp.argmax(score), length)
    positions = start + jnp.arange(drafts)
    return jnp.where(positions < length, text[jnp.minimum(positions, text.shape[0] - 1)], NO_DRAFT)


KIND = draft_kind("ngram", lookup_programs, lookup)
