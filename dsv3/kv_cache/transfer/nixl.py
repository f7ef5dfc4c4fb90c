"""Pages by NIXL: who fetches reads them out of the other instance's host memory, which spends nothing on it.

Where they lie is asked over the connection that knows the secret (`protocol.py`). A cell may be written
again between answer and read, and NIXL neither knows who reads nor encrypts. So what was read must prove its key, as
everywhere; what does not is asked for again by sockets.
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
from dsv3.kv_cache.tiers.counts import Carried
from dsv3.kv_cache.tiers.host_pool import HostPool, Place
from dsv3.kv_cache.transfer import protocol
from dsv3.kv_cache.transfer.protocol import Land

_BUFFERS = 8  # fetches at a time; one on top of them goes by sockets
_BUFFER_BYTES = 2**24  # three pages of DeepSeek-V3
_MOST_ROWS = 64
_REST_S = 60.0  # an address whose memory could not be read
_HOLD_S = 30.0  # memory that a failed transfer may still write; over before the address is asked anew
_MOST_REMOTES = 256
_PAUSE_S = 1e-4  # without a thread of its own, an agent gets on when it is asked
_log = logging.getLogger(__name__)


class Agent(Protocol):
    """The methods of `nixl.nixl_agent` that are used. They raise exceptions of many kinds, without a common base."""

    def register_memory(self, reg_list: Any, mem_type: str) -> Any:
        """Lets other agents read memory: (address, bytes, device, "")."""

    def get_agent_metadata(self) -> bytes:
        """Returns what another agent needs to reach this one."""

    def add_remote_agent(self, metadata: bytes) -> str:
        """Returns the name of another agent."""

    def remove_remote_agent(self, agent: str) -> None:
        """Forgets another agent."""

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        """Describes memory: (address, bytes, device)."""

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: str, message: bytes) -> Any:
        """Returns a handle of a transfer that has not begun."""

    def transfer(self, handle: Any) -> str:
        """Begins; returns the state: DONE, PROC (under way) or ERR."""

    def check_xfer_state(self, handle: Any) -> str:
        """Returns the state."""

    def release_xfer_handle(self, handle: Any) -> None:
        """Frees a transfer."""


def open_agent(progresses: bool) -> Agent:
    """Opens an agent over UCX; raises ImportError without nixl, and what nixl raises where it cannot.

    `progresses` gives it a thread of its own, which others need to connect, and without RDMA to read. It takes a third
    of a core even where nobody reads.
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


def share(agent: Agent, host_pool: HostPool) -> bytes:
    """Lets other instances read a process's host memory; returns what tells another agent how to reach this one."""
    agent.register_memory([(host_pool.memory.ctypes.data, host_pool.memory.nbytes, 0, "")], "DRAM")
    return agent.get_agent_metadata()


@dataclasses.dataclass(eq=False)
class _Remote:
    """Another instance's agent, and how many read from it."""

    name: str
    metadata: bytes
    readers: int = 0


@dataclasses.dataclass(frozen=True)
class _HeldBuffer:
    """A buffer that is not used before `until`, nor while the transfer is under way."""

    remote: _Remote
    buffer: np.ndarray
    handle: Any
    until: float


