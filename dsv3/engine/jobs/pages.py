"""Pages: copies pages from the devices to the tiers below, and loads those of a prompt's beginning from there.

A page goes out once it is findable, unless it has been given away by then. A request whose prefix reaches further in
the tiers than on its device gets a slot and pages, and waits while threads bring the values. Each step takes up what
has come. What does not come in time, or does not verify, is computed.
"""

import dataclasses
import functools
import logging
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from dsv3.cache.events.record import Record, Watch
from dsv3.cache.identity import LAYOUT_VERSION
from dsv3.cache.keys import Key as PageKey
from dsv3.cache.layout import page_bytes
from dsv3.cache.page import PAGE_SIZE
from dsv3.cache.tiers.arena import Arena, arena_bytes, cells_within
from dsv3.cache.tiers.shared_memory import SharedMemory
from dsv3.cache.tiers.store import open_store
from dsv3.cache.tiers.tiers import Batch, Fetch, Tiers
from dsv3.engine.config import bucket
from dsv3.engine.device.devices import Devices
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.job import Command, EngineView, JobKind, Planned
from dsv3.engine.jobs.page_values import put_in, take_out, value_shape
from dsv3.engine.limits import TIER_STEP_BYTES
from dsv3.engine.parts import Parts
from dsv3.engine.requests.sequence import Sequence
from dsv3.options import split_address
from dsv3.request import StepOutputs
from dsv3.transfer.client import Peers
from dsv3.transfer.protocol import VERSION, Hello
from dsv3.transfer.server import PageServer
from dsv3.trust.key_file import read_key
from sharding.processes import local_part

_log = logging.getLogger(__name__)

NAME = "pages"
OUT, IN = "pages_out", "pages_in"
BATCH_BYTES = 2**26  # per device: staging memory of one launch, twice
_MOST_AT_ONCE = 64
_IDLE_WAIT_S = 2e-3


class Outgoing(NamedTuple):
    """A page to copy out of a rank's pool, and its key."""

    key: PageKey
    page: int


class Incoming(NamedTuple):
    """Values for `pages` of `rank`."""

    rank: int
    pages: list[int]
    batch: Batch


class Copy(Command, frozen=True):
    """Pages of each rank to copy at once, -1 in padding; `values` are those of the ranks that load, by rank."""

    pages: np.ndarray  # [ranks, bucket] int32
    values: dict[int, np.ndarray]  # uint8 [bucket, bytes of a page]


class PagesCommand(Command, frozen=True):
    """Copies out, then copies in."""

    out: list[Copy]
    into: list[Copy]


class Context(NamedTuple):
    """What `collect` needs: keys of each copy by rank, and how far requests' prefixes are loaded."""

    keys: list[dict[int, list[PageKey]]]
    loaded: list[tuple[Sequence, int, int]]  # with the epoch of its slot, and its loaded tokens


@dataclasses.dataclass(frozen=True)
class PageStats:
    """Requests that wait for pages of their prefix, and what each tier has counted, by its name."""

    num_loading: int
    tiers: dict[str, Any]


def page_buckets(page_bytes: int) -> tuple[int, ...]:
    """Returns how many pages are copied at once: 1, 8, 64, as far as they fit a batch's bytes."""
    return tuple(n for n in (1, 8, _MOST_AT_ONCE) if n == 1 or n * page_bytes <= BATCH_BYTES)


class Opened(NamedTuple):
    """The tiers of an engine, the memory of the first, and the port for other instances."""

    tiers: Tiers
    memory: SharedMemory | None
    server: PageServer | None


def open_tiers(parts: Parts, events: Record | None = None) -> Opened:
    """Opens the tiers that the limits ask for, and the port for other instances.

    `events` hears what the tiers store and remove. Raises MemoryError, OSError or ValueError where one cannot be.
    """
    cfg, size = parts.cfg, page_bytes(parts.model_cfg, parts.cfg.cache_dtype)
    cells = cells_within(int(cfg.kv_offloading_size * 2**30), size)
    if not cells:
        raise ValueError(
            f"kv_offloading_size: {cfg.kv_offloading_size} GiB do not hold one page of {size} bytes; raise it"
        )
    name = f"{LAYOUT_VERSION}-{cfg.fingerprint[:16]}"
    memory = SharedMemory(name, arena_bytes(cells, size))
    on_host, on_store = (None if events is None else Watch(events, medium) for medium in ("CPU", "STORAGE"))
    arena = Arena(memory.array, size, cells, on_host)
    _log.info("host memory in %s: room for %d pages, %d found again", memory.path, cells, len(arena))
    limit = int(cfg.kv_store_size * 2**30)
    store = open_store(cfg.kv_store, cfg.fingerprint[:16], size, limit, on_store) if cfg.kv_store else None
    if cfg.transfer_key_file is None:
        return Opened(Tiers(page_buckets(size), arena, store), memory, None)
    secret, hello = read_key(cfg.transfer_key_file, "transfer_key_file"), Hello(VERSION, cfg.identity, size)
    server = None
    if cfg.transfer_address is not None:
        server = PageServer(*split_address(cfg.transfer_address, "transfer_address"), secret, hello, arena)
    return Opened(Tiers(page_buckets(size), arena, store, Peers(secret, hello)), memory, server)


