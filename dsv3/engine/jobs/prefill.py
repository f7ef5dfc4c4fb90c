"""Prefill: chunks of prompts, several requests in one flat batch; the last chunk of a prompt samples a token."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from operator import attrgetter
from time import monotonic

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.form_selection import ANY_LENGTH, capacity, prefill_form, prefill_forms
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import HEADER, DecodeState, chunk_columns, control_rows, last_rows, ragged_batch
from dsv3.engine.job import Command, EngineView, JobKind, Planned
from dsv3.engine.jobs import prompt_logprobs
from dsv3.engine.jobs.sample import (
    ForwardContext,
    ForwardResults,
    SampleCommand,
    copy_experts,
    defer_for_masks,
    expert_programs,
    launch_sampler,
    sampler_command,
    sampler_programs,
)
from dsv3.model.batch import AttentionForm
from dsv3.scheduler.balance import PrefillBalance, PrefillBatching
from dsv3.scheduler.batch_slots import BatchRows
from dsv3.scheduler.cost import prefill_cost
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.results import CapacityFactor, prefilled_expert_outputs, process_results
from dsv3.scheduler.sequence import Chunk, Sequence
from dsv3.scheduler.windows import WindowPages
from sharding.processes import local_part

NAME = "prefill"


class PrefillCommand(Command, frozen=True, tag=0):
    """Chunks of several ranks, in the order of the ranks, without padding of tokens and page tables.

    `windows` are the window pages at the indices of `pages`, -1 for none, for a model with a window.

    `bucket` is the size of the batch, and `has_context` says whether a chunk has tokens before it. Row i of `header` is
    a chunk: rank, pages, then `HEADER` columns. `tokens` and `pages` are those of all chunks, concatenated. With
    `wants_prompt_logprobs`, log-probabilities of the prompts follow. No query of any rank sees more than `longest`
    tokens, and the requests of no rank have more than `keys` tokens together, counted in whole pages. `pairs` counts
    pairs of a new token and one before its chunk, on the rank that has most. With `samples`, some chunk is the last one
    of a prompt: `sample` is its sampler, or a second command follows with it, once its bitmasks are computed. With
    `wants_routed_experts` the experts of the tokens are results, too.
    """

    bucket: int
    header: np.ndarray  # [chunks, 2 + HEADER] int32
    tokens: np.ndarray  # int32
    pages: np.ndarray  # int32
    samples: bool
    has_context: bool = True
    wants_prompt_logprobs: bool = False
    longest: int = ANY_LENGTH
    keys: int = ANY_LENGTH
    pairs: int = 0
    sample: SampleCommand | None = None
    windows: np.ndarray | None = None  # int32
    wants_routed_experts: bool = False

    def part(self, ranks: range) -> "PrefillCommand":
        """Returns the chunks of `ranks`."""
        first, last = np.searchsorted(self.header[:, 0], [ranks.start, ranks.stop])
        tokens, pages = self._starts
        header = self.header[first:last].copy()
        header[:, 0] -= ranks.start
        return msgspec.structs.replace(
            self,
            header=header,
            tokens=self.tokens[tokens[first] : tokens[last]],
            pages=self.pages[pages[first] : pages[last]],
            windows=None if self.windows is None else self.windows[pages[first] : pages[last]],
            sample=None if self.sample is None else self.sample.part(ranks),
        )

    @property
    def amount(self) -> int:
        """Prompt tokens of all ranks."""
        return len(self.tokens)

    def arrays(self, ranks: int, cfg: EngineConfig) -> tuple[np.ndarray, np.ndarray]:
        """Returns the batch of each of `ranks` ranks: tokens `[ranks, T]`, chunks `[ranks, B, columns]`."""
        tokens = np.zeros((ranks, self.bucket), np.int32)
        rows = np.zeros((ranks, cfg.prefill_rows(self.bucket), chunk_columns(cfg)), np.int32)
        rows[..., 0] = cfg.max_num_seqs
        token_starts, page_starts = self._starts
        filled, at = [0] * ranks, [0] * ranks
        for i, chunk in enumerate(self.header):
            rank, num_pages, count = int(chunk[0]), int(chunk[1]), int(chunk[3])
            row = rows[rank, filled[rank]]
            row[:HEADER] = chunk[2:]
            row[HEADER : HEADER + num_pages] = self.pages[page_starts[i] : page_starts[i + 1]]
            if self.windows is not None:
                first = HEADER + cfg.pages_per_seq
                row[first : first + num_pages] = self.windows[page_starts[i] : page_starts[i + 1]]
            tokens[rank, at[rank] : at[rank] + count] = self.tokens[token_starts[i] : token_starts[i + 1]]
            filled[rank] += 1
            at[rank] += count
        return tokens, rows

    @property
    def _starts(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each chunk's tokens and pages begin, and the end of the last."""
        return _starts(self.header[:, 3]), _starts(self.header[:, 1])


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


