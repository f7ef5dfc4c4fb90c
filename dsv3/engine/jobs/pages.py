"""Pages: copies pages from the devices to the tiers below, and loads those of a prompt's beginning from there.

A page goes out once it is findable, unless it has been given away by then. A request whose prefix reaches further in
the tiers than on its device gets a slot and pages, and waits while threads bring the values. Each step takes up what
has come. What does not come in time, or does not verify, is computed.

Each process keeps and loads the pages of its own ranks. The leader's planner orders that in its commands, and knows
from the followers what their hosts hold. A value never leaves its host but for another instance.
"""

import dataclasses
import functools
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import jax
import msgspec
import numpy as np

from dsv3.config.engine import bucket
from dsv3.config.identity import LAYOUT_VERSION
from dsv3.config.options import split_address
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Key, ProgramSpec
from dsv3.engine.job import Command, EngineView, JobKind, Planned, Tell
from dsv3.engine.limits import TIER_STEP_BYTES
from dsv3.kv_cache.events import EventQueue, EventSource, Where
from dsv3.kv_cache.layout import page_bytes, put_in, take_out, value_shape
from dsv3.kv_cache.page_keys import Key as PageKey
from dsv3.kv_cache.tiers.host_pool import HostPool, SharedMemory, blocks_within, host_pool_bytes
from dsv3.kv_cache.tiers.hosts import Hosts, Order, OrderedTiers, RemoteTiers, TierEvents
from dsv3.kv_cache.tiers.store import open_store
from dsv3.kv_cache.tiers.tiers import Fetch, HostTiers, PageBatch, RemoteBatch, Tiers
from dsv3.kv_cache.transfer.client import Peers
from dsv3.kv_cache.transfer.nixl import open_nixl
from dsv3.kv_cache.transfer.protocol import VERSION, PeerHello
from dsv3.kv_cache.transfer.server import BootstrapRooms, PageServer
from dsv3.processes.key_file import read_key
from dsv3.scheduler.request import StepOutputs
from dsv3.scheduler.sequence import Sequence
from sharding.processes import local_part

_log = logging.getLogger(__name__)

NAME = "pages"
OUT, IN = "pages_out", "pages_in"
_IDLE_WAIT_S = 2e-3
BATCH_BYTES = 2**26  # per device: staging memory of one launch, twice
_MOST_AT_ONCE = 64


def page_buckets(page_bytes: int) -> tuple[int, ...]:
    """Returns how many pages are copied at once: 1, 8, 64, as far as they fit a batch's bytes."""
    return tuple(n for n in (1, 8, _MOST_AT_ONCE) if n == 1 or n * page_bytes <= BATCH_BYTES)


class Copy(Command, frozen=True):
    """Pages of each rank to copy at once, -1 in padding.

    Pages that leave have `keys`. Pages that come have `values` where the process that schedules has loaded them, and
    the number of a load where another one has: that of the rank.
    """

    pages: np.ndarray  # [ranks, bucket] int32
    keys: dict[int, list[PageKey]] = msgspec.field(default_factory=dict)
    values: dict[int, np.ndarray] = msgspec.field(default_factory=dict)  # uint8 [bucket, bytes of a page]
    loads: dict[int, int] = msgspec.field(default_factory=dict)

    def part(self, ranks: range) -> Self:
        """Returns what a process with `ranks` needs of it, ranks counted from its first one."""
        pages, keys = self.pages[ranks.start : ranks.stop], _part(self.keys, ranks)
        return type(self)(pages, keys, _part(self.values, ranks), _part(self.loads, ranks))


class PagesCommand(Command, frozen=True):
    """Copies out, then copies in. `orders` are those to each process but the first, by its first rank."""

    out: list[Copy]
    into: list[Copy]
    orders: dict[int, list[Order]] = msgspec.field(default_factory=dict)

    def part(self, ranks: range) -> Self:
        """Returns what a process with `ranks` needs of it, ranks counted from its first one."""
        out, into = ([copy.part(ranks) for copy in copies] for copies in (self.out, self.into))
        return type(self)(out, into, _part(self.orders, ranks))


def _part[T](by_rank: Mapping[int, T], ranks: range) -> dict[int, T]:
    return {rank - ranks.start: each for rank, each in by_rank.items() if rank in ranks}