class PagesPlanner:
    """Decides which pages a step copies. `opened` are the tiers, those that the limits ask for if not given."""

    def __init__(self, view: EngineView, opened: Opened | None = None) -> None:
        self._scheduler, self._cfg = view.scheduler, view.scheduler.cfg
        self._tiers, self.memory, self.server = opened or open_tiers(view.parts, view.scheduler.events)
        view.scheduler.tiers = self._tiers
        self._buckets = page_buckets(self._tiers.value_bytes)
        self._most = max(self._buckets[-1], TIER_STEP_BYTES // self._tiers.value_bytes)
        self._fetches: dict[int, tuple[Sequence, Fetch]] = {}  # by the epoch of the slot
        self._under_way = 0  # jobs
        self._measured_tokens, self._measured_at = 0, self._tiers.now()

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Plans what can be copied now; waits a moment where nobody has anything else to do."""
        self._measure()
        self._scheduler.admission.take_answers()
        incoming, loaded = self._arrived()
        out, keys = self._grouped_out(self._departing())
        if out or incoming:
            self._under_way += 1
            command = PagesCommand(out, self._grouped_in(incoming))
            return [Planned(NAME, command, Context(keys, loaded))]
        if not step and self._scheduler.only_waits_for_tiers:
            self._tiers.wait(_IDLE_WAIT_S)
        return []

    def collect(self, planned: Planned, results: list[np.ndarray], outputs: StepOutputs) -> None:
        """Hands what has left the devices to the tiers, and makes loaded pages findable."""
        context, arrays = planned.context, iter(results)
        for by_rank in context.keys:
            for keys in by_rank.values():
                values = next(arrays)[0]
                self._keep(keys, values.reshape(len(values), -1).view(np.uint8)[: len(keys)])
        slots = self._scheduler.slots
        for sequence, epoch, tokens in context.loaded:
            if sequence.slot >= 0 and slots.epoch[sequence.slot] == epoch:
                self._scheduler.publish(sequence, tokens)
        self._under_way -= 1
        if not self._under_way:
            self._scheduler.distrusted.clear()

    def stats(self) -> PageStats:
        """Returns what the tiers have counted."""
        return PageStats(len(self._scheduler.loading), dict(self._tiers.counts()))

    def _keep(self, keys: list[PageKey], values: np.ndarray) -> None:
        """Hands over pages but those that have been distrusted since."""
        sound = [i for i, key in enumerate(keys) if key not in self._scheduler.distrusted]
        if len(sound) == len(keys):
            self._tiers.keep(keys, values)
        elif sound:
            self._tiers.keep([keys[i] for i in sound], values[sound])

    def _measure(self) -> None:
        """Notes how fast prompts are computed, from the tokens and the time since the last step."""
        now, tokens = self._tiers.now(), self._scheduler.prompt_tokens
        self._tiers.compute_rate.note(tokens - self._measured_tokens, now - self._measured_at)
        self._measured_tokens, self._measured_at = tokens, now

    def _arrived(self) -> tuple[list[Incoming], list[tuple[Sequence, int, int]]]:
        """Returns the batches that have come, and how far each request's prefix is loaded with them.

        Requests for which nothing more will come begin their prefill.
        """
        scheduler, slots = self._scheduler, self._scheduler.slots
        incoming, loaded = [], []
        taken: dict[int, int] = defaultdict(int)  # pages, by rank
        self._drop_those_that_left()
        for sequence in list(scheduler.loading):
            rank, epoch = slots.rank_of(sequence.slot), int(slots.epoch[sequence.slot])
            if epoch not in self._fetches:
                first = sequence.prefilled // PAGE_SIZE
                scheduler.spell(sequence, first, sequence.load_stop)
                self._fetches[epoch] = sequence, self._tiers.fetch(sequence.keys[first : sequence.load_stop])
            _, fetch = self._fetches[epoch]
            while taken[rank] < self._most and (batch := fetch.take()) is not None:
                first = sequence.prefilled // PAGE_SIZE
                pages = sequence.pages[first : first + batch.num_pages]
                scheduler.note_loaded(sequence, batch.num_pages)
                taken[rank] += batch.num_pages
                if batch.num_pages:
                    incoming.append(Incoming(rank, pages, batch))
                    loaded.append((sequence, epoch, sequence.prefilled))
            if fetch.is_over:
                del self._fetches[epoch]
                scheduler.begin_prefill(sequence)
        return incoming, loaded

    def _drop_those_that_left(self) -> None:
        slots = self._scheduler.slots
        for epoch, (sequence, fetch) in list(self._fetches.items()):
            if sequence.slot < 0 or slots.epoch[sequence.slot] != epoch:
                fetch.cancel()
                del self._fetches[epoch]

    def _departing(self) -> list[list[Outgoing]]:
        """Takes the pages that leave with this step, by rank; drops those not findable, and those that the host has."""
        outgoing, caches = self._scheduler.outgoing, self._scheduler.caches
        mine: list[list[Outgoing]] = [[] for _ in caches]
        for _ in range(len(outgoing)):
            rank, key, page = outgoing[0]
            if len(mine[rank]) == self._most:
                break
            outgoing.popleft()
            if caches[rank].finds(key, page) and self._tiers.lacks(key):
                mine[rank].append(Outgoing(key, page))
        return mine

    def _grouped_out(self, departing: list[list[Outgoing]]) -> tuple[list[Copy], list[dict[int, list[PageKey]]]]:
        copies, keys = [], []
        most = self._buckets[-1]
        for start in range(0, max(map(len, departing), default=0), most):
            parts = {rank: mine[start : start + most] for rank, mine in enumerate(departing) if len(mine) > start}
            copies.append(self._copy({rank: [each.page for each in part] for rank, part in parts.items()}, {}))
            keys.append({rank: [each.key for each in part] for rank, part in parts.items()})
        return copies, keys

    def _grouped_in(self, incoming: list[Incoming]) -> list[Copy]:
        """Joins batches of different ranks and of one size, which are loaded at once."""
        queues: dict[tuple[int, int], list[Incoming]] = defaultdict(list)
        for each in incoming:
            queues[len(each.batch.values), each.rank].append(each)
        turns: dict[tuple[int, int], dict[int, Incoming]] = defaultdict(dict)
        for (size, rank), mine in queues.items():
            for turn, each in enumerate(mine):
                turns[size, turn][rank] = each
        return [
            self._copy(
                {rank: each.pages for rank, each in group.items()},
                {rank: each.batch.values for rank, each in group.items()},
            )
            for group in turns.values()
        ]

    def _copy(self, pages: dict[int, list[int]], values: dict[int, np.ndarray]) -> Copy:
        size = max(map(len, values.values()), default=0) or bucket(self._buckets, max(map(len, pages.values())))
        table = np.full((self._cfg.num_ranks, size), -1, np.int32)
        for rank, mine in pages.items():
            table[rank, : len(mine)] = mine
        return Copy(table, values)


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket and direction."""
    cfg, one = layout.cfg, value_shape(layout.model_cfg, layout.cfg.cache_dtype)
    out, into = (functools.partial(body, num_pages=cfg.num_pages) for body in (take_out, put_in))
    for count in page_buckets(page_bytes(layout.model_cfg, cfg.cache_dtype)):
        pages, values = layout.array(count), layout.array(count, *one.shape, dtype=one.dtype)
        yield layout.per_rank(Key(OUT, count), out, (layout.pages, pages))
        yield layout.per_rank(Key(IN, count), into, (layout.pages, pages, values), donated=(0,))


class PagesWorker:
    """Launches the copies."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def launch(self, command: PagesCommand) -> tuple[jax.Array, ...]:
        """Starts the copies; returns what has come out, one array of values `[1, n, ...]` per copy and rank with pages.

        Behind them stands, for each copy in, something to wait for.
        """
        out = [array for copy in command.out for array in self._take_out(copy)]
        return (*out, *(self._put_in(copy) for copy in command.into))

    def _take_out(self, copy: Copy) -> list[jax.Array]:
        devices = self._devices
        program = devices.programs.get(Key(OUT, copy.pages.shape[1]))
        taken = devices.of_ranks(program(devices.pages, devices.put(copy.pages)), np.flatnonzero(copy.pages[:, 0] >= 0))
        for array in taken:
            array.copy_to_host_async()
        return taken

    def _put_in(self, copy: Copy) -> jax.Array:
        devices, layout, count = self._devices, self._devices.layout, copy.pages.shape[1]
        one = value_shape(layout.model_cfg, layout.cfg.cache_dtype)
        values = {rank: each.view(one.dtype).reshape(count, *one.shape) for rank, each in copy.values.items()}
        program = devices.programs.get(Key(IN, count))
        devices.pages, written = program(devices.pages, devices.put(copy.pages), devices.put_some(values, one.dtype))
        return local_part(written)


def _applies(parts: Parts) -> bool:
    return parts.cfg.kv_offloading_size > 0


KIND = JobKind(NAME, PagesCommand, PagesPlanner, programs, PagesWorker, _applies)
