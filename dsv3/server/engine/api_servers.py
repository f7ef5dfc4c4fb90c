"""Connections of the engine process to API servers: one queue of their messages; outputs go to the requests' senders.

Frames to an API server are buffered and never dropped, since a lost token is a lost text. The buffer is bounded by what
the running requests can still produce: if hundreds with `return_routed_experts` end in one step, a gigabyte. An API
server that has not read `MAX_BUFFERED_BYTES`, and reads nothing for `STALL_S`, is dropped.
"""

import asyncio
import contextlib
import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import uvloop

from dsv3.engine.operations import OperatedState
from dsv3.processes import frames
from dsv3.scheduler.request import EngineOutput, PreparedRequest, StepOutputs, Tokens, senders
from dsv3.server.engine import messages
from dsv3.server.engine.messages import FIRST_SENDER

MAX_BUFFERED_BYTES = 512 * 2**20
STALL_S = 10.0
FRAME_ARRAY_BYTES = 64 * 2**20
"""Experts and masks in one frame of outputs, which `frames.MAX_FRAME_BYTES` bounds."""
_HEARTBEAT_S = 1.0
_log = logging.getLogger("dsv3.engine")


class ApiServerConnection(frames.FrameProtocol):
    """Connection to one API server; `send` does not block. A `sender` below 0 is unknown until the first message.

    `request_ids` are the API server's unfinished requests, `parts` the requests of an incomplete `Add`.
    """

    def __init__(self, api_servers: "ApiServerConnections", sender: int = -1):
        super().__init__(self._on_message, self._on_end)
        self.request_ids: set[int] = set()
        self.parts: list[PreparedRequest] = []
        self.sender = sender
        self._api_servers = api_servers
        self._num_written = 0
        self._is_watched = False
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.sender >= FIRST_SENDER:
            self._api_servers.add(self)

    def send(self, message: messages.FromEngine) -> None:
        """Sends a message, from any thread."""
        self._api_servers.loop.call_soon_threadsafe(self._write, frames.encode(message))

    def disconnect(self) -> None:
        """Closes the connection without flushing it."""
        self._transport.abort()

    @property
    def num_buffered(self) -> int:
        """Bytes that the API server has not read."""
        return self._transport.get_write_buffer_size()

    def _write(self, frame: bytearray) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(frame)
        self._num_written += len(frame)
        if not self._is_watched and self.num_buffered > MAX_BUFFERED_BYTES:
            self._is_watched = True
            self._watch()

    def _watch(self, num_read: int = -1) -> None:
        """Drops the API server if it has read no more than `num_read` bytes; checks again while too many wait."""
        before, num_read = num_read, self._num_written - self.num_buffered
        if self._transport.is_closing() or self.num_buffered <= MAX_BUFFERED_BYTES:
            self._is_watched = False
        elif num_read > before:
            self._api_servers.loop.call_later(STALL_S, self._watch, num_read)
        else:
            _log.error("API server %d does not read: %d bytes are buffered for it", self.sender, self.num_buffered)
            self._api_servers.drop(self)

    def _on_message(self, body: memoryview) -> None:
        message = messages.to_engine.decode(body)
        if self.sender >= FIRST_SENDER:
            self._api_servers.dispatch(self, message)
        elif isinstance(message, messages.Connect) and message.sender > FIRST_SENDER:
            self.sender = message.sender
            self._api_servers.add(self)
        else:
            raise ValueError(f"the first message is {type(message).__name__}, expected Connect")

    def _on_end(self, error: Exception | None) -> None:
        if error is not None:
            known = isinstance(error, ValueError | frames.FrameError | msgspec.MsgspecError)
            _log.error("connection to API server %d: %s", self.sender, error, exc_info=None if known else error)
        if self.sender >= FIRST_SENDER:
            self._api_servers.on_disconnect(self)


