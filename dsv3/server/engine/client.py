"""An API server's client of the engine: sends requests, delivers outputs to their streams, watches, and reconnects.

When an engine dies (`suspend`), sequences and their streams are kept. After the next `connect` each sequence is sent
again with its received tokens and resumes after them (`dsv3.server.engine.in_flight`).
"""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from dsv3.engine.operations import OperatedState, Operation, OperationRefused
from dsv3.processes import frames
from dsv3.scheduler.request import EngineOutput, PreparedRequest, first_id
from dsv3.server.engine import messages
from dsv3.server.engine.in_flight import InFlightRequest, InFlightRequests, RequestStream

# Longer than any step: a busy engine that sends no frame for so long hangs.
WATCHDOG_S = 300.0
# An idle engine sends a frame per second.
_IDLE_WATCHDOG_S = 30.0
# A separate thread of the engine process sends a heartbeat per second, unless the process is stopped.
HEARTBEAT_WATCHDOG_S = 30.0
# A restarted engine process imports its modules before it sends the first heartbeat.
FIRST_FRAME_S = 60.0
# Outputs that are delivered in one iteration of the event loop.
SLICE = 256
_MAX_ADD_BYTES = 2**20  # of tokens and grammars in one message, unless a single request has more
_RESEND_SLICE_BYTES = 2**20  # of tokens that are resent in one iteration of the event loop
_log = logging.getLogger("dsv3.server")

EngineState = Literal["starting", "ready", "restarting", "failed", "closed"]


class EngineUnavailable(Exception):
    """The engine has failed or is shutting down; the message may be sent to clients."""


class EngineBusy(Exception):
    """The queue is full."""


class OperationFailed(Exception):
    """An operation has failed in the middle; the message may be sent to the operator."""


class RequestRejected(Exception):
    """The engine rejects this request; `invalid`: because of the request, not of an error in the engine."""

    def __init__(self, message: str, invalid: bool):
        super().__init__(message)
        self.invalid = invalid