class PrefillPlanner:
    """Admits waiting requests and schedules their prompts in chunks, on each rank in order of admission."""

    def __init__(self, view: EngineView) -> None:
        self._view, self._scheduler, self._cfg = view, view.scheduler, view.scheduler.cfg
        self._balance = PrefillBalance()
        self._batching = PrefillBatching()
        self._capacity = CapacityFactor(1 << (self._cfg.max_num_batched_tokens - 1).bit_length())

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Schedules one batch of chunks, log-probabilities of their tokens, and sampling for last chunks."""
        scheduler = self._scheduler
        scheduler.admit()
        if not any(scheduler.prefilling) or self._waits_for_batch(step):
            return []
        chunks = self._chunks()
        if not any(chunks):
            return []  # window pages will be released by steps in flight
        command = _command(chunks, self._bucket(chunks), self._cfg, scheduler.windows)
        if self._cfg.num_ranks > 1:
            self._record_balance(command.header)
        rows, starting = self._mark_launched(chunks)
        context = ForwardContext(rows, self._capacity.factor, chunks, monotonic())
        if not starting:
            return [Planned(NAME, command, context)]
        sample, is_constrained = sampler_command(scheduler.slots, rows.slots, starting, self._cfg.max_num_seqs)
        if is_constrained:
            return [Planned(NAME, command, context, defer_for_masks(self._view.masks, sample, rows, 1))]
        return [Planned(NAME, msgspec.structs.replace(command, sample=sample), context)]

    def _waits_for_batch(self, step: list[Planned]) -> bool:
        """Returns whether short prompts wait for others, on a decode instance, which computes only their ends."""
        if self._cfg.role != "decode" or not step:
            return False
        prompts = 0
        for mine in filter(None, self._scheduler.prefilling):
            prompts += len(mine)
            for sequence in mine:
                if len(sequence.tokens) - sequence.prefilled > self._cfg.page_size:
                    return False
        return self._batching.should_wait(prompts, int(np.count_nonzero(self._scheduler.slots.decoding)))

    def on_results(self, planned: Planned, results: ForwardResults, outputs: StepOutputs) -> None:
        """Makes the pages findable that the chunks have completed, or resets chunks that overflowed.

        Then it outputs the prompts' log-probabilities, and their first tokens; before that, their tokens' experts.
        """
        context: ForwardContext = planned.context
        if not planned.is_deferred:
            overflowed = results.slots is not None and bool((results.slots > self._cfg.max_num_seqs).any())
            if results.routed_experts is not None and not overflowed:  # before the pages are published
                found = prefilled_expert_outputs(self._scheduler.slots, context.chunks, results.routed_experts)
                outputs.details.extend(found)
            self._on_computed(context, overflowed)
        if results.prompt:
            outputs.details.extend(
                prompt_logprobs.prompt_logprob_outputs(self._scheduler.slots, context.chunks, results.prompt)
            )
        if results.sampled:
            process_results(self._scheduler, context.rows, results.sampled, outputs)

    def _on_computed(self, context: ForwardContext, overflowed: bool) -> None:
        scheduler = self._scheduler
        self._capacity.update(context.factor, overflowed)
        now = monotonic()
        for chunk in (c for mine in context.chunks for c in reversed(mine)):
            holds = scheduler.slots.holds(chunk.sequence, chunk.epoch)
            if holds and overflowed:
                scheduler.recompute(chunk.sequence, chunk.start)
            elif holds:
                scheduler.on_computed(chunk.sequence, chunk.stop)
                chunk.sequence.timing.add_chunk(context.scheduled_at, now, chunk.stop - chunk.start, chunk.is_last)
            scheduler.prompt_tokens += 0 if overflowed else chunk.stop - chunk.start

    def stats(self) -> PrefillBalance | None:
        """Returns how even the ranks' shares are."""
        return self._balance if self._cfg.num_ranks > 1 else None

    def _chunks(self) -> list[list[Chunk]]:
        prefilling, windows = self._scheduler.prefilling, self._scheduler.windows
        rows = self._cfg.prefill_rows(self._cfg.prefill_buckets[-1])
        budget = max(1, self._cfg.max_num_batched_tokens // self._capacity.factor)
        dealt = self._scheduler.balancer.schedule_chunks(prefilling, rows, budget)
        each = zip(prefilling, dealt, strict=True)
        chunks = [self._rank_chunks(mine, counts) if mine else [] for mine, counts in each]
        if windows is None:
            return chunks
        return [[c for c in mine if windows.take_for_chunk(c.sequence, c.start, c.stop)] for mine in chunks]

    def _rank_chunks(self, prefilling: list[Sequence], counts: list[int]) -> list[Chunk]:
        """Returns the chunks of a rank; chunks with prompt log-probabilities come first."""
        logprob_budget, chunks = prompt_logprobs.MAX_PROMPT_LOGPROB_TOKENS, []
        for sequence, count in zip(prefilling, counts, strict=False):
            if count and sequence.needs_prompt_logprobs:
                count = min(count, logprob_budget)
                logprob_budget -= count
            if count:
                epoch = int(self._scheduler.slots.epoch[sequence.slot])
                start, stop = sequence.prefilled, sequence.prefilled + count
                chunks.append(Chunk(sequence, epoch, start, stop))
        if logprob_budget < prompt_logprobs.MAX_PROMPT_LOGPROB_TOKENS:
            chunks.sort(key=lambda chunk: not chunk.sequence.needs_prompt_logprobs)
        return chunks

    def _bucket(self, chunks: list[list[Chunk]]) -> int:
        """Returns the bucket (captured batch size): the smallest with enough rows and tokens."""
        tokens = max([sum([c.stop - c.start for c in mine]) for mine in chunks if mine])
        tokens = min(tokens * self._capacity.factor, self._cfg.max_num_batched_tokens)
        rows = max(map(len, chunks))
        return next(b for b in self._cfg.prefill_buckets if b >= tokens and self._cfg.prefill_rows(b) >= rows)

    def _mark_launched(self, chunks: list[list[Chunk]]) -> tuple[BatchRows, list[Sequence]]:
        """Updates the scheduler for launched chunks; returns the rows that sample, and their sequences."""
        scheduler = self._scheduler
        last = [(rank, i, c.sequence) for rank, mine in enumerate(chunks) for i, c in enumerate(mine) if c.is_last]
        slots = np.array([sequence.slot for _, _, sequence in last], np.int64)
        rank, position = (np.array([entry[k] for entry in last], np.int64) for k in (0, 1))
        for chunk in (c for mine in chunks for c in mine):
            chunk.sequence.prefilled = chunk.stop
            scheduler.balancer.charge(chunk.sequence)
        for owner, _, sequence in last:
            scheduler.prefilling[owner].remove(sequence)
            scheduler.slots.start_decoding(sequence.slot)
        return BatchRows.at(scheduler.slots, slots, rank, position), [sequence for _, _, sequence in last]

    def _record_balance(self, header: np.ndarray) -> None:
        rank, count, start = header[:, 0], header[:, 3], header[:, 4]
        cost = prefill_cost(start, start + count, self._scheduler.balancer.keys_per_token)
        self._balance.update(*(np.bincount(rank, each, self._cfg.num_ranks) for each in (count, cost)))


def _command(
    chunks: list[list[Chunk]], bucket: int, cfg: EngineConfig, windows: WindowPages | None = None
) -> PrefillCommand:
    flat = [(rank, c) for rank, mine in enumerate(chunks) for c in mine]
    sequences = [c.sequence for _, c in flat]
    fields = [_header_fields(rank, chunk, cfg.max_num_seqs) for rank, chunk in flat]
    header = np.empty((len(flat), 2 + HEADER), np.int32)
    header[:, :6] = np.fromiter(itertools.chain.from_iterable(fields), np.int32, 6 * len(flat)).reshape(-1, 6)
    header[:, 6:] = control_rows(sequences)
    rank, count, start = header[:, 0], header[:, 3].astype(np.int64), header[:, 4]
    stop = start + count
    return PrefillCommand(
        bucket,
        header,
        np.concatenate([c.sequence.tokens[c.start : c.stop] for _, c in flat]),
        np.concatenate([_page_row(sequence) for sequence in sequences]),
        bool((header[:, 5] < 0).any()),  # a prompt's last chunk has no following token
        bool(start.any()),
        any([sequence.needs_prompt_logprobs for sequence in sequences]),
        int(stop.max()),
        cfg.page_size * int(np.bincount(rank, -(-stop // cfg.page_size)).max()),
        int(np.bincount(rank, count * start).max()),
        windows=None if windows is None else np.concatenate([windows.row(sequence) for sequence in sequences]),
        wants_routed_experts=any([sequence.routed is not None for sequence in sequences]),
    )


def _header_fields(rank: int, chunk: Chunk, max_num_seqs: int) -> tuple[int, int, int, int, int, int]:
    """Returns the first columns of a chunk's row: rank, pages, slot, tokens, tokens before it, the token behind it."""
    sequence, start, stop = chunk.sequence, chunk.start, chunk.stop
    follows = -1 if stop == len(sequence.tokens) else int(sequence.tokens[stop])
    return rank, len(sequence.pages), sequence.slot % max_num_seqs, stop - start, start, follows


def _page_row(sequence: Sequence) -> np.ndarray:
    """Returns a sequence's pages as `[n]` int32: the cached row unless its pages have changed."""
    row, pages = sequence.page_row, sequence.pages
    return row if row is not None and len(row) == len(pages) else np.array(pages, np.int32)


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields the programs of each bucket, one per form; and those that follow a forward program, decode's too."""
    cfg = layout.cfg
    each = ((size, form) for size in cfg.prefill_buckets for form in prefill_forms(layout, size))
    for size, form in each:
        number = cfg.program_number(NAME, size)
        body = functools.partial(prefill_body, layout, form=form, capacity=capacity(layout, size, form), program=number)
        arguments = (layout.params, layout.pages, layout.state, *layout.chunks(size))
        key, padding = Key(NAME, size, form), {4: layout.padding_chunk}
        yield layout.per_rank(key, body, arguments, donated=(1, 2), takes_params=True, padding=padding)
    yield from prompt_logprobs.programs(layout)
    yield from sampler_programs(layout)
    yield from expert_programs(layout)


def launch(devices: Devices, command: PrefillCommand | SampleCommand) -> ForwardResults:
    """Starts the batch and what follows it, or the sampler of one that waited for bitmasks.

    Leaves what a drafter needs.
    """
    results = ForwardResults()
    if isinstance(command, PrefillCommand):
        forward, sampler = _forward(devices, command), command.sample
        prompt = prompt_logprobs.launch(devices, command.bucket, forward) if command.wants_prompt_logprobs else ()
        # The slots show overflow. Without a sampled token they are also what to wait for: pages are shared once
        # they are written.
        needed = not command.samples or devices.layout.functions.may_overflow
        shown = local_part(forward.slots) if needed else None
        results = ForwardResults(shown, prompt, routed_experts=forward.routed_experts)
    else:
        assert devices.prefilled is not None  # the command before has left it
        forward, sampler = devices.prefilled, command
    if sampler is not None:
        devices.prefilled, sampled = launch_sampler(devices, forward, sampler)
        return results._replace(sampled=sampled)
    waits = forward.scores is not None  # for masks
    devices.prefilled = forward if waits or devices.layout.cfg.speculative is not None else None
    return results


def _forward(devices: Devices, command: PrefillCommand) -> Forward:
    tokens, rows = command.arrays(devices.layout.num_local_ranks, devices.layout.cfg)
    about = command.has_context, command.longest, command.keys, command.pairs
    form = prefill_form(devices.layout, command.bucket, *about)
    program = devices.programs.get(Key(NAME, command.bucket, form))
    batch = devices.put(tokens), devices.put(rows)
    devices.pages, devices.state, scores, hidden, draft_input, routed_experts, slots = program(
        devices.params, devices.pages, devices.state, *batch
    )
    draft_input = hidden if draft_input is None else draft_input
    experts = copy_experts(devices, routed_experts) if command.wants_routed_experts else None
    scores = scores if command.samples else None
    return Forward(slots, scores, hidden, draft_input, batch, routed_experts=experts)


def prefill_body(
    layout: Layout,
    params: object,
    pages: jax.Array,
    state: DecodeState,
    tokens: jax.Array,
    rows: jax.Array,
    *,
    form: AttentionForm,
    capacity: int,
    program: int,
) -> tuple[jax.Array, DecodeState, jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array]:
    """Runs the chunks `rows` `[B, columns]` over `tokens` `[T]`, for one rank; enters them into the state.

    Returns pages, state, scores `[Xn, B, 1, W / Xn]` after each chunk's last token, hidden states, what a module takes
    of all tokens where that is something else, the tokens' experts if the engine returns them, and the slots `[B]` to
    sample: none where a buffer between devices overflowed. The hidden states are those of all tokens `[T, D]` if a
    module takes them, else of the first tokens, whose log-probabilities may be needed. `form` and `capacity` of the
    batch are chosen on the host. `program` is the number of its counters.
    """
    functions, cfg = layout.functions, layout.model_cfg
    slots, count, context, follows = (rows[:, i] for i in range(4))
    batch = ragged_batch(layout.cfg, tokens, rows, form, capacity)
    if layout.cfg.enable_return_routed_experts:
        batch = dataclasses.replace(batch, returns_routed_experts=True)
    out = functions.prefill(params, cfg, batch, pages)
    scores = functions.scores(params, cfg, out.hidden[last_rows(batch)][:, None])
    window_table = state.window_table
    if window_table is not None:
        window_table = window_table.at[slots].set(batch.window_table, mode="drop")
    state = dataclasses.replace(
        state,
        lengths=state.lengths.at[slots].set(context + count, mode="drop"),
        page_table=state.page_table.at[slots].set(batch.page_table, mode="drop"),
        window_table=window_table,
        controls=state.controls.at[slots].set(rows[:, 4:HEADER], mode="drop"),
    )
    state = layout.update_counters(state, out, program)
    sampling = jnp.where(follows < 0, slots, state.lengths.shape[0])
    hidden = out.hidden[: prompt_logprobs.num_hidden_rows(layout, tokens.shape[0])]
    draft_input = layout.draft_input(out) if cfg.hyper_connections is not None else None
    routed_experts = layout.routed_experts(out)
    return out.pages, state, scores, hidden, draft_input, routed_experts, layout.sampling_slots(sampling, out)


KIND = JobKind(NAME, PrefillCommand | SampleCommand, PrefillPlanner, programs, launch, replicated=attrgetter("sampled"))
