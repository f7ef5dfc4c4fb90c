"""Decode: every request that has its first token advances by one token, or by several where it brought drafts."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.engine import bucket
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices, Forward
from dsv3.engine.device.form_selection import ANY_LENGTH, decode_form, decode_forms
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.device.state import DecodeState
from dsv3.engine.job import Command, EngineView, JobKind, Planned
from dsv3.engine.jobs.sample import (
    ForwardContext,
    ForwardResults,
    SampleCommand,
    launch_sampler,
    masked_later,
    sampler_of,
)
from dsv3.model.batch import AttentionForm, DecodeBatch
from dsv3.scheduler.balance import DecodeBalance
from dsv3.scheduler.batch_slots import BatchRows
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.results import CapacityFactor, process_results

NAME = "decode"


class DecodeCommand(Command, frozen=True, tag=0):
    """Rows of a decode batch, `width` tokens each, and how they are sampled; everything else is on the devices.

    `rows` has for each row its slot within the rank (`max_num_seqs` in padding), its new page (-1: none), and the index
    of that page in its page table. No query of any rank sees more than `longest` tokens. Without `sample` a command of
    its own follows, once there are masks.
    """

    rows: np.ndarray  # [ranks, B, 3] int32
    width: int
    longest: int = ANY_LENGTH
    sample: SampleCommand | None = None

    def part(self, ranks: range) -> "DecodeCommand":
        """Returns the rows of `ranks`."""
        sample = None if self.sample is None else self.sample.part(ranks)
        return DecodeCommand(self.rows[ranks.start : ranks.stop], self.width, self.longest, sample)

    @property
    def amount(self) -> int:
        """Rows of all ranks, padding included."""
        return self.rows.shape[0] * self.rows.shape[1]


class DecodePlanner:
    """Launches all requests that can have another token; keeps the batch while its rows stay the same.

    Where rows need more room than that (`CapacityFactor`), they take turns in a step.
    """

    def __init__(self, view: EngineView) -> None:
        self._view, self._scheduler, self._cfg = view, view.scheduler, view.scheduler.cfg
        self._room = CapacityFactor(_power_of_two(self._cfg.num_ranks * self._cfg.max_num_seqs))
        self._factor, self._turns, self._turn = 1, 1, 0
        self._width = 1
        self._rows: BatchRows | None = None
        self._sample, self._held = SampleCommand(0), False
        self._version = -1
        self._template = self._padding = np.empty((0, 0, 3), np.int32)

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Plans one row per request; gives pages to those that need one."""
        rows = self._live_rows()
        if rows is None:
            return []
        mine, batch = self._of_turn(rows) if self._turns > 1 else (rows, self._template)
        slots = self._scheduler.slots
        short = slots.planned[mine.slots] + self._cfg.tokens_ahead > slots.capacity[mine.slots]
        if short.any():
            return self._plan_with_pages(mine, batch.copy(), short)
        return self._planned(mine, batch)  # nobody writes to the template: a change makes another one

    def _of_turn(self, rows: BatchRows) -> tuple[BatchRows, np.ndarray]:
        """Returns the rows whose turn it is, and their batch; those of a rank that go stand apart."""
        self._turn += 1
        longest, batch = int(rows.position.max()) + 1, self._template.copy()
        waits = (rows.position + rows.rank * longest) % self._turns != self._turn % self._turns
        return self._without(rows, waits, batch), batch

    def _plan_with_pages(self, rows: BatchRows, batch: np.ndarray, short: np.ndarray) -> list[Planned]:
        """Plans a step in which some rows need a page; those that get none sit it out."""
        slots = self._scheduler.slots
        extended, pages, stalled = self._scheduler.extend(rows.slots[short])
        left = rows
        if self._version != slots.version:  # pre-emption has removed some
            live = self._live_rows()
            if live is None:
                return []
            batch = self._template.copy()
            left = self._without(live, ~np.isin(live.slots, rows.slots), batch)
        self._enter_pages(batch, left, extended, pages)
        if stalled:
            left = self._without(left, np.isin(left.slots, stalled), batch)
        return self._planned(left, batch)

    def _planned(self, rows: BatchRows, batch: np.ndarray) -> list[Planned]:
        if not len(rows.slots):
            return []
        planned = self._scheduler.slots.planned[rows.slots] + self._width
        self._scheduler.slots.planned[rows.slots] = planned
        longest = int(planned.max()) - 1  # the last token that a row gives is not in the cache yet
        context = ForwardContext(rows, self._factor, [])
        if not self._held:
            return [Planned(NAME, DecodeCommand(batch, self._width, longest, self._sample), context)]
        later = masked_later(self._view.masks, self._sample, rows, self._width)
        return [Planned(NAME, DecodeCommand(batch, self._width, longest), context, later)]

    def collect(self, planned: Planned, results: ForwardResults, outputs: StepOutputs) -> None:
        """Notes whether the step had room for its rows, where it tells, and the tokens."""
        context: ForwardContext = planned.context
        if results.slots is not None:
            self._room.note(context.factor, bool((results.slots > self._cfg.max_num_seqs).any()))
        if results.sampled:
            process_results(self._scheduler, context.rows, results.sampled, outputs)

    def stats(self) -> DecodeBalance | None:
        """Says how even the ranks' loads are."""
        return DecodeBalance.of(self._scheduler.slots) if self._cfg.num_ranks > 1 else None

    def _enter_pages(self, batch: np.ndarray, rows: BatchRows, extended: np.ndarray, pages: np.ndarray) -> None:
        slots = self._scheduler.slots
        kept = slots.decoding[extended]
        if not kept.all():  # pre-empted after all
            extended, pages = extended[kept], pages[kept]
        at = rows.slots.searchsorted(extended)
        rank, position = rows.rank[at], rows.position[at]
        batch[rank, position, 1] = pages
        batch[rank, position, 2] = slots.capacity[extended] // self._cfg.page_size - 1

    def _live_rows(self) -> BatchRows | None:
        """Returns rows of all requests that decode and have not planned their last token."""
        slots = self._scheduler.slots
        same = self._version == slots.version and self._rows is not None and self._factor == self._room.factor
        mine = self._rows.slots if same and self._rows is not None else slots.decoding.nonzero()[0]
        done = slots.planned[mine] >= slots.limit[mine]
        if done.any():
            slots.pause(mine[done])
        elif same:
            return self._rows
        self._rows = self._make_rows(slots.decoding.nonzero()[0])
        self._version = slots.version
        return self._rows

    def _make_rows(self, mine: np.ndarray) -> BatchRows | None:
        if not len(mine):
            return None
        cfg = self._cfg
        rank = mine // cfg.max_num_seqs
        starts = np.searchsorted(mine, np.arange(cfg.num_ranks) * cfg.max_num_seqs)
        position = np.arange(len(mine)) - starts[rank]
        longest, self._factor = int(position.max()) + 1, self._room.factor
        size = bucket(cfg.decode_buckets, min(longest * self._factor, cfg.max_num_seqs))
        self._turns = min(-(-longest * self._factor // size), longest * cfg.num_ranks)
        self._width = cfg.width(size)
        if self._padding.shape[1] != size:
            self._padding = np.empty((cfg.num_ranks, size, 3), np.int32)
            self._padding[:] = cfg.max_num_seqs, -1, 0
        batch = self._padding.copy()
        # With three indices numpy takes six times as long, and as long to fill a batch as to plan all else.
        batch.reshape(-1)[3 * (rank * size + position)] = mine - rank * cfg.max_num_seqs
        self._template = batch
        self._sample, self._held = sampler_of(self._scheduler.slots, mine)
        return BatchRows.at(self._scheduler.slots, mine, rank, position)

    def _without(self, rows: BatchRows, out: np.ndarray, batch: np.ndarray) -> BatchRows:
        """Returns the rows that do not sit this step `out` (`[n]` bool); those become padding in `batch`."""
        batch[rows.rank[out], rows.position[out], 0] = self._cfg.max_num_seqs
        return rows.only(~out)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket, two with sparse attention on a GPU."""
    cfg = layout.cfg
    for size, form in itertools.product(cfg.decode_buckets, decode_forms(layout)):
        width = cfg.width(size)
        number = cfg.program_number(NAME, size)
        body = functools.partial(decode_body, layout, width=width, form=form, program=number)
        arguments = (layout.params, layout.pages, layout.state, layout.array(size, 3))
        key, padding = Key(NAME, size, form, width), {3: np.array([layout.no_slot, -1, 0])}
        yield layout.per_rank(key, body, arguments, donated=(1, 2), takes_params=True, padding=padding)


class DecodeWorker:
    """Launches the decode program, by bucket, and its sampler."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def launch(self, command: DecodeCommand | SampleCommand) -> ForwardResults:
        """Starts the batch, or the sampler of one that has waited for masks; leaves what a drafter needs."""
        devices, slots = self._devices, None
        if isinstance(command, DecodeCommand):
            forward, sampler = self._forward(command), command.sample
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
        return ForwardResults(slots, sampled=sampled)

    def _forward(self, command: DecodeCommand) -> Forward:
        devices = self._devices
        form = decode_form(devices.layout, command.longest)
        program = devices.programs.get(Key(NAME, command.rows.shape[1], form, command.width))
        devices.pages, devices.state, scores, hidden, slots = program(
            devices.params, devices.pages, devices.state, devices.put(command.rows)
        )
        return Forward(slots, scores, hidden)


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
) -> tuple[jax.Array, DecodeState, jax.Array, jax.Array | None, jax.Array]:
    """Runs the last token and the drafts of the slots in `rows` `[B, 3]` (see `DecodeCommand`), for one rank.

    Returns pages, state, scores `[Xn, B, S, W / Xn]`, hidden states `[B, S, D]` where something drafts from them, and
    the slots `[B]` that shall sample: none where a buffer between devices was too small. The state does not change
    then, but for its page table, and what was written into pages is written again. `form` is the batch's, `program` the
    number under which it counts.
    """
    functions, cfg = layout.functions, layout.model_cfg
    slots, new_page, index = rows[:, 0], rows[:, 1], rows[:, 2]
    num_slots = state.lengths.shape[0]
    held = jnp.minimum(slots, num_slots - 1)
    lengths = jnp.where(slots < num_slots, state.lengths[held] + (width - 1), 0)
    page_table = state.page_table.at[jnp.where(new_page >= 0, slots, num_slots), index].set(new_page, mode="drop")
    batch = DecodeBatch(state.tokens[held, :width], lengths, page_table[held], form)
    out = functions.decode(params, cfg, batch, pages)
    scores = functions.scores(params, cfg, out.hidden)
    counters = layout.count(state.counters, out, program)
    state = dataclasses.replace(state, page_table=page_table, counters=counters)
    return out.pages, state, scores, out.hidden if functions.draft else None, layout.sampling(slots, out)


def _applies(parts: EngineComponents) -> bool:
    return parts.cfg.role != "prefill"


KIND = JobKind(
    NAME, DecodeCommand | SampleCommand, DecodePlanner, programs, DecodeWorker, _applies, agreed=attrgetter("sampled")
)
