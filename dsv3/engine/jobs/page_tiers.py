"""Opens the tiers of one process, as the limits ask for them, and its port for other instances."""

import logging
from typing import NamedTuple

from dsv3.config.identity import LAYOUT_VERSION
from dsv3.config.options import split_address
from dsv3.engine.parts import Parts
from dsv3.kv_cache.events import EventQueue, EventSource, Where
from dsv3.kv_cache.layout import page_bytes
from dsv3.kv_cache.tiers.arena import Arena, SharedMemory, arena_bytes, cells_within
from dsv3.kv_cache.tiers.store import open_store
from dsv3.kv_cache.tiers.tiers import Tiers
from dsv3.kv_cache.transfer.client import Peers
from dsv3.kv_cache.transfer.nixl import open_nixl
from dsv3.kv_cache.transfer.protocol import VERSION, PeerHello
from dsv3.kv_cache.transfer.server import Meetings, PageServer
from dsv3.processes.key_file import read_key

_log = logging.getLogger(__name__)

BATCH_BYTES = 2**26  # per device: staging memory of one launch, twice
_MOST_AT_ONCE = 64


def page_buckets(page_bytes: int) -> tuple[int, ...]:
    """Returns how many pages are copied at once: 1, 8, 64, as far as they fit a batch's bytes."""
    return tuple(n for n in (1, 8, _MOST_AT_ONCE) if n == 1 or n * page_bytes <= BATCH_BYTES)


class Opened(NamedTuple):
    """The tiers of a process, the memory of the first, and the port for other instances."""

    tiers: Tiers
    memory: SharedMemory | None
    server: PageServer | None


def open_tiers(parts: Parts, events: EventQueue | None = None, process_id: int = 0, ranks: Where = None) -> Opened:
    """Opens the tiers that the limits ask for in a process of the instance, and the port for other instances.

    `events` hears what the tiers store and remove for `ranks`. Raises MemoryError, OSError or ValueError where one
    cannot be.
    """
    cfg, size = parts.cfg, page_bytes(parts.model_cfg, parts.cfg.cache_dtype)
    cells = cells_within(int(cfg.kv_offloading_size * 2**30), size)
    if not cells:
        raise ValueError(
            f"kv_offloading_size: {cfg.kv_offloading_size} GiB do not hold one page of {size} bytes; raise it"
        )
    name = f"{LAYOUT_VERSION}-{cfg.fingerprint[:16]}"
    memory = SharedMemory(name, arena_bytes(cells, size))
    on_host, on_store = (
        None if events is None else EventSource(events, medium, ranks) for medium in ("CPU", "STORAGE")
    )
    arena = Arena(memory.array, size, cells, on_host)
    gib, found = cfg.kv_offloading_size, len(arena)
    _log.info("host memory in %s: %g GiB, room for %d pages, %d found again", memory.path, gib, cells, found)
    limit = int(cfg.kv_store_size * 2**30)
    store = open_store(cfg.kv_store, cfg.fingerprint[:16], size, limit, on_store) if cfg.kv_store else None
    if cfg.transfer_key_file is None:
        return Opened(Tiers(page_buckets(size), arena, store, page_size=cfg.page_size), memory, None)
    secret, hello = read_key(cfg.transfer_key_file, "transfer_key_file"), PeerHello(VERSION, cfg.identity, size)
    server, address = None, cfg.transfer_address_of(process_id)
    agent, reader = open_nixl(cfg.transfer_carrier, arena, serves=address is not None)
    if address is not None:
        meetings = Meetings(cfg.transfer_addresses or [address])
        where = split_address(address, "transfer_address")
        server = PageServer(*where, secret, hello, arena, meetings, agent)
    peers = Peers(secret, hello, reader)
    return Opened(Tiers(page_buckets(size), arena, store, peers, page_size=cfg.page_size), memory, server)
