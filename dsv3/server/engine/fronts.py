"""The fronts as the engine's process sees them: messages from all of them in one queue, results to each its own.

Frames to a front are buffered without being dropped, since a lost token is a lost text. The buffer is bounded by what
the running requests can still produce; a front that has stopped reading is given up past `MAX_BUFFERED_BYTES`.
"""

import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from dsv3.processes import frames
from dsv3.scheduler.prepare import PreparedRequest
from dsv3.scheduler.request import StepOutputs, Tokens, senders
from dsv3.server.engine import messages
from dsv3.server.engine.launcher import SENDER_BYTES

MAX_BUFFERED_BYTES = 512 * 2**20
FIRST = 0
"""Sender of the front that has started this process, and with which the process ends."""

_PULSE_S = 1.0
_log = logging.getLogger("dsv3.engine")


class FrontConnection:
    """One front: a thread reads its messages, another writes its frames; `send` never waits for it.

    `live` holds the ids of its requests that the engine has not finished, `parts` requests of which more are to come.
    `on_message` and `on_end` are called on the reading thread, `on_end` once, when the front has gone or sends what is
    no message. `on_full` is called by whoever sends one frame too many.
    """

    def __init__(
        self,
        sender: int,
        connection: socket.socket,
        *,
        on_message: Callable[["FrontConnection", messages.ToEngine], None],
        on_end: Callable[["FrontConnection"], None],
        on_full: Callable[["FrontConnection"], None],
    ):
        self.sender = sender
        self.live: set[int] = set()
        self.parts: list[PreparedRequest] = []
        self._connection = connection
        self._on_message, self._on_end, self._on_full = on_message, on_end, on_full
        self._frames: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._buffered = 0
        self._lock = threading.Lock()
        self._writer = threading.Thread(target=self._write, name=f"outbox {sender}", daemon=True)
        self._writer.start()
        self.send(messages.Welcome(sender))

    def start_reading(self) -> None:
        """Begins to call `on_message`."""
        threading.Thread(target=self._read, name=f"inbox {self.sender}", daemon=True).start()

    def send(self, message: messages.FromEngine) -> None:
        """Queues a message."""
        frame = frames.encode(message)
        with self._lock:
            was_full = self._buffered > MAX_BUFFERED_BYTES
            self._buffered += len(frame)
            full = self._buffered > MAX_BUFFERED_BYTES
        self._frames.put(frame)
        if full and not was_full:
            _log.error("front %d does not read: %d bytes wait for it", self.sender, self._buffered)
            self._on_full(self)

    def hang_up(self) -> None:
        """Ends the connection at once; `on_end` follows."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def close(self, timeout_s: float) -> None:
        """Sends what is left, for at most `timeout_s`."""
        self._frames.put(None)
        self._writer.join(timeout_s)

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                return  # the reading thread sees the end of the connection
            with self._lock:
                self._buffered -= len(frame)

    def _read(self) -> None:
        stream = frames.stream_of(self._connection)
        try:
            while (body := frames.read_frame(stream)) is not None:
                self._on_message(self, messages.to_engine.decode(body))
        except Exception as error:
            known = isinstance(error, OSError | frames.FrameError | msgspec.MsgspecError)
            _log.error("connection to front %d: %s", self.sender, error, exc_info=None if known else error)
        self._on_end(self)


class FrontConnections:
    """All fronts of this engine. Their connections come through `usher`, a Unix socket of the first front.

    `on_stop` is called when the first front asks for the end, `on_first_gone` when it has gone or does not read.
    """

    def __init__(self, usher: socket.socket, on_stop: Callable[[], None], on_first_gone: Callable[[], None]):
        self._usher = usher
        self._on_stop, self._on_first_gone = on_stop, on_first_gone
        self._starts: queue.SimpleQueue[messages.Start] = queue.SimpleQueue()
        self._received: deque[tuple[FrontConnection, messages.Request | None]] = deque()
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        self._fronts: dict[int, FrontConnection] = {}
        self._info: messages.EngineInfo | None = None
        self._turns: deque[FrontConnection] = deque()  # the first one has it
        threading.Thread(target=self._accept, name="usher", daemon=True).start()

    def start(self) -> messages.Start:
        """Waits for the first front's first message."""
        return self._starts.get()

    def take(self) -> Iterator[tuple[FrontConnection, messages.Request | None]]:
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
            fronts = list(self._fronts.values())
        for front in fronts:
            front.send(info)

    def tell(self, message: messages.FromEngine) -> None:
        """Sends a message to every front."""
        for front in list(self._fronts.values()):
            front.send(message)

    def beat(self) -> None:
        """Begins to tell every front, from a thread, that this process runs."""
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def tell_first(self, message: messages.FromEngine) -> None:
        """Sends a message to the first front, if it has come."""
        if (first := self._fronts.get(FIRST)) is not None:
            first.send(message)

    def deliver(self, outputs: StepOutputs, stats: messages.Stats | None) -> None:
        """Sends each front the outputs of its own requests, and `stats` to all of them."""
        fronts = self._fronts
        for output in outputs.details:
            if output.finish_reason is not None and (front := fronts.get(senders(output.request_id))):
                front.live.discard(output.request_id)
        if len(fronts) == 1:
            for front in fronts.values():
                front.send(messages.Outputs.from_outputs(outputs, stats))
            return
        parts = split(outputs)
        for sender, front in list(fronts.items()):
            if (part := parts.get(sender)) is not None or stats is not None:
                front.send(messages.Outputs.from_outputs(part or StepOutputs(), stats))

    def remove(self, front: FrontConnection) -> None:
        """Forgets a front that has gone."""
        self._end_turn(front)
        with self._lock:
            self._fronts = {sender: other for sender, other in self._fronts.items() if other is not front}

    def close(self, timeout_s: float = 5.0) -> None:
        """Sends what is left, for at most `timeout_s` per front."""
        for front in list(self._fronts.values()):
            front.close(timeout_s)

    def _beat(self) -> None:
        while True:
            time.sleep(_PULSE_S)
            self.tell(messages.Pulse())

    def _accept(self) -> None:
        """Takes connections as the first front hands them over, until it goes away."""
        try:
            while (received := socket.recv_fds(self._usher, SENDER_BYTES, 1))[0]:
                [descriptor] = received[1]
                self._add(int.from_bytes(received[0], "little"), socket.socket(fileno=descriptor))
        except (OSError, ValueError, RuntimeError) as error:  # the last where there is no thread for a front
            _log.error("connection to the first front: %s", error)
        self._on_first_gone()

    def _add(self, sender: int, connection: socket.socket) -> None:
        front = FrontConnection(
            sender, connection, on_message=self._take_in, on_end=self._note_end, on_full=self._give_up
        )
        with self._lock:
            self._fronts = {**self._fronts, sender: front}
            info = self._info
        if info is not None:
            front.send(info)
        front.start_reading()

    def _take_in(self, front: FrontConnection, message: messages.ToEngine) -> None:
        match message:
            case messages.Add():
                front.parts += message.requests
                if not message.has_more:
                    self._put(front, messages.Add(front.parts))
                    front.parts = []
            case messages.Abort() | messages.Flush() | messages.Watch():
                self._put(front, message)
            case messages.AskTurn():
                self._queue_for_turn(front)
            case messages.EndTurn():
                self._end_turn(front)
            case messages.Stop() if front.sender == FIRST:
                self._on_stop()
            case messages.Start() if front.sender == FIRST:
                self._starts.put(message)

    def _queue_for_turn(self, front: FrontConnection) -> None:
        """Lets one front after the other send what engines may die of: only one such request is there at a time."""
        with self._lock:
            self._turns.append(front)
            is_next = len(self._turns) == 1
        if is_next:
            front.send(messages.Turn())

    def _end_turn(self, front: FrontConnection) -> None:
        with self._lock:
            had_it = bool(self._turns) and self._turns[0] is front
            self._turns = deque(other for other in self._turns if other is not front)
            following = self._turns[0] if had_it and self._turns else None
        if following is not None:
            following.send(messages.Turn())

    def _put(self, front: FrontConnection, message: messages.Request | None) -> None:
        self._received.append((front, message))
        self._arrived.set()

    def _note_end(self, front: FrontConnection) -> None:
        if front.sender == FIRST:
            self._on_first_gone()
        else:
            self._put(front, None)

    def _give_up(self, front: FrontConnection) -> None:
        """Drops a front that does not read; with the first, everything ends."""
        if front.sender == FIRST:
            self._on_first_gone()
        else:
            front.hang_up()
            self.tell_first(messages.Dropped(front.sender, "it has stopped reading"))


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