def value_rows(result: np.ndarray, count: int) -> np.ndarray:
    """Returns the first `count` values of a copy's result `[1, n, ...]` as bytes, uint8 `[count, bytes of a page]`."""
    return result.reshape(result.shape[1], -1).view(np.uint8)[:count]


class Opened(NamedTuple):
    """The tiers of a process, the memory of the first, and the port for other instances."""

    tiers: Tiers
    memory: SharedMemory | None
    server: PageServer | None


def open_tiers(
    parts: EngineComponents, events: EventQueue | None = None, process_id: int = 0, ranks: Where = None
) -> Opened:
    """Opens the tiers that the limits ask for in a process of the instance, and the port for other instances.

    `events` hears what the tiers store and remove for `ranks`. Raises MemoryError, OSError or ValueError where one
    cannot be.
    """
    cfg, size = parts.cfg, page_bytes(parts.model_cfg, parts.cfg.cache_dtype)
    blocks = blocks_within(int(cfg.kv_offloading_size * 2**30), size)
    if not blocks:
        raise ValueError(
            f"kv_offloading_size: {cfg.kv_offloading_size} GiB do not hold one page of {size} bytes; raise it"
        )
    name = f"{LAYOUT_VERSION}-{cfg.fingerprint[:16]}"
    memory = SharedMemory(name, host_pool_bytes(blocks, size))
    on_host, on_store = (
        None if events is None else EventSource(events, medium, ranks) for medium in ("CPU", "STORAGE")
    )
    host_pool = HostPool(memory.array, size, blocks, on_host)
    gib, found = cfg.kv_offloading_size, len(host_pool)
    _log.info("host memory in %s: %g GiB, room for %d pages, %d found again", memory.path, gib, blocks, found)
    limit = int(cfg.kv_store_size * 2**30)
    store = open_store(cfg.kv_store, cfg.fingerprint[:16], size, limit, on_store) if cfg.kv_store else None
    if cfg.transfer_key_file is None:
        return Opened(Tiers(page_buckets(size), host_pool, store, page_size=cfg.page_size), memory, None)
    secret, hello = read_key(cfg.transfer_key_file, "transfer_key_file"), PeerHello(VERSION, cfg.identity, size)
    server, address = None, cfg.transfer_address_of(process_id)
    agent, reader = open_nixl(cfg.transfer_carrier, host_pool, serves=address is not None)
    if address is not None:
        bootstrap_rooms = BootstrapRooms(cfg.transfer_addresses or [address])
        where = split_address(address, "transfer_address")
        server = PageServer(*where, secret, hello, host_pool, bootstrap_rooms, agent)
    peers = Peers(secret, hello, reader)
    return Opened(Tiers(page_buckets(size), host_pool, store, peers, page_size=cfg.page_size), memory, server)


_Incoming = tuple[int, list[int], PageBatch | RemoteBatch]
"""Values that have come: their rank, the pages that they are for, and the batch."""


@dataclasses.dataclass(frozen=True)
class PageStats:
    """Requests that wait for pages of their prefix, and what each tier has counted, by its name."""

    num_loading: int
    tiers: dict[str, Any]


