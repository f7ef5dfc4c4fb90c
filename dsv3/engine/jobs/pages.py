"""Pages: offloads pages from the devices to the tiers below, and loads those of a prompt's prefix from there.

A page is offloaded once it is findable, unless it has been reallocated by then. A request whose prefix is longer in the
tiers than on its device gets a slot and pages, and waits while threads load the values. Each step takes what has
arrived. What does not arrive in time, or fails verification, is computed.

Each process stores and loads the pages of its own ranks. The leader's planner orders that in its commands, and knows
from the followers' events what their hosts have. A value never leaves its host except to another instance.
"""

import dataclasses
import functools
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dsv3.config.engine import bucket
from dsv3.config.identity import LAYOUT_VERSION
from dsv3.config.options import split_address
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.job import Command, EngineView, JobKind, Planned, PublishEvent
from dsv3.engine.limits import TIER_STEP_BYTES
from dsv3.files import read_key
from dsv3.kv_cache.events import EventQueue, EventSource, Ranks
from dsv3.kv_cache.layout import (
    gather_pages,
    gather_window_parts,
    groups_of,
    page_bytes,
    payload_shape,
    scatter_pages,
    scatter_window_parts,
    window_parts,
)
from dsv3.kv_cache.page_keys import Key as PageKey
from dsv3.kv_cache.page_keys import window_keys
from dsv3.kv_cache.tiers.host_pool import HostPool, SharedMemory, blocks_within, host_pool_bytes
from dsv3.kv_cache.tiers.hosts import Hosts, Order, OrderExecutor, RemoteTiers, TierEvents
from dsv3.kv_cache.tiers.store import open_store
from dsv3.kv_cache.tiers.tiers import HostTiers, PageBatch, PrefixLoad, RemoteBatch, Tiers
from dsv3.kv_cache.transfer.client import Peers
from dsv3.kv_cache.transfer.nixl import open_nixl
from dsv3.kv_cache.transfer.protocol import VERSION, PeerHello
from dsv3.kv_cache.transfer.server import BootstrapRooms, PageServer
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.scheduler import Offload
from dsv3.scheduler.sequence import Sequence
from sharding.processes import local_part

_log = logging.getLogger(__name__)

NAME = "pages"
OUT, IN = "pages_out", "pages_in"
WINDOW_OUT, WINDOW_IN = "window_pages_out", "window_pages_in"
_IDLE_WAIT_S = 2e-3
BATCH_BYTES = 2**26  # per device: staging memory of one launch, twice
_MAX_PAGES = 64  # per launch


def page_buckets(page_bytes: int) -> tuple[int, ...]:
    """Returns how many pages are copied at once: 1, 8, 64, as far as they fit a batch's bytes."""
    return tuple(n for n in (1, 8, _MAX_PAGES) if n == 1 or n * page_bytes <= BATCH_BYTES)


class PageCopy(Command, frozen=True):
    """Pages of each rank to copy at once, -1 in padding.

    Offloaded pages have `keys`. Loaded pages have `values` where the scheduling process has loaded them, and the number
    of a load where another process has: that of the rank. With `parts` they are parts of window pages.
    """

    pages: np.ndarray  # [ranks, bucket] int32
    keys: dict[int, list[PageKey]] = msgspec.field(default_factory=dict)
    values: dict[int, np.ndarray] = msgspec.field(default_factory=dict)  # uint8 [bucket, bytes of a page]
    loads: dict[int, int] = msgspec.field(default_factory=dict)
    parts: np.ndarray | None = None  # [ranks, bucket] int32

    def part(self, ranks: range) -> Self:
        """Returns the part of a process with `ranks`, ranks counted from its first one."""
        pages, keys = self.pages[ranks.start : ranks.stop], _part(self.keys, ranks)
        parts = None if self.parts is None else self.parts[ranks.start : ranks.stop]
        return type(self)(pages, keys, _part(self.values, ranks), _part(self.loads, ranks), parts)


