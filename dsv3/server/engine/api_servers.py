"""The fronts as the engine's process sees them: messages from all of them in one queue, results to each its own.

Frames to a front are buffered without being dropped, since a lost token is a lost text. The buffer is bounded by what
the running requests can still produce; a front that has stopped reading is given up past `MAX_BUFFERED_BYTES`.
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

from dsv3.processes import frames
from dsv3.scheduler.request import PreparedRequest, StepOutputs, Tokens, senders
from dsv3.server.engine import messages
from dsv3.server.engine.messages import FIRST_SENDER

MAX_BUFFERED_BYTES = 512 * 2**20
_PULSE_S = 1.0
_log = logging.getLogger("dsv3.engine")


class ApiServerConnection(frames.FrameProtocol):
    """One front; `send` never waits for it. A `sender` below 0 is to come with its first message.

    `live` holds the ids of its requests that the engine has not finished, `parts` requests of which more are to come.
    """

    def __init__(self, api_servers: "ApiServerConnections", sender: int = -1):
        super().__init__(self._take_in, self._note_end)
        self.live: set[int] = set()
        self.parts: list[PreparedRequest] = []
        self.sender = sender
        self._api_servers = api_servers
        self._is_full = False
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.sender >= FIRST_SENDER:
            self._api_servers.add(self)

    def send(self, message: messages.FromEngine) -> None:
        """Sends a message, from any thread."""
        self._api_servers.loop.call_soon_threadsafe(self._write, frames.encode(message))

    def hang_up(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()

    @property
    def num_buffered(self) -> int:
        """Bytes that the front has not taken."""
        return self._transport.get_write_buffer_size()

    def _write(self, frame: bytearray) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(frame)
        if self.num_buffered > MAX_BUFFERED_BYTES and not self._is_full:
            self._is_full = True
            _log.error("front %d does not read: %d bytes wait for it", self.sender, self.num_buffered)
            self._api_servers.give_up(self)

    def _take_in(self, body: memoryview) -> None:
        message = messages.to_engine.decode(body)
        if self.sender >= FIRST_SENDER:
            self._api_servers.take_in(self, message)
        elif isinstance(message, messages.Connect) and message.sender > FIRST_SENDER:
            self.sender = message.sender
            self._api_servers.add(self)
        else:
            raise ValueError(f"{type(message).__name__} comes first")

    def _note_end(self, error: Exception | None) -> None:
        if error is not None:
            known = isinstance(error, ValueError | frames.FrameError | msgspec.MsgspecError)
            _log.error("connection to front %d: %s", self.sender, error, exc_info=None if known else error)
        if self.sender >= FIRST_SENDER:
            self._api_servers.note_end(self)


class ApiServerConnections:
    """All fronts of this engine: the first at the other end of `link`, others connect to `listener`.

    A thread has an event loop for them. `on_stop` is called there when the first front asks for the end,
    `on_first_gone` when it has gone or does not read.
    """

    def __init__(
        self,
        link: socket.socket,
        listener: socket.socket,
        on_stop: Callable[[], None],
        on_first_gone: Callable[[], None],
    ):
        self.loop = uvloop.new_event_loop()
        self._on_stop, self._on_first_gone = on_stop, on_first_gone
        self._starts: queue.SimpleQueue[messages.Start] = queue.SimpleQueue()
        self._received: deque[tuple[ApiServerConnection, messages.Request | None]] = deque()
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        self._api_servers: dict[int, ApiServerConnection] = {}
        self._info: messages.EngineInfo | None = None
        self._turns: deque[ApiServerConnection] = deque()  # the first one has it
        threading.Thread(target=self.loop.run_forever, name="api-servers", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._open(link, listener), self.loop).result()

    def start(self) -> messages.Start:
        """Waits for the first front's first message."""
        return self._starts.get()

    def take(self) -> Iterator[tuple[ApiServerConnection, messages.Request | None]]:
        """Yields every message that has arrived with its front; None says that the front has gone."""
        self._arrived.clear()
        while self._received:
            yield self._received.popleft()

    @property
    def has_messages(self) -> bool:
        """Whether there are messages to take."""
        return bool(self._received)

    def wait(self, timeout_s: float) -> None:
        """Waits for messages to take, once all that had arrived were taken; at most `timeout_s` seconds."""
        self._arrived.wait(timeout_s)

    def announce(self, info: messages.EngineInfo) -> None:
        """Tells every front, and those still to come, that the engine is ready."""
        with self._lock:
            self._info = info
            api_servers = list(self._api_servers.values())
        for api_server in api_servers:
            api_server.send(info)

    def tell(self, message: messages.FromEngine) -> None:
        """Sends a message to every front."""
        for api_server in list(self._api_servers.values()):
            api_server.send(message)

    def beat(self) -> None:
        """Begins to tell every front that this process runs."""
        self.loop.call_soon_threadsafe(self._beat)

    def tell_first(self, message: messages.FromEngine) -> None:
        """Sends a message to the first front, if it has come."""
        if (first := self._api_servers.get(FIRST_SENDER)) is not None:
            first.send(message)

    def deliver(self, outputs: StepOutputs, stats: messages.Stats | None) -> None:
        """Sends each front the outputs of its own requests, and `stats` to all of them."""
        api_servers = self._api_servers
        for output in outputs.details:
            if output.finish_reason is not None and (api_server := api_servers.get(senders(output.request_id))):
                api_server.live.discard(output.request_id)
        if len(api_servers) == 1:
            for api_server in api_servers.values():
                api_server.send(messages.Outputs.from_outputs(outputs, stats))
            return
        parts = split(outputs)
        for sender, api_server in list(api_servers.items()):
            if (part := parts.get(sender)) is not None or stats is not None:
                api_server.send(messages.Outputs.from_outputs(part or StepOutputs(), stats))

    def remove(self, api_server: ApiServerConnection) -> None:
        """Forgets a front that has gone."""
        self._end_turn(api_server)
        with self._lock:
            self._api_servers = {
                sender: other for sender, other in self._api_servers.items() if other is not api_server
            }

    def close(self, timeout_s: float = 5.0) -> None:
        """Sends what is left, for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._flush(), self.loop).result(timeout_s)

    def add(self, api_server: ApiServerConnection) -> None:
        """Takes a front that has come."""
        with self._lock:
            self._api_servers = {**self._api_servers, api_server.sender: api_server}
            info = self._info
        if info is not None:
            api_server.send(info)

    def take_in(self, api_server: ApiServerConnection, message: messages.ToEngine) -> None:
        """Does what a front says, or keeps it for `take`."""
        match message:
            case messages.Add():
                api_server.parts += message.requests
                if not message.has_more:
                    self._put(api_server, messages.Add(api_server.parts))
                    api_server.parts = []
            case messages.Abort() | messages.Flush() | messages.Inspect():
                self._put(api_server, message)
            case messages.AcquireLock():
                self._queue_for_turn(api_server)
            case messages.ReleaseLock():
                self._end_turn(api_server)
            case messages.StopEngine() if api_server.sender == FIRST_SENDER:
                self._on_stop()
            case messages.Start() if api_server.sender == FIRST_SENDER:
                self._starts.put(message)

    def note_end(self, api_server: ApiServerConnection) -> None:
        """Notes that a front has gone."""
        if api_server.sender == FIRST_SENDER:
            self._on_first_gone()
        else:
            self._put(api_server, None)

    def give_up(self, api_server: ApiServerConnection) -> None:
        """Drops a front that does not read; with the first, everything ends."""
        if api_server.sender == FIRST_SENDER:
            self._on_first_gone()
        else:
            api_server.hang_up()
            self.tell_first(messages.Dropped(api_server.sender, "it has stopped reading"))

    async def _open(self, link: socket.socket, listener: socket.socket) -> None:
        await self.loop.create_connection(lambda: ApiServerConnection(self, FIRST_SENDER), sock=link)
        # uvloop's is collected, and accepts no more, where nothing refers to it.
        self._server = await self.loop.create_unix_server(lambda: ApiServerConnection(self), sock=listener)

    def _beat(self) -> None:
        self.tell(messages.EngineHeartbeat())
        self.loop.call_later(_PULSE_S, self._beat)

    async def _flush(self) -> None:
        while any(api_server.num_buffered for api_server in self._api_servers.values()):
            await asyncio.sleep(0.01)

    def _queue_for_turn(self, api_server: ApiServerConnection) -> None:
        """Lets one front after the other send what engines may die of: only one such request is there at a time."""
        with self._lock:
            self._turns.append(api_server)
            is_next = len(self._turns) == 1
        if is_next:
            api_server.send(messages.LockGranted())

    def _end_turn(self, api_server: ApiServerConnection) -> None:
        with self._lock:
            had_it = bool(self._turns) and self._turns[0] is api_server
            self._turns = deque(other for other in self._turns if other is not api_server)
            following = self._turns[0] if had_it and self._turns else None
        if following is not None:
            following.send(messages.LockGranted())

    def _put(self, api_server: ApiServerConnection, message: messages.Request | None) -> None:
        self._received.append((api_server, message))
        self._arrived.set()


def split(outputs: StepOutputs) -> dict[int, StepOutputs]:
    """Returns the outputs by the sender of their requests; each request's keep their order."""
    parts: dict[int, StepOutputs] = {}
    for rows in outputs.columns:
        for sender, mine in _split_rows(rows):
            parts.setdefault(sender, StepOutputs([], [])).columns.append(mine)
    for output in outputs.details:
        parts.setdefault(senders(output.request_id), StepOutputs([], [])).details.append(output)
    return parts