class PagesPlanner:
    """Decides which pages a step copies. `opened` are the tiers, those that the limits ask for if not given."""

    def __init__(self, view: EngineView, opened: Opened | None = None) -> None:
        self._scheduler, self._cfg = view.scheduler, view.scheduler.cfg
        self._own = self._cfg.ranks_of(0) if view.work_events is not None else range(self._cfg.num_ranks)
        where = self._own if view.work_events is not None else None
        self._tiers, self.memory, self.server = opened or open_tiers(view.parts, view.scheduler.events, 0, where)
        self._far: dict[int, RemoteTiers] = {}  # by the first rank of their process
        self._by_rank = self._with_followers(view)
        view.scheduler.attach_tiers(self._by_rank, None if self.server is None else self.server.bootstrap_rooms)
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
        out = self._grouped_out(self._departing())
        orders = {rank: tiers.take_orders() for rank, tiers in self._far.items() if tiers.has_orders}
        if out or incoming or orders:
            self._under_way += 1
            return [Planned(NAME, PagesCommand(out, self._grouped_in(incoming), orders), loaded)]
        if not step and self._scheduler.only_waits_for_tiers:
            self._tiers.wait(_IDLE_WAIT_S)
        return []

    def collect(self, planned: Planned, results: tuple[np.ndarray, ...], outputs: StepOutputs) -> None:
        """Hands what has left the devices to the tiers, and makes loaded pages findable."""
        assert isinstance(planned.command, PagesCommand)
        arrays, slots = iter(results), self._scheduler.slots
        for rank, keys in (pair for copy in planned.command.out for pair in copy.keys.items()):
            if rank in self._own:  # the others' processes keep theirs
                self._keep(keys, value_rows(next(arrays), len(keys)))
        for sequence, epoch, tokens in planned.context:
            if sequence.slot >= 0 and slots.epoch[sequence.slot] == epoch:
                self._scheduler.publish(sequence, tokens)
        self._under_way -= 1
        if not self._under_way:
            self._scheduler.distrusted.clear()

    def stats(self) -> PageStats:
        """Returns what the tiers have counted."""
        return PageStats(len(self._scheduler.loading), dict(self._by_rank.counts()))

    def _with_followers(self, view: EngineView) -> HostTiers | Hosts:
        """Returns the tiers of all processes; those of followers hear what these tell."""
        if view.work_events is None:
            return self._tiers
        cfg, events = self._cfg, view.scheduler.events
        for ranks in map(cfg.ranks_of, range(1, cfg.num_processes)):
            self._far[ranks.start] = RemoteTiers(self._tiers, events, ranks)
        view.work_events.listen(NAME, lambda process_id, body: self._far[cfg.ranks_of(process_id).start].hear(body))
        return Hosts([self._tiers, *self._far.values()], len(self._own))

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

    def _arrived(self) -> tuple[list[_Incoming], list[tuple[Sequence, int, int]]]:
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
                first = sequence.prefilled // self._cfg.page_size
                scheduler.spell(sequence, first, sequence.load_stop)
                keys = sequence.keys[first : sequence.load_stop]
                self._fetches[epoch] = sequence, self._by_rank.of(rank).fetch(keys)
            _, fetch = self._fetches[epoch]
            while taken[rank] < self._most and (batch := fetch.take()) is not None:
                first = sequence.prefilled // self._cfg.page_size
                pages = sequence.pages[first : first + batch.num_pages]
                scheduler.note_loaded(sequence, batch.num_pages)
                taken[rank] += batch.num_pages
                if batch.num_pages:
                    incoming.append((rank, pages, batch))
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

    def _departing(self) -> list[list[tuple[PageKey, int]]]:
        """Takes the pages that leave with this step, by rank; drops those not findable, and those that the host has."""
        outgoing, caches = self._scheduler.outgoing, self._scheduler.caches
        mine: list[list[tuple[PageKey, int]]] = [[] for _ in caches]
        for _ in range(len(outgoing)):
            rank, key, page = outgoing[0]
            if len(mine[rank]) == self._most:
                break
            outgoing.popleft()
            if caches[rank].finds(key, page) and self._by_rank.of(rank).lacks(key):
                mine[rank].append((key, page))
        return mine

    def _grouped_out(self, departing: list[list[tuple[PageKey, int]]]) -> list[Copy]:
        copies, most = [], self._buckets[-1]
        for start in range(0, max(map(len, departing), default=0), most):
            parts = {rank: mine[start : start + most] for rank, mine in enumerate(departing) if len(mine) > start}
            pages = {rank: [page for _, page in part] for rank, part in parts.items()}
            keys = {rank: [key for key, _ in part] for rank, part in parts.items()}
            size = bucket(self._buckets, max(map(len, pages.values())))
            copies.append(Copy(self._table(pages, size), keys))
        return copies

    def _grouped_in(self, incoming: list[_Incoming]) -> list[Copy]:
        """Joins batches of different ranks and of one size, which are loaded at once."""
        queues: dict[tuple[int, int], list[_Incoming]] = defaultdict(list)
        for rank, pages, batch in incoming:
            queues[batch.bucket, rank].append((rank, pages, batch))
        turns: dict[tuple[int, int], dict[int, _Incoming]] = defaultdict(dict)
        for (size, rank), mine in queues.items():
            for turn, each in enumerate(mine):
                turns[size, turn][rank] = each
        return [self._copy_in(group, size) for (size, _), group in turns.items()]

    def _copy_in(self, group: dict[int, _Incoming], size: int) -> Copy:
        batches = {rank: batch for rank, _, batch in group.values()}
        return Copy(
            self._table({rank: pages for rank, pages, _ in group.values()}, size),
            values={rank: batch.values for rank, batch in batches.items() if isinstance(batch, PageBatch)},
            loads={rank: batch.number for rank, batch in batches.items() if isinstance(batch, RemoteBatch)},
        )

    def _table(self, pages: dict[int, list[int]], size: int) -> np.ndarray:
        """Returns pages by rank as `[X, size]` int32."""
        table = np.full((self._cfg.num_ranks, size), -1, np.int32)
        for rank, mine in pages.items():
            table[rank, : len(mine)] = mine
        return table


