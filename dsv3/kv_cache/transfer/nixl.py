"""KV transfer by NIXL: a client reads pages from the host pool of another instance, which spends no CPU time on it.

The client gets their addresses over the connection that knows the secret (`protocol.py`). A block may be overwritten
between answer and read, and NIXL neither authenticates nor encrypts. So each page is verified against its key; the
client fetches one that does not verify by sockets.
"""

import contextlib
import dataclasses
import logging
import mmap
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dsv3.kv_cache.page_keys import ALIGNMENT, HEADER_BYTES, Key, aligned, read_header
from dsv3.kv_cache.tiers.counts import CarrierStats
from dsv3.kv_cache.tiers.host_pool import HostPool, PayloadAddress
from dsv3.kv_cache.transfer import protocol
from dsv3.kv_cache.transfer.protocol import OnPage

_BUFFERS = 8  # concurrent fetches; further ones use sockets
_BUFFER_BYTES = 2**24  # three pages of DeepSeek-V3
_MAX_ROWS = 64
_SUSPEND_S = 60.0  # of an address whose memory could not be read
_QUARANTINE_S = 30.0  # of memory that a failed transfer may still write; less than the suspension
_MAX_REMOTES = 256
_PAUSE_S = 1e-4  # an agent without a progress thread advances when its state is checked
_log = logging.getLogger(__name__)


class Agent(Protocol):
    """The methods of `nixl.nixl_agent` that are used. They raise exceptions of many kinds, without a common base."""

    def register_memory(self, reg_list: Any, mem_type: str) -> Any:
        """Allows other agents to read memory: (address, bytes, device, "")."""

    def get_agent_metadata(self) -> bytes:
        """Returns what another agent needs to reach this one."""

    def add_remote_agent(self, metadata: bytes) -> str:
        """Returns the name of another agent."""

    def remove_remote_agent(self, agent: str) -> None:
        """Removes another agent."""

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        """Returns descriptors of memory: (address, bytes, device)."""

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str, message: bytes) -> Any:
        """Returns a handle of a transfer that has not started."""

    def transfer(self, handle: Any) -> str:
        """Starts a transfer; returns the state: DONE, PROC (in progress) or ERR."""

    def check_xfer_state(self, handle: Any) -> str:
        """Returns the state."""

    def release_xfer_handle(self, handle: Any) -> None:
        """Frees a transfer."""


def open_agent(progresses: bool) -> Agent:
    """Opens an agent over UCX; raises ImportError without nixl, and nixl's exceptions where it fails.

    `progresses` gives it a thread of its own, which other agents need to connect, and without RDMA to read. It takes a
    whole core even while no agent reads. Per processor second NIXL moves several times the bytes of the encrypted
    sockets over shared memory, and hardly more over TCP.
    """
    raises = logging.raiseExceptions
    import nixl

    logging.raiseExceptions = raises  # importing nixl clears it
    log = logging.getLogger("nixl")  # it writes to standard output otherwise
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
    sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    config = nixl.nixl_agent_config(enable_prog_thread=progresses, backends=["UCX"], sync_mode=sync)
    return nixl.nixl_agent(f"dsv3-{uuid.uuid4().hex}", config)


def register_host_pool(agent: Agent, host_pool: HostPool) -> bytes:
    """Allows other instances to read a process's host pool; returns the metadata by which their agents reach it."""
    agent.register_memory([(host_pool.memory.ctypes.data, host_pool.memory.nbytes, 0, "")], "DRAM")
    return agent.get_agent_metadata()


@dataclasses.dataclass(eq=False)
class _Remote:
    """Another instance's agent, and how many threads read from it."""

    name: str
    metadata: bytes
    readers: int = 0


@dataclasses.dataclass(frozen=True)
class _QuarantinedBuffer:
    """A buffer that is not reused before `until`, nor while the transfer is in progress."""

    remote: _Remote
    buffer: np.ndarray
    handle: Any
    until: float


