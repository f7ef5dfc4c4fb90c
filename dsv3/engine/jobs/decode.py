"""Decode: every request that has its first token advances by one token, or by several where its drafts are accepted."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from operator import attrgetter

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dsv3.config.engine import EngineConfig, bucket
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.form_selection import ANY_LENGTH, decode_form, decode_forms
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import DecodeState, decode_batch, existing
from dsv3.engine.job import Command, EngineView, JobKind, Planned
from dsv3.engine.jobs.sample import (
    ForwardContext,
    ForwardResults,
    SampleCommand,
    copy_experts,
    defer_for_masks,
    launch_sampler,
    sampler_command,
)
from dsv3.model.batch import AttentionForm
from dsv3.scheduler.balance import DecodeBalance
from dsv3.scheduler.batch_slots import BatchRows
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.results import CapacityFactor, process_results

NAME = "decode"


class DecodeCommand(Command, frozen=True, tag=0):
    """Rows of a decode batch, `width` tokens each, and how they are sampled; everything else is on the devices.

    `rows` has for each row its slot within the rank (`max_num_seqs` in padding), its new page (-1: none), the index of
    that page in its page table, and for a model with a window the new window page beside it. No query of any rank sees
    more than `longest` tokens. Without `sample` a second command follows with the sampler, once its bitmasks are
    computed. With `wants_routed_experts` the experts of the tokens are results, too.
    """

    rows: np.ndarray  # [ranks, B, 3] int32, [ranks, B, 4] with a window
    width: int
    longest: int = ANY_LENGTH
    sample: SampleCommand | None = None
    wants_routed_experts: bool = False

    def part(self, ranks: range) -> "DecodeCommand":
        """Returns the rows of `ranks`."""
        sample = None if self.sample is None else self.sample.part(ranks)
        return msgspec.structs.replace(self, rows=self.rows[ranks.start : ranks.stop], sample=sample)

    @property
    def amount(self) -> int:
        """Rows of all ranks, padding included."""
        return self.rows.shape[0] * self.rows.shape[1]


class DecodePlanner:
    """Schedules all requests that can have another token; reuses the batch while its rows stay the same.

    Where rows need more capacity than the batch has (`CapacityFactor`), they are computed in micro-steps.
    """

    def __init__(self, view: EngineView) -> None:
        self._view, self._scheduler, self._cfg = view, view.scheduler, view.scheduler.cfg
        self._capacity = CapacityFactor(1 << (self._cfg.num_ranks * self._cfg.max_num_seqs - 1).bit_length())
        self._factor, self._micro_steps, self._micro_step = 1, 1, 0
        self._width = 1
        self._rows: BatchRows | None = None
        self._sample, self._is_constrained, self._wants_routed_experts = SampleCommand(0), False, False
        self._version = -1
        self._columns = _columns(self._cfg)
        self._template = self._padding = np.empty((0, 0, self._columns), np.int32)

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Schedules one row per request; allocates pages to rows that need one."""
        rows = self._live_rows()
        if rows is None:
            return []
        mine, batch = self._micro_step_rows(rows) if self._micro_steps > 1 else (rows, self._template)
        slots = self._scheduler.slots
        short = slots.planned[mine.slots] + self._cfg.tokens_ahead > slots.capacity[mine.slots]
        if short.any():
            return self._plan_with_pages(mine, batch.copy(), short)
        return self._planned(mine, batch)  # the template is never written to: a change makes another one

    def _micro_step_rows(self, rows: BatchRows) -> tuple[BatchRows, np.ndarray]:
        """Returns the rows of the next micro-step, and their batch; rows of a rank are spread over the micro-steps."""
        self._micro_step += 1
        longest, batch = int(rows.position.max()) + 1, self._template.copy()
        waits = (rows.position + rows.rank * longest) % self._micro_steps != self._micro_step % self._micro_steps
        return self._without(rows, waits, batch), batch

    def _plan_with_pages(self, rows: BatchRows, batch: np.ndarray, short: np.ndarray) -> list[Planned]:
        """Schedules a step in which some rows need a page; rows that get none are left out."""
        slots = self._scheduler.slots
        extended, pages, stalled = self._scheduler.allocate_next_pages(rows.slots[short])
        left = rows
        if self._version != slots.version:  # pre-emption has removed some
            live = self._live_rows()
            if live is None:
                return []
            batch = self._template.copy()
            left = self._without(live, ~np.isin(live.slots, rows.slots), batch)
        self._write_pages(batch, left, extended, pages)
        if stalled:
            left = self._without(left, np.isin(left.slots, stalled), batch)
        return self._planned(left, batch)

    def _planned(self, rows: BatchRows, batch: np.ndarray) -> list[Planned]:
        if not len(rows.slots):
            return []
        planned = self._scheduler.slots.planned[rows.slots] + self._width
        self._scheduler.slots.planned[rows.slots] = planned
        longest = int(planned.max()) - 1  # the last token that a row gives is not in the cache yet
        context, asks = ForwardContext(rows, self._factor, []), self._wants_routed_experts
        if not self._is_constrained:
            return [Planned(NAME, DecodeCommand(batch, self._width, longest, self._sample, asks), context)]
        deferred = defer_for_masks(self._view.masks, self._sample, rows, self._width)
        return [Planned(NAME, DecodeCommand(batch, self._width, longest, None, asks), context, deferred)]

    def on_results(self, planned: Planned, results: ForwardResults, outputs: StepOutputs) -> None:
        """Updates the capacity factor from overflows, and processes the tokens."""
        context: ForwardContext = planned.context
        if results.slots is not None:
            self._capacity.update(context.factor, bool((results.slots > self._cfg.max_num_seqs).any()))
        if results.sampled:
            process_results(self._scheduler, context.rows, results.sampled, outputs, results.routed_experts)

    def stats(self) -> DecodeBalance | None:
        """Returns how even the ranks' loads are."""
        return DecodeBalance.of(self._scheduler.slots) if self._cfg.num_ranks > 1 else None

    def _write_pages(self, batch: np.ndarray, rows: BatchRows, extended: np.ndarray, pages: np.ndarray) -> None:
        slots = self._scheduler.slots
        kept = slots.decoding[extended]
        if not kept.all():  # pre-empted meanwhile
            extended, pages = extended[kept], pages[kept]
        at = rows.slots.searchsorted(extended)
        rank, position = rows.rank[at], rows.position[at]
        batch[rank, position, 1] = pages
        index = slots.capacity[extended] // self._cfg.page_size - 1
        batch[rank, position, 2] = index
        if self._cfg.has_window:
            sequences = map(slots.sequences.__getitem__, extended.tolist())
            batch[rank, position, 3] = [s.window_pages[i] for s, i in zip(sequences, index.tolist(), strict=True) if s]

    def _live_rows(self) -> BatchRows | None:
        """Returns rows of all requests that decode and whose last token is not scheduled yet."""
        slots = self._scheduler.slots
        same = self._version == slots.version and self._rows is not None and self._factor == self._capacity.factor
        mine = self._rows.slots if same and self._rows is not None else slots.decoding.nonzero()[0]
        done = slots.planned[mine] >= slots.limit[mine]
        if done.any():
            slots.stop_decoding(mine[done])
        elif same:
            return self._rows
        self._rows = self._make_rows(slots.decoding.nonzero()[0])
        self._version = slots.version
        return self._rows

    def _make_rows(self, mine: np.ndarray) -> BatchRows | None:
        """Returns the rows of the slots `mine`; selects the bucket (captured batch size) that holds them."""
        if not len(mine):
            return None
        cfg = self._cfg
        rank = mine // cfg.max_num_seqs
        starts = np.searchsorted(mine, np.arange(cfg.num_ranks) * cfg.max_num_seqs)
        position = np.arange(len(mine)) - starts[rank]
        longest, self._factor = int(position.max()) + 1, self._capacity.factor
        size = bucket(cfg.decode_buckets, min(longest * self._factor, cfg.max_num_seqs))
        self._micro_steps = min(-(-longest * self._factor // size), longest * cfg.num_ranks)
        self._width = cfg.width(size)
        if self._padding.shape[1] != size:
            self._padding = np.zeros((cfg.num_ranks, size, self._columns), np.int32)
            self._padding[..., :2] = cfg.max_num_seqs, -1
        batch = self._padding.copy()
        # With three indices numpy takes six times as long, and as long to fill a batch as to plan all else.
        batch.reshape(-1)[self._columns * (rank * size + position)] = mine - rank * cfg.max_num_seqs
        self._template = batch
        self._sample, self._is_constrained = sampler_command(self._scheduler.slots, mine)
        self._wants_routed_experts = bool(self._scheduler.slots.wants_routed_experts[mine].any())
        return BatchRows.at(self._scheduler.slots, mine, rank, position)

    def _without(self, rows: BatchRows, out: np.ndarray, batch: np.ndarray) -> BatchRows:
        """Returns the rows that are not `out` (`[n]` bool); those become padding in `batch`."""
        batch[rows.rank[out], rows.position[out], 0] = self._cfg.max_num_seqs
        return rows.only(~out)


def _columns(cfg: EngineConfig) -> int:
    """Returns the columns of `DecodeCommand.rows`."""
    return 4 if cfg.has_window else 3


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket (captured batch size), two with sparse attention on a GPU."""
    cfg = layout.cfg
    for size, form in itertools.product(cfg.decode_buckets, decode_forms(layout)):
        width = cfg.width(size)
        number = cfg.program_number(NAME, size)
        body = functools.partial(decode_body, layout, width=width, form=form, program=number)
        arguments = (layout.params, layout.pages, layout.state, layout.array(size, _columns(cfg)))
        key, padding = Key(NAME, size, form, width), {3: np.array([layout.padding_slot, -1, 0, 0][: _columns(cfg)])}
        yield layout.per_rank(key, body, arguments, donated=(1, 2), takes_params=True, padding=padding)


def launch(devices: Devices, command: DecodeCommand | SampleCommand) -> ForwardResults:
    """Starts the batch, or the sampler of one that waited for bitmasks; leaves what a drafter needs."""
    slots = None
    if isinstance(command, DecodeCommand):
        forward, sampler = _forward(devices, command), command.sample
        if devices.layout.functions.may_overflow:
            slots = forward.slots.addressable_data(0)  # the same on every rank
            slots.copy_to_host_async()
    else:
        assert devices.decoded is not None  # the command before has left it
        forward, sampler = devices.decoded, command
    if sampler is None:
        devices.decoded = forward
        return ForwardResults(slots)
    devices.decoded, sampled = launch_sampler(devices, forward, sampler)
    return ForwardResults(slots, sampled=sampled, routed_experts=forward.routed_experts)


def _forward(devices: Devices, command: DecodeCommand) -> Forward:
    form = decode_form(devices.layout, command.longest)
    program = devices.programs.get(Key(NAME, command.rows.shape[1], form, command.width))
    devices.pages, devices.state, scores, draft_input, routed_experts, slots = program(
        devices.params, devices.pages, devices.state, devices.put(command.rows)
    )
    experts = copy_experts(devices, routed_experts) if command.wants_routed_experts else None
    return Forward(slots, scores, draft_input=draft_input, routed_experts=experts)


def decode_body(
    layout: Layout,
    params: object,
    pages: jax.Array,
    state: DecodeState,
    rows: jax.Array,
    *,
    width: int,
    form: AttentionForm,
    program: int,
) -> tuple[jax.Array, DecodeState, jax.Array, jax.Array | None, jax.Array | None, jax.Array]:
    """Runs the last token and the drafts of the slots in `rows` `[B, columns]` (see `DecodeCommand`), for one rank.

    Returns pages, state, scores `[Xn, B, S, W / Xn]`, what a module takes of each token if there is one, the experts of
    each token if the engine returns them, and the slots `[B]` to sample: none where a buffer between devices
    overflowed. The state does not change then, except for its page table, and what was written into pages is
    overwritten by the retry. `form` is the batch's, `program` the number of its counters.
    """
    functions, cfg = layout.functions, layout.model_cfg
    slots, new_page, index = rows[:, 0], rows[:, 1], rows[:, 2]
    extended = jnp.where(new_page >= 0, slots, state.lengths.shape[0])
    page_table, window_table = state.page_table.at[extended, index].set(new_page, mode="drop"), state.window_table
    if window_table is not None:
        window_table = window_table.at[extended, index].set(rows[:, 3], mode="drop")
    state = dataclasses.replace(state, page_table=page_table, window_table=window_table)
    batch = decode_batch(state, slots, state.tokens[existing(state, slots), :width], width - 1, form)
    if layout.cfg.enable_return_routed_experts:
        batch = dataclasses.replace(batch, returns_routed_experts=True)
    out = functions.decode(params, cfg, batch, pages)
    scores = functions.scores(params, cfg, out.hidden)
    state = layout.update_counters(state, out, program)
    draft_input, routed_experts = layout.draft_input(out), layout.routed_experts(out)
    return out.pages, state, scores, draft_input, routed_experts, layout.sampling_slots(slots, out)


def _applies(components: EngineComponents) -> bool:
    return components.cfg.role != "prefill"


KIND = JobKind(
    NAME,
    DecodeCommand | SampleCommand,
    DecodePlanner,
    programs,
    launch,
    _applies,
    replicated=attrgetter("sampled"),
)