def programs(layout: Layout) -> Iterator[ProgramSpec]:
    """Yields one program per bucket and direction."""
    cfg, one = layout.cfg, value_shape(layout.model_cfg, layout.cfg.cache_dtype)
    groups = layout.model_cfg.cache_groups(cfg.cache_dtype)
    out, into = (functools.partial(body, groups) for body in (take_out, put_in))
    for count in page_buckets(page_bytes(layout.model_cfg, cfg.cache_dtype)):
        pages, values = layout.array(count), layout.array(count, *one.shape, dtype=one.dtype)
        yield layout.per_rank(Key(OUT, count), out, (layout.pages, pages), padding={1: -1})
        yield layout.per_rank(Key(IN, count), into, (layout.pages, pages, values), donated=(0,), padding={1: -1})


class PagesWorker:
    """Launches the copies."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def launch(self, command: PagesCommand) -> tuple[jax.Array, ...]:
        """Starts the copies; returns what has come out, one array of values `[1, n, ...]` per copy and rank with pages.

        Behind them stands, for each copy in, something to wait for. Ranks count from the first one of this process.
        """
        out = [array for copy in command.out for array in self._take_out(copy)]
        return (*out, *(self._put_in(copy) for copy in command.into))

    def _take_out(self, copy: Copy) -> list[jax.Array]:
        devices = self._devices
        program = devices.programs.get(Key(OUT, copy.pages.shape[1]))
        ranks = devices.layout.first_local_rank + np.flatnonzero(copy.pages[:, 0] >= 0)
        taken = devices.of_ranks(program(devices.pages, devices.put(copy.pages)), ranks)
        for array in taken:
            array.copy_to_host_async()
        return taken

    def _put_in(self, copy: Copy) -> jax.Array:
        devices, layout, count = self._devices, self._devices.layout, copy.pages.shape[1]
        one = value_shape(layout.model_cfg, layout.cfg.cache_dtype)
        shape, first = (count, *one.shape), layout.first_local_rank
        values = {first + rank: each.view(one.dtype).reshape(shape) for rank, each in copy.values.items()}
        program, put = devices.programs.get(Key(IN, count)), devices.put_some(values, shape, one.dtype)
        devices.pages, written = program(devices.pages, devices.put(copy.pages), put)
        return local_part(written)


class PagesFollower:
    """The tiers of this process, as the leader's commands have them used."""

    def __init__(self, parts: EngineComponents, tell: Tell) -> None:
        happened = TierEvents()
        self.opened: Opened = open_tiers(parts, happened, jax.process_index())
        self._ordered = OrderedTiers(self.opened.tiers, happened, tell)

    def prepared(self, command: PagesCommand) -> PagesCommand:
        """Begins what the leader has ordered; returns the command with the values that it names."""
        self._ordered.begin(_orders(command))
        return msgspec.structs.replace(command, into=[self._with_values(copy) for copy in command.into])

    def take(self, command: PagesCommand, results: tuple[np.ndarray, ...]) -> None:
        """Keeps what has left the devices of this process."""
        arrays = iter(results)
        for keys in (keys for copy in command.out for keys in copy.keys.values()):
            self.opened.tiers.keep(keys, value_rows(next(arrays), len(keys)))
        self._ordered.end(_orders(command))

    def _with_values(self, copy: Copy) -> Copy:
        values = {rank: self._ordered.taken(number) for rank, number in copy.loads.items()}
        return msgspec.structs.replace(copy, values=values)


def _orders(command: PagesCommand) -> list[Order]:
    return command.orders.get(0, [])  # of the part that this process gets, the first rank is its own


def _applies(parts: EngineComponents) -> bool:
    return parts.cfg.kv_offloading_size > 0


KIND = JobKind(NAME, PagesCommand, PagesPlanner, programs, PagesWorker, _applies, follower_handler=PagesFollower)