class PagesCommand(Command, frozen=True):
    """Copies out, then copies in. `orders` are those to each process but the first, by its first rank."""

    out: list[PageCopy]
    into: list[PageCopy]
    orders: dict[int, list[Order]] = msgspec.field(default_factory=dict)

    def part(self, ranks: range) -> Self:
        """Returns the part of a process with `ranks`, ranks counted from its first one."""
        out, into = ([copy.part(ranks) for copy in copies] for copies in (self.out, self.into))
        return type(self)(out, into, _part(self.orders, ranks))


def _part[T](by_rank: Mapping[int, T], ranks: range) -> dict[int, T]:
    return {rank - ranks.start: each for rank, each in by_rank.items() if rank in ranks}


def value_rows(result: np.ndarray, count: int) -> np.ndarray:
    """Returns the first `count` values of a copy's result `[1, n, ...]` as bytes, uint8 `[count, bytes of a page]`."""
    return result.reshape(result.shape[1], -1).view(np.uint8)[:count]


class OpenedTiers(NamedTuple):
    """The tiers of a process, the memory of the first, and the server for other instances."""

    tiers: Tiers
    memory: SharedMemory | None
    server: PageServer | None


def open_tiers(
    components: EngineComponents, events: EventQueue | None = None, process_id: int = 0, ranks: Ranks = None
) -> OpenedTiers:
    """Opens the tiers that the limits ask for in a process of the instance, and the server for other instances.

    `events` gets what the tiers store and remove for `ranks`. Raises MemoryError, OSError or ValueError where one
    cannot be opened.
    """
    cfg, size = components.cfg, page_bytes(components.model_cfg, components.cfg.cache_dtype)
    blocks = blocks_within(int(cfg.kv_offloading_size * 2**30), size)
    if not blocks:
        raise ValueError(
            f"kv_offloading_size: {cfg.kv_offloading_size} GiB are less than one page of {size} bytes; raise it"
        )
    name = f"{LAYOUT_VERSION}-{cfg.fingerprint[:16]}"
    memory = SharedMemory(name, host_pool_bytes(blocks, size))
    on_host, on_store = (
        None if events is None else EventSource(events, medium, ranks) for medium in ("CPU", "STORAGE")
    )
    host_pool = HostPool(memory.array, size, blocks, on_host)
    gib, found = cfg.kv_offloading_size, len(host_pool)
    _log.info("host memory in %s: %g GiB for %d pages, %d found again", memory.path, gib, blocks, found)
    limit = int(cfg.kv_store_size * 2**30)
    store = open_store(cfg.kv_store, cfg.fingerprint[:16], size, limit, on_store) if cfg.kv_store else None
    parts = window_parts(components.model_cfg, cfg.cache_dtype)
    tiers = functools.partial(Tiers, page_buckets(size), host_pool, store, page_size=cfg.page_size, window_parts=parts)
    if cfg.transfer_key_file is None:
        return OpenedTiers(tiers(), memory, None)
    secret, hello = read_key(cfg.transfer_key_file, "transfer_key_file"), PeerHello(VERSION, cfg.identity, size)
    server, address = None, cfg.transfer_address_of(process_id)
    agent, reader = open_nixl(cfg.transfer_carrier, host_pool, serves=address is not None)
    if address is not None:
        bootstrap_rooms = BootstrapRooms(cfg.transfer_addresses or [address])
        where = split_address(address, "transfer_address")
        server = PageServer(*where, secret, hello, host_pool, bootstrap_rooms, agent)
    peers = Peers(secret, hello, reader)
    return OpenedTiers(tiers(peers=peers), memory, server)


class _Incoming(NamedTuple):
    """A loaded batch: its rank, the pages that it fills, or the parts of a window page, and the values."""

    rank: int
    pages: list[int]
    parts: list[int] | None
    batch: PageBatch | RemoteBatch