class ApiServerConnections:
    """Connections to all API servers: API server 0 at the other end of `link`, others connect to `listener`.

    They run on an event loop in a separate thread, which calls `on_stop` on `StopEngine`, and `on_server_0_lost` when
    API server 0 disconnects or does not read.
    """

    def __init__(
        self,
        link: socket.socket,
        listener: socket.socket,
        on_stop: Callable[[], None],
        on_server_0_lost: Callable[[], None],
    ):
        self.loop = uvloop.new_event_loop()
        self._on_stop, self._on_server_0_lost = on_stop, on_server_0_lost
        self._starts: queue.SimpleQueue[messages.Start] = queue.SimpleQueue()
        self._received: deque[tuple[ApiServerConnection, messages.Request | None]] = deque()
        self._has_received = threading.Event()
        self._lock = threading.Lock()
        self._api_servers: dict[int, ApiServerConnection] = {}
        self._info: messages.EngineInfo | None = None
        self._lock_queue: deque[ApiServerConnection] = deque()  # the first one holds the lock
        threading.Thread(target=self.loop.run_forever, name="api-servers", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._open(link, listener), self.loop).result()

    def start(self) -> messages.Start:
        """Waits for `Start`, the first message of API server 0."""
        return self._starts.get()

    def receive(self) -> Iterator[tuple[ApiServerConnection, messages.Request | None]]:
        """Yields each received message with its connection; a message of None means that it has disconnected."""
        self._has_received.clear()
        while self._received:
            yield self._received.popleft()

    @property
    def has_messages(self) -> bool:
        return bool(self._received)

    def wait(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` seconds for messages, after `receive` has yielded all earlier ones."""
        self._has_received.wait(timeout_s)

    def announce(self, info: messages.EngineInfo) -> None:
        """Sends `info` to every API server, and to those that connect later: the engine is ready."""
        with self._lock:
            self._info = info
            api_servers = list(self._api_servers.values())
        for api_server in api_servers:
            api_server.send(info)

    def announce_state(self, state: OperatedState) -> None:
        """Sends every API server what operations have led to; those that connect later get it with `EngineInfo`."""
        with self._lock:
            self._info = None if self._info is None else self._info.with_state(state)
        self.broadcast(state)

    def broadcast(self, message: messages.FromEngine) -> None:
        for api_server in list(self._api_servers.values()):
            api_server.send(message)

    def send_to_server_0(self, message: messages.FromEngine) -> None:
        """Sends a message to API server 0, if it is connected."""
        if (first := self._api_servers.get(FIRST_SENDER)) is not None:
            first.send(message)

    def deliver(self, outputs: StepOutputs, stats: messages.Stats | None) -> None:
        """Sends each API server the outputs of its own requests, and `stats` to all of them."""
        api_servers = self._api_servers
        for output in outputs.details:
            if output.finish_reason is not None and (api_server := api_servers.get(senders(output.request_id))):
                api_server.request_ids.discard(output.request_id)
        if len(api_servers) == 1:
            for api_server in api_servers.values():
                _send_outputs(api_server, outputs, stats)
            return
        parts = split_by_sender(outputs)
        for sender, api_server in list(api_servers.items()):
            if (part := parts.get(sender)) is not None or stats is not None:
                _send_outputs(api_server, part or StepOutputs(), stats)

    def remove(self, api_server: ApiServerConnection) -> None:
        self._release_lock(api_server)
        with self._lock:
            self._api_servers = {
                sender: other for sender, other in self._api_servers.items() if other is not api_server
            }

    def close(self, timeout_s: float = 5.0) -> None:
        """Flushes all connections, for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._flush(), self.loop).result(timeout_s)

    def add(self, api_server: ApiServerConnection) -> None:
        """Adds an API server whose number is known."""
        with self._lock:
            self._api_servers = {**self._api_servers, api_server.sender: api_server}
            info = self._info
        if info is not None:
            api_server.send(info)

    def dispatch(self, api_server: ApiServerConnection, message: messages.ToEngine) -> None:
        """Handles a message, or enqueues it for `receive`."""
        match message:
            case messages.Add():
                api_server.parts += message.requests
                if not message.has_more:
                    self._enqueue(api_server, messages.Add(api_server.parts))
                    api_server.parts = []
            case messages.Abort() | messages.Flush() | messages.Inspect() | messages.OperateEngine():
                self._enqueue(api_server, message)
            case messages.AcquireLock():
                self._acquire_lock(api_server)
            case messages.ReleaseLock():
                self._release_lock(api_server)
            case messages.StopEngine() if api_server.sender == FIRST_SENDER:
                self._on_stop()
            case messages.Start() if api_server.sender == FIRST_SENDER:
                self._starts.put(message)
                self._heartbeat()

    def on_disconnect(self, api_server: ApiServerConnection) -> None:
        if api_server.sender == FIRST_SENDER:
            self._on_server_0_lost()
        else:
            self._enqueue(api_server, None)

    def drop(self, api_server: ApiServerConnection) -> None:
        """Disconnects an API server that does not read; without API server 0 the process ends."""
        if api_server.sender == FIRST_SENDER:
            self._on_server_0_lost()
        else:
            api_server.disconnect()
            self.send_to_server_0(messages.ApiServerDropped(api_server.sender, "it does not read the engine's outputs"))

    async def _open(self, link: socket.socket, listener: socket.socket) -> None:
        await self.loop.create_connection(lambda: ApiServerConnection(self, FIRST_SENDER), sock=link)
        # Keep a reference: uvloop stops accepting when its server object is collected.
        self._server = await self.loop.create_unix_server(lambda: ApiServerConnection(self), sock=listener)

    def _heartbeat(self) -> None:
        """Broadcasts `EngineHeartbeat`, now and once per second."""
        self.broadcast(messages.EngineHeartbeat())
        self.loop.call_later(_HEARTBEAT_S, self._heartbeat)

    async def _flush(self) -> None:
        while any(api_server.num_buffered for api_server in self._api_servers.values()):
            await asyncio.sleep(0.01)

    def _acquire_lock(self, api_server: ApiServerConnection) -> None:
        """Grants the lock, or queues for it: only one quarantined request may be in the engine at a time."""
        with self._lock:
            self._lock_queue.append(api_server)
            is_next = len(self._lock_queue) == 1
        if is_next:
            api_server.send(messages.LockGranted())

    def _release_lock(self, api_server: ApiServerConnection) -> None:
        with self._lock:
            held_lock = bool(self._lock_queue) and self._lock_queue[0] is api_server
            self._lock_queue = deque(other for other in self._lock_queue if other is not api_server)
            following = self._lock_queue[0] if held_lock and self._lock_queue else None
        if following is not None:
            following.send(messages.LockGranted())

    def _enqueue(self, api_server: ApiServerConnection, message: messages.Request | None) -> None:
        self._received.append((api_server, message))
        self._has_received.set()


def _send_outputs(api_server: ApiServerConnection, outputs: StepOutputs, stats: messages.Stats | None) -> None:
    """Sends the outputs of a step in as many frames as they need."""
    first, *others = split_by_size(outputs)
    api_server.send(messages.Outputs.from_outputs(first, stats))
    for each in others:
        api_server.send(messages.Outputs.from_outputs(each, None))


def split_by_size(outputs: StepOutputs) -> list[StepOutputs]:
    """Returns parts with at most `FRAME_ARRAY_BYTES` of experts and masks each, or those of one output; columns first.

    Requests that share a long cached prompt may all begin in one step, each with the experts of its whole prompt.
    """
    parts, size = [StepOutputs(outputs.columns, [])], 0
    for output in outputs.details:
        added = _array_bytes(output)
        if size and size + added > FRAME_ARRAY_BYTES:
            parts.append(StepOutputs([], []))
            size = 0
        parts[-1].details.append(output)
        size += added
    return parts


def _array_bytes(output: EngineOutput) -> int:
    experts = 0 if output.routed_experts is None else len(output.routed_experts.ids)
    return experts + sum([len(token.kept) for token in output.logprobs or () if token.kept])


def split_by_sender(outputs: StepOutputs) -> dict[int, StepOutputs]:
    """Returns the outputs by sender of their requests, in the same order within a request."""
    parts: dict[int, StepOutputs] = {}
    for rows in outputs.columns:
        for sender, mine in _split_rows(rows):
            parts.setdefault(sender, StepOutputs([], [])).columns.append(mine)
    for output in outputs.details:
        parts.setdefault(senders(output.request_id), StepOutputs([], [])).details.append(output)
    return parts


def _split_rows(rows: Tokens) -> Iterator[tuple[int, Tokens]]:
    """Yields each sender with its rows, in one pass over the rows for any number of senders."""
    if not len(rows):
        return
    owners = senders(rows.ids)
    order = np.argsort((owners & 0xFFFF).astype(np.uint16), kind="stable")  # numpy sorts 16 bits by radix
    owners, ids, tokens = owners[order], rows.ids[order], _reorder_tokens(order, rows)
    counts = np.ones(len(ids), np.int64) if len(rows.tokens) == len(rows) else rows.counts[order]
    starts = [0, *(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist(), len(ids)]
    offsets = starts if len(rows.tokens) == len(rows) else np.concatenate([[0], np.cumsum(counts)])[starts].tolist()
    for i, sender in enumerate(owners[starts[:-1]].tolist()):
        mine, own = slice(starts[i], starts[i + 1]), slice(offsets[i], offsets[i + 1])
        yield sender, Tokens(ids[mine], counts[mine], tokens[own])


def _reorder_tokens(order: np.ndarray, rows: Tokens) -> np.ndarray:
    if len(rows.tokens) == len(rows):
        return rows.tokens[order]
    pieces = np.split(rows.tokens, np.cumsum(rows.counts)[:-1])
    return np.concatenate([pieces[i] for i in order.tolist()])