class MemoryReader:
    """Reads pages of `payload_bytes` bytes from other instances' memory into its own, which is registered once.

    Any thread may call. Exceptions of NIXL end here: a caller that gets fewer pages fetches the rest by sockets.
    """

    def __init__(self, agent: Agent, payload_bytes: int) -> None:
        self._agent, self._payload_bytes, self.carrier_stats = agent, payload_bytes, CarrierStats()
        width = ALIGNMENT + aligned(payload_bytes)  # a header, and a payload at the start of a memory page
        rows = min(max(1, _BUFFER_BYTES // width), _MAX_ROWS)
        memory = np.frombuffer(mmap.mmap(-1, _BUFFERS * rows * width), np.uint8)
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self._free = list(memory.reshape(_BUFFERS, rows, width))
        self._quarantined: list[_QuarantinedBuffer] = []
        self._lock, self._agents_lock = threading.Lock(), threading.RLock()  # the second: adding and removing agents
        self._remotes: OrderedDict[str, _Remote] = OrderedDict()  # by address
        self._detached: set[_Remote] = set()  # removed once no thread reads from them
        self._suspended: OrderedDict[str, float] = OrderedDict()  # by address, until when

    def accepts(self, address: str) -> bool:
        """Returns whether the agent of an address is wanted: it is not suspended."""
        return time.monotonic() >= self._suspended.get(address, 0.0)

    def is_suspension_over(self, address: str) -> bool:
        """Returns whether the suspension of an address has ended, so that a new connection should get its agent."""
        return address in self._suspended and self.accepts(address)

    def can_read(self, address: str) -> bool:
        return address in self._remotes

    def set_agent(self, address: str, metadata: bytes) -> None:
        """Adds, replaces or removes the agent of an address; `metadata` is empty where it has none."""
        self._reclaim_buffers()
        with self._agents_lock:
            if self.accepts(address):
                self._suspended.pop(address, None)
            known = self._remotes.get(address)
            if known is not None and known.metadata == metadata:
                return
            self._detach(address)
            if not metadata:
                return
            if any(each.metadata == metadata for each in list(self._detached)):  # NIXL knows an agent's name once
                self._suspend_until_later(address)
                return
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                self._suspend(address, error)
                return
            with self._lock:
                self._remotes[address] = _Remote(name, metadata)
                oldest = next(iter(self._remotes)) if len(self._remotes) > _MAX_REMOTES else None
            if oldest is not None:
                self._detach(oldest)

    def read(self, address: str, keys: Sequence[Key], addresses: Sequence[PayloadAddress], on_page: OnPage) -> int:
        """Reads the pages of `keys` from `addresses` and calls `on_page` with each that verifies; returns how many.

        Each array is reused after the call. Waits `protocol.STALL_S` for each transfer at most.
        """
        acquired = self._acquire(address)
        if acquired is None:
            return 0
        remote, buffer = acquired
        arrived, seconds, failed = 0, 0.0, False
        try:
            while arrived < len(addresses):
                started, some, handle = time.monotonic(), addresses[arrived : arrived + len(buffer)], None
                try:
                    handle = self._prepare(remote, buffer, some)
                    self._transfer(handle)
                except Exception as error:  # of any kind: sockets carry the rest
                    failed = True
                    self._suspend(address, error)
                    break
                verified = self._deliver(keys[arrived:], buffer[: len(some)], on_page)
                arrived, seconds = arrived + verified, seconds + time.monotonic() - started
                if verified < len(some):
                    self.carrier_stats.record_failure("nixl")  # the block has been overwritten
                    break
        finally:
            self.carrier_stats.record(address, "nixl", arrived * self._payload_bytes, seconds)
            self._quarantine(remote, buffer, handle) if failed else self._release(remote, buffer)
        return arrived

    def _prepare(self, remote: _Remote, buffer: np.ndarray, addresses: Sequence[PayloadAddress]) -> Any:
        """Returns the handle of a transfer of headers and payloads into the first rows of a buffer."""
        here = [(row.ctypes.data, row.ctypes.data + ALIGNMENT) for row in buffer[: len(addresses)]]
        local, there = (self._agent.get_xfer_descs(self._descriptors(each), "DRAM") for each in (here, addresses))
        return self._agent.initialize_xfer("READ", local, there, remote.name, b"")

    def _descriptors(self, addresses: Sequence[PayloadAddress]) -> list[tuple[int, int, int]]:
        """Returns (address, bytes, device) of each header and payload."""
        sizes = HEADER_BYTES, self._payload_bytes
        return [(at, size, 0) for pair in addresses for at, size in zip(pair, sizes, strict=True)]

    def _transfer(self, handle: Any) -> None:
        state, deadline = self._agent.transfer(handle), time.monotonic() + protocol.STALL_S
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TimeoutError(f"a transfer did not end within {protocol.STALL_S:.0f} s")
            time.sleep(_PAUSE_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise OSError(f"a transfer ended with {state}")
        self._agent.release_xfer_handle(handle)

    def _deliver(self, keys: Sequence[Key], rows: np.ndarray, on_page: OnPage) -> int:
        """Calls `on_page` with the pages up to the first that does not verify; returns how many."""
        for count, (key, row) in enumerate(zip(keys, rows, strict=False)):
            payload = row[ALIGNMENT : ALIGNMENT + self._payload_bytes]
            header = read_header(row[:HEADER_BYTES].tobytes())
            if header is None or not header.covers(key, payload):
                return count
            on_page(key, payload)
        return len(rows)

    def _acquire(self, address: str) -> tuple[_Remote, np.ndarray] | None:
        """Returns an agent and a buffer for a read; None without one."""
        self._reclaim_buffers()
        with self._lock:
            remote = self._remotes.get(address)
            if remote is None or not self._free:
                return None
            remote.readers += 1
            return remote, self._free.pop()

    def _release(self, remote: _Remote, buffer: np.ndarray) -> None:
        with self._lock:
            self._free.append(buffer)
            remote.readers -= 1
        self._remove_if_unused(remote)

    def _quarantine(self, remote: _Remote, buffer: np.ndarray, handle: Any) -> None:
        """Keeps a buffer from reuse that a failed transfer may still write."""
        with self._lock:
            self._quarantined.append(_QuarantinedBuffer(remote, buffer, handle, time.monotonic() + _QUARANTINE_S))

    def _reclaim_buffers(self) -> None:
        """Releases buffers whose quarantine is over and that no transfer writes."""
        with self._lock:
            buffers, self._quarantined = self._quarantined, []
        for each in buffers:
            if time.monotonic() < each.until or self._is_under_way(each.handle):
                with self._lock:
                    self._quarantined.append(each)
            else:
                self._release(each.remote, each.buffer)

    def _is_under_way(self, handle: Any) -> bool:
        with contextlib.suppress(Exception):  # it has failed, or never begun
            if self._agent.check_xfer_state(handle) == "PROC":
                return True
            self._agent.release_xfer_handle(handle)
        return False

    def _suspend(self, address: str, error: Exception) -> None:
        """Uses sockets for an address for a while."""
        self.carrier_stats.record_failure("nixl")
        if self.accepts(address):  # several threads may have read when it ended
            reason = str(error) or type(error).__name__
            _log.warning("pages of %s come by sockets for %.0f s: NIXL: %s", address, _SUSPEND_S, reason)
        self._suspend_until_later(address)
        self._detach(address)

    def _suspend_until_later(self, address: str) -> None:
        with self._lock:
            self._suspended[address] = time.monotonic() + _SUSPEND_S
            self._suspended.move_to_end(address)
            if len(self._suspended) > _MAX_REMOTES:
                self._suspended.popitem(last=False)

    def _detach(self, address: str) -> None:
        with self._lock:
            remote = self._remotes.pop(address, None)
            if remote is None:
                return
            self._detached.add(remote)
        self._remove_if_unused(remote)

    def _remove_if_unused(self, remote: _Remote) -> None:
        """Removes a detached agent once no thread reads from it."""
        if remote not in self._detached:
            return
        with self._agents_lock:
            with self._lock:
                if remote not in self._detached or remote.readers:
                    return
                self._detached.remove(remote)
                others = {each.metadata for each in (*self._remotes.values(), *self._detached)}
            if remote.metadata not in others:  # one process may have two addresses
                with contextlib.suppress(Exception):  # it has gone
                    self._agent.remove_remote_agent(remote.name)


def open_nixl(carrier: str, host_pool: HostPool, serves: bool) -> tuple[bytes, MemoryReader | None]:
    """Opens NIXL as `transfer_carrier` requires: returns the metadata if this process `serves`, and a reader.

    With sockets there is neither. Raises ValueError where NIXL is required and cannot be opened.
    """
    if carrier == "sockets":
        return b"", None
    try:
        agent = open_agent(progresses=serves)
        return register_host_pool(agent, host_pool) if serves else b"", MemoryReader(agent, host_pool.payload_bytes)
    except Exception as error:
        text = f"NIXL cannot be opened: {str(error) or type(error).__name__}"
    if carrier == "nixl":
        raise ValueError(f"transfer_carrier: 'nixl': {text}; pip install 'dsv3[nixl]', or set auto or sockets")
    _log.warning("pages travel by sockets: %s", text)
    return b"", None