class MemoryReader:
    """Reads pages of `value_bytes` bytes out of other instances' memory into its own, which is registered once.

    Any thread may call. What NIXL raises ends here: who gets fewer pages than there are asks for the rest by sockets.
    """

    def __init__(self, agent: Agent, value_bytes: int) -> None:
        self._agent, self._value_bytes, self.carried = agent, value_bytes, Carried()
        width = ALIGNMENT + aligned(value_bytes)  # a header, and a payload at the start of a memory page
        rows = min(max(1, _BUFFER_BYTES // width), _MOST_ROWS)
        memory = np.frombuffer(mmap.mmap(-1, _BUFFERS * rows * width), np.uint8)
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self._free = list(memory.reshape(_BUFFERS, rows, width))
        self._held: list[_HeldBuffer] = []
        self._lock, self._bootstrap_room = threading.Lock(), threading.RLock()  # the second for agents that come and go
        self._remotes: OrderedDict[str, _Remote] = OrderedDict()  # by address
        self._left: set[_Remote] = set()  # forgotten when nobody reads from them any more
        self._resting: OrderedDict[str, float] = OrderedDict()  # by address, until when

    def wants(self, address: str) -> bool:
        """Returns whether to ask the instance at an address for its agent."""
        return time.monotonic() >= self._resting.get(address, 0.0)

    def is_rested(self, address: str) -> bool:
        """Returns whether an address that could not be read is to be asked anew, over a new connection."""
        return address in self._resting and self.wants(address)

    def knows(self, address: str) -> bool:
        """Returns whether pages of an address can be read."""
        return address in self._remotes

    def meet(self, address: str, metadata: bytes) -> None:
        """Takes what an instance at an address tells of its agent: nothing where it has none."""
        self._take_back()
        with self._bootstrap_room:
            if self.wants(address):
                self._resting.pop(address, None)
            known = self._remotes.get(address)
            if known is not None and known.metadata == metadata:
                return
            self._leave(address)
            if not metadata:
                return
            if any(each.metadata == metadata for each in list(self._left)):  # a name is known once
                self._wait_for(address)
                return
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                self._rest(address, error)
                return
            with self._lock:
                self._remotes[address] = _Remote(name, metadata)
                oldest = next(iter(self._remotes)) if len(self._remotes) > _MOST_REMOTES else None
            if oldest is not None:
                self._leave(oldest)

    def read(self, address: str, keys: Sequence[Key], places: Sequence[Place], land: Land) -> int:
        """Reads the pages of `keys` from `places` and hands each that verifies to `land`; returns how many have come.

        Each array is written again after the call. Waits `protocol.STALL_S` for each transfer at most.
        """
        lent = self._lend(address)
        if lent is None:
            return 0
        remote, buffer = lent
        came, seconds, failed = 0, 0.0, False
        try:
            while came < len(places):
                started, some, handle = time.monotonic(), places[came : came + len(buffer)], None
                try:
                    handle = self._prepare(remote, buffer, some)
                    self._transfer(handle)
                except Exception as error:  # whatever it is, sockets are left
                    failed = True
                    self._rest(address, error)
                    break
                landed = self._land(keys[came:], buffer[: len(some)], land)
                came, seconds = came + landed, seconds + time.monotonic() - started
                if landed < len(some):
                    self.carried.fail("nixl")  # the cell has been written again
                    break
        finally:
            self.carried.note(address, "nixl", came * self._value_bytes, seconds)
            self._hold(remote, buffer, handle) if failed else self._give_back(remote, buffer)
        return came

    def _prepare(self, remote: _Remote, buffer: np.ndarray, places: Sequence[Place]) -> Any:
        """Returns the handle of a transfer of headers and payloads into the first rows of a buffer."""
        here = [(row.ctypes.data, row.ctypes.data + ALIGNMENT) for row in buffer[: len(places)]]
        local, there = (self._agent.get_xfer_descs(self._pieces(each), "DRAM") for each in (here, places))
        return self._agent.initialize_xfer("READ", local, there, remote.name, b"")

    def _pieces(self, places: Sequence[Place]) -> list[tuple[int, int, int]]:
        """Returns (address, bytes, device) of the header and the payload at each place."""
        sizes = HEADER_BYTES, self._value_bytes
        return [(at, size, 0) for place in places for at, size in zip(place, sizes, strict=True)]

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

    def _land(self, keys: Sequence[Key], rows: np.ndarray, land: Land) -> int:
        """Hands pages to `land` up to the first that does not verify; returns how many."""
        for count, (key, row) in enumerate(zip(keys, rows, strict=False)):
            payload = row[ALIGNMENT : ALIGNMENT + self._value_bytes]
            header = read_header(row[:HEADER_BYTES].tobytes())
            if header is None or not header.covers(key, payload):
                return count
            land(key, payload)
        return len(rows)

    def _lend(self, address: str) -> tuple[_Remote, np.ndarray] | None:
        """Returns an agent and a buffer for a read; None where there is none."""
        self._take_back()
        with self._lock:
            remote = self._remotes.get(address)
            if remote is None or not self._free:
                return None
            remote.readers += 1
            return remote, self._free.pop()

    def _give_back(self, remote: _Remote, buffer: np.ndarray) -> None:
        with self._lock:
            self._free.append(buffer)
            remote.readers -= 1
        self._forget(remote)

    def _hold(self, remote: _Remote, buffer: np.ndarray, handle: Any) -> None:
        """Keeps a buffer from others that a transfer without success may still write."""
        with self._lock:
            self._held.append(_HeldBuffer(remote, buffer, handle, time.monotonic() + _HOLD_S))

    def _take_back(self) -> None:
        """Frees buffers that have been held long enough, and that no transfer writes."""
        with self._lock:
            held, self._held = self._held, []
        for each in held:
            if time.monotonic() < each.until or self._is_under_way(each.handle):
                with self._lock:
                    self._held.append(each)
            else:
                self._give_back(each.remote, each.buffer)

    def _is_under_way(self, handle: Any) -> bool:
        with contextlib.suppress(Exception):  # it has failed, or never begun
            if self._agent.check_xfer_state(handle) == "PROC":
                return True
            self._agent.release_xfer_handle(handle)
        return False

    def _rest(self, address: str, error: Exception) -> None:
        """Leaves an address to sockets for a while."""
        self.carried.fail("nixl")
        if self.wants(address):  # several threads may have read when it ended
            reason = str(error) or type(error).__name__
            _log.warning("pages of %s come by sockets for %.0f s, as NIXL says: %s", address, _REST_S, reason)
        self._wait_for(address)
        self._leave(address)

    def _wait_for(self, address: str) -> None:
        with self._lock:
            self._resting[address] = time.monotonic() + _REST_S
            self._resting.move_to_end(address)
            if len(self._resting) > _MOST_REMOTES:
                self._resting.popitem(last=False)

    def _leave(self, address: str) -> None:
        with self._lock:
            remote = self._remotes.pop(address, None)
            if remote is None:
                return
            self._left.add(remote)
        self._forget(remote)

    def _forget(self, remote: _Remote) -> None:
        """Forgets an agent that has been left, once nobody reads from it."""
        if remote not in self._left:
            return
        with self._bootstrap_room:
            with self._lock:
                if remote not in self._left or remote.readers:
                    return
                self._left.remove(remote)
                others = {each.metadata for each in (*self._remotes.values(), *self._left)}
            if remote.metadata not in others:  # one process may have two addresses
                with contextlib.suppress(Exception):  # it has gone
                    self._agent.remove_remote_agent(remote.name)


def open_nixl(carrier: str, host_pool: HostPool, serves: bool) -> tuple[bytes, MemoryReader | None]:
    """Opens both sides that `transfer_carrier` asks for: what `share` gives if this process `serves`, and a reader.

    Where pages go by sockets there is neither. Raises ValueError where they must not and NIXL cannot be opened.
    """
    if carrier == "sockets":
        return b"", None
    try:
        agent = open_agent(progresses=serves)
        return share(agent, host_pool) if serves else b"", MemoryReader(agent, host_pool.value_bytes)
    except Exception as error:
        text = f"NIXL cannot be opened: {str(error) or type(error).__name__}"
    if carrier == "nixl":
        raise ValueError(f"transfer_carrier: 'nixl': {text}; pip install 'dsv3[nixl]', or take auto or sockets")
    _log.warning("pages travel by sockets: %s", text)
    return b"", None