class EngineClient:
    """One API server's connection to the engine; `max_num_queued_reqs` sequences may wait besides the running ones.

    A sequence is retried in at most `max_restarts` engines after its first. Callbacks:

    - `on_stats`: the engine's statistics, about ten times per second.
    - `on_progress`: progress of an engine's start. `on_ready`: the engine accepts requests.
    - `on_dropped`: the engine has dropped another API server. `on_resumed`: a sequence resumes in another engine.
    - `on_loss`, `on_silence`: the connection has ended, or a watchdog has expired; with the reason. They call either
      `suspend`, and later `connect`, or `fail`, which is the default.
    - `on_failure`: `fail` was called; no engine will follow.
    - `on_change`: `state` is another one, and requests that wait for the engine may be moved.
    """

    def __init__(
        self,
        *,
        max_num_queued_reqs: int,
        watchdog_s: float = WATCHDOG_S,
        heartbeat_watchdog_s: float = HEARTBEAT_WATCHDOG_S,
        max_restarts: int = 0,
        sender: int = messages.FIRST_SENDER,
    ):
        self.state: EngineState = "starting"
        self.reason = "the engine is starting"
        self.info: messages.EngineInfo | None = None
        self.stats: messages.Stats = {}
        self.max_restarts = max_restarts
        self.on_stats: Callable[[messages.Stats], None] = lambda _: None
        self.on_progress: Callable[[messages.StartProgress], None] = lambda _: None
        self.on_dropped: Callable[[messages.ApiServerDropped], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_resumed: Callable[[], None] = lambda: None
        self.on_loss: Callable[[str], None] = self.fail
        self.on_silence: Callable[[str], None] = self.fail
        self.on_failure: Callable[[str], None] = lambda _: None
        self.on_change: Callable[[], None] = lambda: None
        self.ended = asyncio.Event()
        self.settled = asyncio.Event()
        self.drain_requested = asyncio.Event()
        self._max_num_queued_reqs = max_num_queued_reqs
        self._watchdog_s, self._heartbeat_watchdog_s = watchdog_s, min(watchdog_s, heartbeat_watchdog_s)
        self._starting_watchdog_s = min(watchdog_s, HEARTBEAT_WATCHDOG_S)
        self._next_id = first_id(sender)
        self._in_flight = InFlightRequests(max_restarts)
        self._ready: deque[RequestStream] = deque()
        self._is_scheduled = False
        self._failure = ""
        self._step_silence_s = self._frame_silence_s = 0.0  # since a frame of the stepping thread, and since any frame
        self._engine_is_idle = self._has_received = False
        self._transport: asyncio.WriteTransport | None = None
        self._connection = 0  # counts connections: events of earlier ones are ignored
        self._watching: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._is_first = self._must_flush = False
        self._calls: dict[int, asyncio.Future[Any]] = {}  # that the engine has not replied to, by number
        self._num_calls = 0

    @property
    def members(self) -> "Sequence[EngineClient]":
        """The clients of single engines: this one."""
        return [self]

    @property
    def num_in_flight(self) -> int:
        """Unfinished sequences of this API server."""
        return len(self._in_flight.by_id)

    @property
    def capacity(self) -> int:
        """How many sequences the engine accepts, running and waiting; 0 before it is ready."""
        return 0 if self.info is None else self.info.max_num_seqs + self._max_num_queued_reqs

    @property
    def has_capacity(self) -> bool:
        """Whether the engine would accept one more sequence, by the last statistics of all API servers together."""
        return self.num_in_engine < self.capacity

    @property
    def num_in_engine(self) -> float:
        """The engine's sequences, running and waiting, by the last statistics, at least this API server's."""
        return max(_num_in_engine(self.stats), self.num_in_flight)

    def stream_of(self, request_id: int) -> RequestStream | None:
        """Returns the stream of a sequence of this API server; None for another one, and for one that has ended."""
        found = self._in_flight.by_id.get(request_id)
        return None if found is None else found.stream

    def new_ids(self, count: int) -> int:
        """Returns the first of `count` new request ids."""
        self._next_id += count
        return self._next_id - count

    async def connect(
        self, connection: socket.socket | str, first: messages.Start | messages.Connect | None = None
    ) -> None:
        """Connects to an engine by a socket or the path of one and sends `first`; only API server 0 sends `Start`."""
        self._disconnect()
        number, loop = self._connection, asyncio.get_running_loop()

        def protocol() -> frames.FrameProtocol:
            return frames.FrameProtocol(
                lambda body: self._receive(number, body), lambda error: self._on_end(number, error)
            )

        try:
            if isinstance(connection, str):
                transport, _ = await loop.create_unix_connection(protocol, connection)
            else:
                transport, _ = await loop.create_connection(protocol, sock=connection)
        except OSError:
            self._on_end(number, None)
            return
        if number != self._connection:  # another `connect` or `suspend` came first
            transport.close()
            return
        self._transport = transport
        self._is_first = isinstance(first, messages.Start)
        if first is not None:
            self._send(first)
        self._watching = asyncio.create_task(self._watch())

    def require_capacity(self, count: int) -> None:
        """Raises EngineBusy if the sequences of this API server alone leave no capacity for `count` more."""
        if self.num_in_flight + count > self.capacity:
            raise EngineBusy("the queue is full")

    def submit(self, requests: Sequence[PreparedRequest], streams: Sequence[RequestStream]) -> None:
        """Sends requests, all or none, with a stream for each sequence, in the order of the requests.

        While the engine restarts they are deferred. Raises EngineBusy if this API server alone fills the engine,
        EngineUnavailable if the engine has failed.
        """
        if self.state not in ("ready", "restarting"):
            raise EngineUnavailable(self.reason)
        self.require_capacity(len(streams))
        ids = self._in_flight.add(requests, streams)
        if self.state == "restarting":
            self._in_flight.defer(requests, ids)
        else:
            self._send_new(requests, ids)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Aborts requests, whose streams get no more calls; finished ones are ignored."""
        aborted = [(i, self._in_flight.pop(i)) for i in request_ids]
        if in_engine := [i for i, sequence in aborted if sequence is not None and sequence.in_engine]:
            self._send(messages.Abort(in_engine))

    def flush(self) -> None:
        """Resets the prefix cache before the engine's next step, or at the start of a restarting engine."""
        self._must_flush = self.state == "restarting"
        if self.state == "ready":
            self._send(messages.Flush())

    async def inspect(self, what: messages.Inspection) -> Any:
        """Returns an `EngineSnapshot` or a `RequestList`; or starts or stops a profile, and returns its steps.

        Raises EngineUnavailable where there is no engine, or it ends before it replies.
        """
        return await self._call(lambda number: messages.Inspect(number, what))

    async def operate(self, operation: Operation) -> None:
        """Sends the engine an operation, and waits until it is executed.

        Raises OperationRefused or OperationFailed with the engine's message, EngineUnavailable as `inspect`.
        """
        await self._call(lambda number: messages.OperateEngine(number, operation))

    async def _call(self, make_message: Callable[[int], messages.Inspect | messages.OperateEngine]) -> Any:
        if self.state != "ready":
            raise EngineUnavailable(self.reason)
        self._num_calls += 1
        number, reply = self._num_calls, asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        self._send(make_message(number))
        try:
            return await reply
        finally:
            self._calls.pop(number, None)

    def _on_reply(self, message: messages.EngineReply) -> None:
        reply = self._calls.pop(message.number, None)
        if reply is None or reply.done():
            return  # the client has gone
        if not message.error:
            reply.set_result(message.found)
        else:
            reply.set_exception((OperationRefused if message.refused else OperationFailed)(message.error))

    def _fail_calls(self, reason: str) -> None:
        while self._calls:
            _, reply = self._calls.popitem()
            if not reply.done():
                reply.set_exception(EngineUnavailable(reason))

    def abort_all(self, error: Exception) -> None:
        """Aborts every request and fails its stream with `error`."""
        in_flight = dict(self._in_flight.by_id)
        while self._ready:
            self._deliver_slice()
        self.abort(list(in_flight))
        for sequence in in_flight.values():
            sequence.stream.fail(error)

    def move_waiting_to(self, others: "Sequence[EngineClient]") -> None:
        """Moves the requests that wait for this engine, which is dead, to clients whose engines are ready."""
        self._in_flight.move_waiting_to([other._in_flight for other in others])
        for other in others:
            if other._sending is None and (other._in_flight.waiting or other._in_flight.unsent):
                other._sending = asyncio.create_task(other._resend_all())

    def suspend(self, reason: str) -> None:
        """Marks the engine as restarting; its requests are kept for the next `connect`.

        Requests that have been retried too often, or that crash engines, fail with EngineDied.
        """
        self._disconnect()
        if self.state not in ("ready", "restarting"):
            return
        self.state, self.reason = "restarting", f"{reason}; it is being restarted"
        self._fail_calls(reason)
        self.stats = {}
        self.on_stats(self.stats)
        for sequence, error in self._in_flight.on_engine_death():
            sequence.stream.fail(error)
        self.on_change()

    def fail(self, reason: str) -> None:
        """Marks the engine as failed and fails every request."""
        if self.state in ("failed", "closed"):
            return
        self.reason, self.state = reason, "failed"
        self.on_change()
        self.abort_all(EngineUnavailable(reason))
        self.on_failure(reason)
        self._end()

    def close(self) -> None:
        """Aborts every request and disconnects; from API server 0 the engine process ends, too."""
        if self.state not in ("failed", "closed"):
            self.abort_all(EngineUnavailable("the server is shutting down"))
            self.state, self.reason = "closed", "the server is shutting down"
            if self._is_first:
                self._send(messages.StopEngine())
        self._end()

    def _send(self, message: messages.ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))

    def _end(self) -> None:
        self._disconnect()
        self._fail_calls(self.reason)
        self.ended.set()
        self.settled.set()

    def _disconnect(self) -> None:
        """Closes the connection; its later events are ignored."""
        self._connection += 1
        for task in (self._watching, self._sending):
            if task is not None:
                task.cancel()
        if self._transport is not None:
            self._transport.close()
        self._transport = self._watching = self._sending = None
        self._failure, self._step_silence_s, self._frame_silence_s, self._has_received = "", 0.0, 0.0, False

    def _on_end(self, number: int, error: Exception | None) -> None:
        if number != self._connection:
            return
        if error is not None:
            known = isinstance(error, frames.FrameError | msgspec.MsgspecError | ValueError)
            _log.error("connection to the engine: %s", error, exc_info=None if known else error)
            self._failure = self._failure or "the engine sent a malformed message"
        self.on_loss(self._failure or f"the engine {'could not start' if self.info is None else 'has died'}")

    async def _watch(self) -> None:
        """Calls `on_silence` when a watchdog expires.

        It compares the silence as of the previous check, since all frames that had arrived by then have been read.
        Time in which this process or its event loop was blocked counts as at most two intervals.
        """
        interval = min(1.0, self._heartbeat_watchdog_s / 10)
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            if self._is_process_silent or (self.state == "ready" and self._step_silence_s > self._allowed_silence_s):
                self.on_silence(
                    f"the engine has not answered for {max(self._step_silence_s, self._frame_silence_s):.0f} s"
                )
            passed = min(time.monotonic() - before, 2 * interval)
            self._step_silence_s, self._frame_silence_s = self._step_silence_s + passed, self._frame_silence_s + passed

    @property
    def _is_process_silent(self) -> bool:
        """Whether no frame has come for too long; a restarted process may take longer."""
        if self.state == "restarting":
            return self._frame_silence_s > (self._starting_watchdog_s if self._has_received else FIRST_FRAME_S)
        return self.state == "ready" and self._frame_silence_s > self._heartbeat_watchdog_s

    @property
    def _allowed_silence_s(self) -> float:
        return min(self._watchdog_s, _IDLE_WATCHDOG_S) if self._engine_is_idle else self._watchdog_s

    def _receive(self, number: int, body: memoryview) -> None:
        if number != self._connection:
            return
        self._frame_silence_s, self._has_received = 0.0, True
        message = messages.from_engine.decode(body)
        if not isinstance(message, messages.EngineHeartbeat):
            self._step_silence_s = 0.0
        match message:
            case messages.Outputs():
                self._on_step(message)
            case messages.Rejected():
                self._reject(message)
            case messages.StartProgress():
                self.on_progress(message)
            case messages.EngineInfo():
                self._on_engine_info(message)
            case messages.LockGranted():
                self._send_next_quarantined()
            case messages.ApiServerDropped():
                self.on_dropped(message)
            case messages.DrainServer():
                _log.info("draining: %s", message.reason)
                self.drain_requested.set()
            case OperatedState():
                self.info = None if self.info is None else self.info.with_state(message)
            case messages.EngineReply():
                self._on_reply(message)
            case messages.EngineFailure():
                self._failure = message.reason

    def _on_engine_info(self, info: messages.EngineInfo) -> None:
        """Accepts a ready engine and resends the kept sequences to it."""
        old, new = info.rules if self.info is None else self.info.rules, info.rules
        fixed = (name for name in old.__struct_fields__ if name != "num_ranks")  # a degraded instance has fewer
        if names := [name for name in fixed if getattr(old, name) != getattr(new, name)]:
            self.fail(
                f"the restarted engine has another {', '.join(names)}; restart the server to serve a changed model"
            )
            return
        self.info = info
        if self._must_flush:  # pages in host memory survive a restart
            self._must_flush = False
            self._send(messages.Flush())
        if self.state == "restarting":
            self._sending = asyncio.create_task(self._resend_all())
        else:
            self._open()

    def _open(self) -> None:
        self.state, self.reason = "ready", ""
        self.settled.set()
        self.on_ready()
        self.on_change()

    async def _resend_all(self) -> None:
        """Resends the kept sequences and sends deferred requests, in slices; then requests the lock for quarantine.

        A deferred request is sent with all its sequences together: if two API servers sent theirs in parts, the queue
        could be full before either is complete.
        """
        assert self.info is not None
        nbytes = 0
        again = (self._send_resumed(*waiting) for waiting in self._in_flight.pop_waiting())
        new = (self._send_new(*unsent) for unsent in self._in_flight.pop_unsent(self.info.rules))
        for sent in chain(again, new):
            nbytes += sent
            if nbytes > _RESEND_SLICE_BYTES:
                nbytes = 0
                await asyncio.sleep(0)
        self._sending = None
        if self.state == "restarting":
            self._open()
            if self._in_flight.quarantined:
                self._send(messages.AcquireLock())

    def _send_new(self, requests: Sequence[PreparedRequest], ids: Sequence[int]) -> int:
        """Sends requests for the first time, and aborts ended sequences; returns the size of the prompts in bytes."""
        ended = [i for i in ids if i not in self._in_flight.by_id]
        for request_id in ids:
            if (sequence := self._in_flight.by_id.get(request_id)) is not None:
                sequence.in_engine = True
        for message in _add_messages(requests):
            self._send(message)
        if ended:
            self._send(messages.Abort(ended))
        return sum(len(request.tokens) for request in requests)

    def _send_resumed(self, request_id: int, sequence: InFlightRequest) -> int:
        """Resends one sequence with its received tokens; returns the size of its prompt and tokens in bytes."""
        assert self.info is not None
        request = sequence.resumed_request(self.info.rules)
        sequence.in_engine = True
        if sequence.restarts > sequence.resumes:
            sequence.resumes = sequence.restarts
            self.on_resumed()
        self._send(messages.Add([request]))
        return len(request.tokens)

    def _send_next_quarantined(self) -> None:
        """Sends the next quarantined sequence, or releases the lock after the last."""
        if (quarantined := self._in_flight.next_quarantined()) is None:
            self._send(messages.ReleaseLock())
        else:
            self._send_resumed(*quarantined)

    def _on_step(self, step: messages.Outputs) -> None:
        """Appends the outputs of a step to their streams, columns first, and schedules the deliveries."""
        rows, in_flight, ready = step.columns(), self._in_flight.by_id, self._ready
        if len(rows.tokens) == len(rows):
            for request_id, token in zip(rows.ids.tolist(), rows.tokens.tolist(), strict=True):
                sequence = in_flight.get(request_id)
                if sequence is not None:  # else it was aborted
                    sequence.tokens.append(token)
                    stream = sequence.stream
                    stream.pending.append(token)
                    if not stream.is_queued:
                        stream.is_queued = True
                        ready.append(stream)
        else:
            for output in rows:
                self._append_output(output.request_id, output.token_ids, output.token_ids)
        for output in step.details:
            self._append_output(output.request_id, output.token_ids, [output])
            if output.finish_reason is not None:
                in_flight.pop(output.request_id, None)
        self._engine_is_idle = step.stats is not None and _num_in_engine(step.stats) == 0
        if step.stats is not None:
            self.stats = step.stats
            self.on_stats(step.stats)
            if self._in_flight.waiting and self._sending is None and _num_in_engine(step.stats) < self.capacity:
                self._sending = asyncio.create_task(self._resend_all())
        if self._in_flight.quarantine_passed:
            self._send_next_quarantined()
        if not self._is_scheduled:
            self._run_deliveries()

    def _append_output(self, request_id: int, token_ids: list[int], items: Sequence[int | EngineOutput]) -> None:
        sequence = self._in_flight.by_id.get(request_id)
        if sequence is None:
            return
        sequence.tokens.extend(token_ids)
        stream = sequence.stream
        stream.pending.extend(items)
        if not stream.is_queued:
            stream.is_queued = True
            self._ready.append(stream)

    def _run_deliveries(self) -> None:
        """Delivers one slice of outputs now and schedules the rest, so that other tasks run in between.

        Outputs that arrive for a queued stream are delivered in the same call.
        """
        self._is_scheduled = False
        self._deliver_slice()
        self._schedule()

    def _schedule(self) -> None:
        if self._ready and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_deliveries)

    def _deliver_slice(self) -> None:
        ready, left = self._ready, SLICE
        while ready and left > 0:
            stream = ready.popleft()
            left -= max(1, len(stream.pending))
            stream.is_queued = False
            stream.on_outputs()

    def requeue(self, stream: RequestStream) -> None:
        """Schedules another call of a stream's `on_outputs`, after those of the other streams."""
        if stream.is_queued:
            return
        stream.is_queued = True
        self._ready.append(stream)
        self._schedule()

    def _reject(self, message: messages.Rejected) -> None:
        error: Exception = RequestRejected(message.message, message.kind == "invalid")
        if message.kind == "queue_full":
            error = EngineBusy(message.message)
        elif message.kind == "not_serving":
            error = EngineUnavailable(message.message)
        for request_id in message.request_ids:
            if (sequence := self._in_flight.by_id.get(request_id)) is None:
                continue
            if sequence.restarts and message.kind == "queue_full":  # an earlier engine had accepted it: send it later
                sequence.in_engine = False
                self._in_flight.waiting.append(request_id)
            elif self._in_flight.pop(request_id):
                sequence.stream.fail(error)


def _add_messages(requests: Sequence[PreparedRequest]) -> Iterator[messages.Add]:
    """Yields the messages that add requests, of about `_MAX_ADD_BYTES` each, which decode within a millisecond."""
    part: list[PreparedRequest] = []
    size = 0
    for request in requests:
        nbytes = len(request.tokens) + len(request.grammar)
        if part and size + nbytes > _MAX_ADD_BYTES:
            yield messages.Add(part, has_more=True)
            part, size = [], 0
        part.append(request)
        size += nbytes
    yield messages.Add(part)


def _num_in_engine(stats: messages.Stats) -> float:
    """Returns the engine's running and waiting sequences, of all API servers."""
    return messages.number_in(stats, "running") + messages.number_in(stats, "waiting")