def _split_rows(rows: Tokens) -> Iterator[tuple[int, Tokens]]:
    """Yields each sender with its rows, in one pass over the rows however many senders there are."""
    if not len(rows):
        return
    owners = senders(rows.ids)
    order = np.argsort((owners & 0xFFFF).astype(np.uint16), kind="stable")  # by radix: numpy has that for 16 bits
    owners, ids, tokens = owners[order], rows.ids[order], _tokens_in(order, rows)
    counts = np.ones(len(ids), np.int64) if len(rows.tokens) == len(rows) else rows.counts[order]
    starts = [0, *(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist(), len(ids)]
    places = starts if len(rows.tokens) == len(rows) else np.concatenate([[0], np.cumsum(counts)])[starts].tolist()
    for i, sender in enumerate(owners[starts[:-1]].tolist()):
        mine, own = slice(starts[i], starts[i + 1]), slice(places[i], places[i + 1])
        yield sender, Tokens(ids[mine], counts[mine], tokens[own])


def _tokens_in(order: np.ndarray, rows: Tokens) -> np.ndarray:
    """Returns the tokens of the rows in another order of the rows."""
    if len(rows.tokens) == len(rows):
        return rows.tokens[order]
    pieces = np.split(rows.tokens, np.cumsum(rows.counts)[:-1])
    return np.concatenate([pieces[i] for i in order.tolist()])