@dataclasses.dataclass
class _Fetch:
    """A request that waits for its prefix, the load, and how many parts of its window page have arrived."""

    sequence: Sequence
    load: PrefixLoad
    num_parts: int = 0


@dataclasses.dataclass(frozen=True)
class PageStats:
    """Requests that wait for pages of their prefix, and the counters of each tier by name."""

    num_loading: int
    tiers: dict[str, Any]


class PagesPlanner:
    """Decides which pages a step copies. `opened` are the tiers; those of the limits if not given."""

    def __init__(self, view: EngineView, opened: OpenedTiers | None = None) -> None:
        self._scheduler, self._cfg = view.scheduler, view.scheduler.cfg
        self._own_ranks = self._cfg.ranks_of(0) if view.work_events is not None else range(self._cfg.num_ranks)
        where = self._own_ranks if view.work_events is not None else None
        self._tiers, self.memory, self.server = opened or open_tiers(view.components, view.scheduler.events, 0, where)
        self._remote: dict[int, RemoteTiers] = {}  # by the first rank of their process
        self._by_rank = self._join_followers(view)
        view.scheduler.attach_tiers(self._by_rank, None if self.server is None else self.server.bootstrap_rooms)
        self._buckets = page_buckets(self._tiers.payload_bytes)
        self._most = max(self._buckets[-1], TIER_STEP_BYTES // self._tiers.payload_bytes)
        self._fetches: dict[int, _Fetch] = {}  # by the epoch of the slot
        self._under_way = 0  # jobs
        self._measured_tokens, self._measured_at = 0, self._tiers.now()

    def plan(self, step: list[Planned]) -> list[Planned]:
        """Schedules the copies that are possible now; waits briefly where the engine has nothing else to do."""
        self._measure()
        self._scheduler.admission.process_lookups()
        incoming, loaded = self._receive_loaded()
        out = self._offload_copies(self._pop_offloads())
        orders = {rank: tiers.pop_orders() for rank, tiers in self._remote.items() if tiers.has_orders}
        if out or incoming or orders:
            self._under_way += 1
            context = self._scheduler.num_flushes, loaded
            return [Planned(NAME, PagesCommand(out, self._load_copies(incoming), orders), context)]
        if not step and self._scheduler.waits_only_for_tiers:
            self._tiers.wait(_IDLE_WAIT_S)
        return []

    def on_results(self, planned: Planned, results: tuple[np.ndarray, ...], outputs: StepOutputs) -> None:
        """Stores offloaded pages in the tiers, unless they have been flushed since; makes loaded pages findable."""
        assert isinstance(planned.command, PagesCommand)
        num_flushes, loaded = planned.context
        if num_flushes == self._scheduler.num_flushes:
            arrays = iter(results)
            for rank, keys in (pair for copy in planned.command.out for pair in copy.keys.items()):
                if rank in self._own_ranks:  # the other processes store theirs
                    self._store(keys, value_rows(next(arrays), len(keys)))
        for sequence, epoch, tokens in loaded:
            if self._scheduler.slots.holds(sequence, epoch):
                self._scheduler.publish(sequence, tokens)
        self._under_way -= 1
        if not self._under_way:
            self._scheduler.invalidated.clear()

    def stats(self) -> PageStats:
        """Returns the tiers' counters."""
        return PageStats(len(self._scheduler.loading), dict(self._by_rank.counts()))

    def _join_followers(self, view: EngineView) -> HostTiers | Hosts:
        """Returns the tiers of all processes; those of followers are updated by their events."""
        if view.work_events is None:
            return self._tiers
        cfg, events = self._cfg, view.scheduler.events
        for ranks in map(cfg.ranks_of, range(1, cfg.num_processes)):
            self._remote[ranks.start] = RemoteTiers(self._tiers, events, ranks)
        view.work_events.subscribe(
            NAME, lambda process_id, body: self._remote[cfg.ranks_of(process_id).start].on_report(body)
        )
        return Hosts([self._tiers, *self._remote.values()], len(self._own_ranks))

    def _store(self, keys: list[PageKey], values: np.ndarray) -> None:
        """Stores pages in the tiers, except those invalidated since."""
        sound = [i for i, key in enumerate(keys) if key not in self._scheduler.invalidated]
        if len(sound) == len(keys):
            self._tiers.offload(keys, values)
        elif sound:
            self._tiers.offload([keys[i] for i in sound], values[sound])

    def _measure(self) -> None:
        """Records the speed of prefill, from the tokens and the time since the last step."""
        now, tokens = self._tiers.now(), self._scheduler.prompt_tokens
        self._tiers.compute_rate.update(tokens - self._measured_tokens, now - self._measured_at)
        self._measured_tokens, self._measured_at = tokens, now

    def _receive_loaded(self) -> tuple[list[_Incoming], list[tuple[Sequence, int, int]]]:
        """Returns the batches that have arrived, and how far each request's prefix is loaded with them.

        Requests whose loads are complete begin their prefill.
        """
        scheduler, slots = self._scheduler, self._scheduler.slots
        incoming, loaded = [], []
        taken: dict[int, int] = defaultdict(int)  # pages, by rank
        self._cancel_stale_fetches()
        for sequence in list(scheduler.loading):
            rank, epoch = slots.rank_of(sequence.slot), int(slots.epoch[sequence.slot])
            if epoch not in self._fetches:
                first = sequence.prefilled // self._cfg.page_size
                scheduler.publish_token_ids(sequence, first, sequence.load_stop)
                keys = sequence.keys[first : sequence.load_stop]
                self._fetches[epoch] = _Fetch(sequence, PrefixLoad(self._by_rank.of(rank), keys))
            fetch = self._fetches[epoch]
            while taken[rank] < self._most and (batch := fetch.load.pop_batch()) is not None:
                taken[rank] += batch.num_pages
                if fetch.num_parts < fetch.load.window_parts:
                    incoming.append(self._window_batch(fetch, rank, batch))
                    continue
                first = sequence.prefilled // self._cfg.page_size
                pages = sequence.pages[first : first + batch.num_pages]
                scheduler.on_loaded(sequence, batch.num_pages)
                incoming.append(_Incoming(rank, pages, None, batch))
                loaded.append((sequence, epoch, sequence.prefilled))
            if fetch.load.is_over:
                del self._fetches[epoch]
                scheduler.begin_prefill(sequence)
        return incoming, loaded

    def _window_batch(self, fetch: _Fetch, rank: int, batch: PageBatch | RemoteBatch) -> _Incoming:
        """Returns a batch of parts of the window page of the last page that a request loads."""
        parts = list(range(fetch.num_parts, fetch.num_parts + batch.num_pages))
        fetch.num_parts += batch.num_pages
        page = fetch.sequence.window_pages[fetch.sequence.load_stop - 1]
        return _Incoming(rank, [page] * len(parts), parts, batch)

    def _cancel_stale_fetches(self) -> None:
        for epoch, fetch in list(self._fetches.items()):
            if not self._scheduler.slots.holds(fetch.sequence, epoch):
                fetch.load.cancel()
                del self._fetches[epoch]

    def _pop_offloads(self) -> list[list[Offload]]:
        """Dequeues the pages to offload with this step, by rank; drops pages not findable, or stored already."""
        offload_queue, pages = self._scheduler.offload_queue, self._scheduler.pages
        mine: list[list[Offload]] = [[] for _ in pages.caches]
        for _ in range(len(offload_queue)):
            each = offload_queue[0]
            if len(mine[each.rank]) == self._most:
                break
            offload_queue.popleft()
            cache = pages.caches[each.rank] if each.part is None else pages.window(each.rank)
            if cache.is_page_of(each.key, each.page) and self._by_rank.of(each.rank).lacks(self._tier_key(each)):
                mine[each.rank].append(each)
        return mine

    def _tier_key(self, page: Offload) -> PageKey:
        """Returns the key under which the tiers have a page, or a part of a window page."""
        return page.key if page.part is None else window_keys(page.key, self._tiers.window_parts)[page.part]

    def _offload_copies(self, departing: list[list[Offload]]) -> list[PageCopy]:
        pages = [[each for each in mine if each.part is None] for mine in departing]
        parts = [[each for each in mine if each.part is not None] for mine in departing]
        return [*self._copies_out(pages), *self._copies_out(parts)]

    def _copies_out(self, departing: list[list[Offload]]) -> list[PageCopy]:
        """Returns the copies of pages, or of parts of window pages, of each rank."""
        copies, most = [], self._buckets[-1]
        for start in range(0, max(map(len, departing), default=0), most):
            chosen = {rank: mine[start : start + most] for rank, mine in enumerate(departing) if len(mine) > start}
            pages = {rank: [each.page for each in mine] for rank, mine in chosen.items()}
            parts = {rank: [each.part for each in mine if each.part is not None] for rank, mine in chosen.items()}
            keys = {rank: [self._tier_key(each) for each in mine] for rank, mine in chosen.items()}
            size = bucket(self._buckets, max(map(len, pages.values())))
            table = self._table(parts, size) if any(parts.values()) else None
            copies.append(PageCopy(self._table(pages, size), keys, parts=table))
        return copies

    def _load_copies(self, incoming: list[_Incoming]) -> list[PageCopy]:
        """Joins batches of different ranks and of one size, which are copied at once."""
        queues: dict[tuple[int, bool, int], list[_Incoming]] = defaultdict(list)
        for each in incoming:
            queues[each.batch.bucket, each.parts is None, each.rank].append(each)
        turns: dict[tuple[int, bool, int], dict[int, _Incoming]] = defaultdict(dict)
        for (size, are_pages, rank), mine in queues.items():
            for turn, each in enumerate(mine):
                turns[size, are_pages, turn][rank] = each
        return [self._copy_in(group, size) for (size, *_), group in turns.items()]

    def _copy_in(self, group: dict[int, _Incoming], size: int) -> PageCopy:
        batches = {rank: each.batch for rank, each in group.items()}
        parts = {rank: each.parts for rank, each in group.items() if each.parts is not None}
        return PageCopy(
            self._table({rank: each.pages for rank, each in group.items()}, size),
            values={rank: batch.payloads for rank, batch in batches.items() if isinstance(batch, PageBatch)},
            loads={rank: batch.number for rank, batch in batches.items() if isinstance(batch, RemoteBatch)},
            parts=self._table(parts, size) if parts else None,
        )

    def _table(self, pages: dict[int, list[int]], size: int) -> np.ndarray:
        """Returns pages by rank as `[X, size]` int32."""
        table = np.full((self._cfg.num_ranks, size), -1, np.int32)
        for rank, mine in pages.items():
            table[rank, : len(mine)] = mine
        return table


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket and direction, and one for parts of window pages where the model has a window."""
    cfg, one = layout.cfg, payload_shape(layout.model_cfg, layout.cfg.cache_dtype)
    groups = groups_of(layout.model_cfg, cfg.cache_dtype, "context")
    divided = layout.model_cfg.context_shards
    out, into = (functools.partial(body, groups, context_shards=divided) for body in (gather_pages, scatter_pages))
    size, windows = (
        page_bytes(layout.model_cfg, cfg.cache_dtype),
        groups_of(layout.model_cfg, cfg.cache_dtype, "window"),
    )
    for count in page_buckets(size):
        pages, values = layout.array(count), layout.array(count, *one.shape, dtype=one.dtype)
        yield layout.per_rank(Key(OUT, count), out, (layout.pages, pages), padding={1: -1})
        yield layout.per_rank(Key(IN, count), into, (layout.pages, pages, values), donated=(0,), padding={1: -1})
        if not windows:
            continue
        parts_out = functools.partial(gather_window_parts, windows, size)
        parts_in, given = functools.partial(scatter_window_parts, windows), (layout.pages, pages, pages)
        values = layout.array(count, size, dtype=jnp.uint8)
        yield layout.per_rank(Key(WINDOW_OUT, count), parts_out, given, padding={1: -1})
        yield layout.per_rank(Key(WINDOW_IN, count), parts_in, (*given, values), donated=(0,), padding={1: -1})


def launch(devices: Devices, command: PagesCommand) -> tuple[jax.Array, ...]:
    """Starts the copies; returns one array of offloaded values `[1, n, ...]` per copy and rank with pages.

    Behind them is, for each copy in, an array to wait for. Ranks count from the first one of this process.
    """
    out = [array for copy in command.out for array in _take_out(devices, copy)]
    return (*out, *(_put_in(devices, copy) for copy in command.into))


def _take_out(devices: Devices, copy: PageCopy) -> list[jax.Array]:
    program = devices.programs.get(Key(OUT if copy.parts is None else WINDOW_OUT, copy.pages.shape[1]))
    ranks = devices.layout.first_local_rank + np.flatnonzero(copy.pages[:, 0] >= 0)
    taken = devices.rank_shards(program(devices.pages, *_where(devices, copy)), ranks)
    for array in taken:
        array.copy_to_host_async()
    return taken


def _put_in(devices: Devices, copy: PageCopy) -> jax.Array:
    layout, count = devices.layout, copy.pages.shape[1]
    one = payload_shape(layout.model_cfg, layout.cfg.cache_dtype)
    if copy.parts is not None:
        one = jax.ShapeDtypeStruct((page_bytes(layout.model_cfg, layout.cfg.cache_dtype),), jnp.uint8)
    shape, first = (count, *one.shape), layout.first_local_rank
    values = {first + rank: each.view(one.dtype).reshape(shape) for rank, each in copy.values.items()}
    program = devices.programs.get(Key(IN if copy.parts is None else WINDOW_IN, count))
    put = devices.put_ranks(values, shape, one.dtype)
    devices.pages, written = program(devices.pages, *_where(devices, copy), put)
    return local_part(written)


def _where(devices: Devices, copy: PageCopy) -> tuple[jax.Array, ...]:
    """Returns the pages of a copy on the devices, and the parts of window pages."""
    tables = (copy.pages,) if copy.parts is None else (copy.pages, copy.parts)
    return tuple(map(devices.put, tables))


class PagesFollower:
    """The tiers of this process, as the leader's commands use them."""

    def __init__(self, components: EngineComponents, publish: PublishEvent) -> None:
        events = TierEvents()
        self.opened: OpenedTiers = open_tiers(components, events, jax.process_index())
        self._ordered = OrderExecutor(self.opened.tiers, events, publish)

    def prepare(self, command: PagesCommand) -> PagesCommand:
        """Starts the leader's orders; returns the command with the values that it names."""
        self._ordered.execute_before_step(_orders(command))
        return msgspec.structs.replace(command, into=[self._with_values(copy) for copy in command.into])

    def on_results(self, command: PagesCommand, results: tuple[np.ndarray, ...]) -> None:
        """Stores pages offloaded from the devices of this process."""
        arrays = iter(results)
        for keys in (keys for copy in command.out for keys in copy.keys.values()):
            self.opened.tiers.offload(keys, value_rows(next(arrays), len(keys)))
        self._ordered.execute_after_step(_orders(command))

    def _with_values(self, copy: PageCopy) -> PageCopy:
        values = {rank: self._ordered.pop_payloads(number) for rank, number in copy.loads.items()}
        return msgspec.structs.replace(copy, values=values)


def _orders(command: PagesCommand) -> list[Order]:
    return command.orders.get(0, [])  # of the part that this process gets, the first rank is its own


def _applies(components: EngineComponents) -> bool:
    return components.cfg.kv_offloading_size > 0


KIND = JobKind(NAME, PagesCommand, PagesPlanner, programs, launch, _applies, follower_handler=PagesFollower)
