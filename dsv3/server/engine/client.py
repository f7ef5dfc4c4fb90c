"""A front's side of the engine: sends requests, hands each request its outputs, and goes on with the next engine.

When an engine dies (`lose`), sequences and sinks stay. With the next connection each sequence is sent again, behind the
tokens that have come (`dsv3.server.engine.in_flight`); whoever waits for it sees a pause.
"""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Literal

import msgspec

from dsv3.engine.step_log import EngineSnapshot, StepNote
from dsv3.processes import frames
from dsv3.scheduler.request import EngineOutput, PreparedRequest, first_id
from dsv3.server.engine import messages
from dsv3.server.engine.in_flight import InFlightRequest, InFlightRequests, RequestStream

# A step never takes this long: an engine that has work and sends no frame for so long hangs.
WATCHDOG_S = 300.0
# An idle engine sends a frame per second.
_IDLE_WATCHDOG_S = 30.0
# So does a thread of any engine's process, unless that is stopped, or gets no processor time for as long.
PULSE_WATCHDOG_S = 30.0
# One that is started anew imports its modules before its first word, beside all that a restart starts.
FIRST_WORD_S = 60.0
# Outputs that are handed over in one piece; then others of the event loop have their turn.
SLICE = 256
_MAX_ADD_BYTES = 2**20  # of tokens and grammars in one message, or one request
_AGAIN_BYTES = 2**20  # of tokens that are sent again before others of the event loop have their turn
_log = logging.getLogger("dsv3.server")

EngineState = Literal["starting", "ready", "restarting", "failed", "closed"]


class EngineUnavailable(Exception):
    """The engine has ended, hangs, or is being shut down; the message is fit for clients."""


class Busy(Exception):
    """The queue is full."""


class Refused(Exception):
    """The engine refuses this request; `invalid` tells whether the client is to blame."""

    def __init__(self, message: str, invalid: bool):
        super().__init__(message)
        self.invalid = invalid


class EngineClient:
    """One front's connection to the engine. Beyond those that run, `max_num_queued_reqs` sequences may wait in it.

    A sequence is given to at most `max_restarts` engines after its first. `on_stats` is called with the engine's
    numbers about ten times per second, `on_progress` while an engine starts, `on_seen` with what `watch` has asked for,
    `on_dropped` when another front's connection was given up, `on_ready` when an engine takes requests, `on_again`
    when a sequence goes on in another one.

    Where the connection ends `on_loss` is called with the reason, and `on_silence` where the engine says nothing any
    more. Whoever listens calls `lose`, and `connect` later, or `fail`, as happens if nobody does. When no engine comes
    any more, `on_failure` is called with the reason.
    """

    def __init__(
        self,
        *,
        max_num_queued_reqs: int,
        watchdog_s: float = WATCHDOG_S,
        pulse_watchdog_s: float = PULSE_WATCHDOG_S,
        max_restarts: int = 0,
    ):
        self.state: EngineState = "starting"
        self.reason = "the engine is starting"
        self.info: messages.EngineInfo | None = None
        self.stats: messages.Stats = {}
        self.max_restarts = max_restarts
        self.on_stats: Callable[[messages.Stats], None] = lambda _: None
        self.on_progress: Callable[[messages.StartProgress], None] = lambda _: None
        self.on_seen: Callable[[EngineSnapshot | list[StepNote]], None] = lambda _: None
        self.on_dropped: Callable[[messages.Dropped], None] = lambda _: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_again: Callable[[], None] = lambda: None
        self.on_loss: Callable[[str], None] = self.fail
        self.on_silence: Callable[[str], None] = self.fail
        self.on_failure: Callable[[str], None] = lambda _: None
        self.ended = asyncio.Event()
        self.settled = asyncio.Event()
        self.asks_to_drain = asyncio.Event()
        self._max_num_queued_reqs = max_num_queued_reqs
        self._watchdog_s, self._pulse_watchdog_s = watchdog_s, min(watchdog_s, pulse_watchdog_s)
        self._starting_watchdog_s = min(watchdog_s, PULSE_WATCHDOG_S)
        self._next_id = 0
        self._in_flight = InFlightRequests(max_restarts)
        self._ready: deque[RequestStream] = deque()
        self._is_scheduled = False
        self._failure = ""
        self._silent_s = self._deaf_s = 0.0  # since a frame of the thread that steps, and since any
        self._engine_is_idle = self._has_heard = False
        self._transport: asyncio.WriteTransport | None = None
        self._connection = 0  # counts them: what is left of an earlier one is nobody's
        self._watching: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._is_first = self._must_flush = False

    @property
    def num_live(self) -> int:
        """Sequences of this front that the engine has not finished."""
        return len(self._in_flight)

    @property
    def capacity(self) -> int:
        """Sequences the engine holds at most, running and waiting; 0 before it is ready."""
        return 0 if self.info is None else self.info.max_num_seqs + self._max_num_queued_reqs

    @property
    def has_room(self) -> bool:
        """Whether one more sequence would be taken, as far as is known of all fronts together."""
        return max(_num_held(self.stats), self.num_live) < self.capacity

    def new_ids(self, count: int) -> int:
        """Returns the first of `count` request ids that nobody has had."""
        self._next_id += count
        return self._next_id - count

    async def connect(
        self, connection: socket.socket | str, first: messages.Start | messages.Connect | None = None
    ) -> None:
        """Begins to talk to an engine, by a connection or at an address; `state` tells when it is ready.

        `first` is the first message. `Start` is the first front's to send.
        """
        self._hang_up()
        number, loop = self._connection, asyncio.get_running_loop()

        def protocol() -> frames.FrameProtocol:
            return frames.FrameProtocol(self._receive, lambda error: self._note_end(number, error))

        try:
            if isinstance(connection, str):
                transport, _ = await loop.create_unix_connection(protocol, connection)
            else:
                transport, _ = await loop.create_connection(protocol, sock=connection)
        except OSError:
            self._note_end(number, None)
            return
        if number != self._connection:  # lost meanwhile
            transport.close()
            return
        self._transport = transport
        self._is_first = isinstance(first, messages.Start)
        if isinstance(first, messages.Connect):
            self._next_id = max(self._next_id, first_id(first.sender))
        if first is not None:
            self._send(first)
        self._watching = asyncio.create_task(self._watch())

    def require_room(self, count: int) -> None:
        """Raises Busy where the requests of this front alone leave no room for `count` more."""
        if self.num_live + count > self.capacity:
            raise Busy("the queue is full")

    def submit(self, requests: Sequence[PreparedRequest], streams: Sequence[RequestStream]) -> None:
        """Sends requests, all or none, with a sink for each sequence, request by request.

        They wait where the engine is being started anew. Raises Busy without asking the engine when this front alone
        fills it, EngineUnavailable where there will be none.
        """
        if self.state not in ("ready", "restarting"):
            raise EngineUnavailable(self.reason)
        self.require_room(len(streams))
        ids = self._in_flight.add(requests, streams)
        if self.state == "restarting":
            self._in_flight.put_off(requests, ids)
        else:
            self._send_new(requests, ids)

    def abort(self, request_ids: Sequence[int]) -> None:
        """Frees the given requests at once; finished ones are ignored."""
        in_flight = [(i, self._in_flight.pop(i)) for i in request_ids]
        if there := [i for i, live in in_flight if live is not None and live.is_there]:
            self._send(messages.Abort(there))

    def flush(self) -> None:
        """Has the engine empty its prefix cache before its next step; the next engine, where this one has died."""
        self._must_flush = self.state == "restarting"
        if self.state == "ready":
            self._send(messages.Flush())

    def watch(self, what: Literal["look", "start_profile", "stop_profile"]) -> None:
        """Asks the engine to show what it does, or to begin or end a profile; `on_seen` gets the steps of a profile."""
        if self.state == "ready":
            self._send(messages.Inspect(what))

    def abort_all(self, error: Exception) -> None:
        """Frees every request and fails whoever waits for one."""
        in_flight = dict(self._in_flight.by_id)
        while self._ready:
            self._hand_over()
        self.abort(list(in_flight))
        for live in in_flight.values():
            live.stream.fail(error)

    def lose(self, reason: str) -> None:
        """Takes the engine for dead and waits for the next connection; requests wait with it.

        Those that have seen too many engines die, or that they die of, end with EngineDied.
        """
        self._hang_up()
        if self.state not in ("ready", "restarting"):
            return
        self.state, self.reason = "restarting", f"{reason}; it is being started anew"
        self.stats = {}
        self.on_stats(self.stats)
        for live, error in self._in_flight.on_engine_death():
            live.stream.fail(error)

    def fail(self, reason: str) -> None:
        """Takes the engine for failed; everyone who waits hears of it now."""
        if self.state in ("failed", "closed"):
            return
        self.reason, self.state = reason, "failed"
        self.abort_all(EngineUnavailable(reason))
        self.on_failure(reason)
        self._end()

    def close(self) -> None:
        """Aborts every request and hangs up; the first front asks the engine's process to end."""
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
        self._hang_up()
        self.ended.set()
        self.settled.set()

    def _hang_up(self) -> None:
        """Ends the connection, if there is one; what it still brings is ignored."""
        self._connection += 1
        for task in (self._watching, self._sending):
            if task is not None:
                task.cancel()
        if self._transport is not None:
            self._transport.close()
        self._transport = self._watching = self._sending = None
        self._failure, self._silent_s, self._deaf_s, self._has_heard = "", 0.0, 0.0, False

    def _note_end(self, number: int, error: Exception | None) -> None:
        if number != self._connection:
            return
        if error is not None:
            known = isinstance(error, frames.FrameError | msgspec.MsgspecError | ValueError)
            _log.error("connection to the engine: %s", error, exc_info=None if known else error)
            self._failure = self._failure or "the engine sent a malformed message"
        self.on_loss(self._failure or f"the engine {'could not start' if self.info is None else 'has died'}")

    async def _watch(self) -> None:
        """Takes the engine for dead when it says nothing for too long.

        What was silence at the last look is judged, since everything that had come by then has been read meanwhile.
        Time in which this process or its event loop stood still counts as two intervals at most.
        """
        interval = min(1.0, self._pulse_watchdog_s / 10)
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            if self._is_stopped or (self.state == "ready" and self._silent_s > self._allowed_silence_s):
                self.on_silence(f"the engine has not answered for {max(self._silent_s, self._deaf_s):.0f} s")
            passed = min(time.monotonic() - before, 2 * interval)
            self._silent_s, self._deaf_s = self._silent_s + passed, self._deaf_s + passed

    @property
    def _is_stopped(self) -> bool:
        """Whether the process says nothing at all; one that is started anew is allowed more silence."""
        if self.state == "restarting":
            return self._deaf_s > (self._starting_watchdog_s if self._has_heard else FIRST_WORD_S)
        return self.state == "ready" and self._deaf_s > self._pulse_watchdog_s

    @property
    def _allowed_silence_s(self) -> float:
        return min(self._watchdog_s, _IDLE_WATCHDOG_S) if self._engine_is_idle else self._watchdog_s

    def _receive(self, body: memoryview) -> None:
        self._deaf_s, self._has_heard = 0.0, True
        message = messages.from_engine.decode(body)
        if not isinstance(message, messages.EngineHeartbeat):
            self._silent_s = 0.0
        match message:
            case messages.Outputs():
                self._take(message)
            case messages.Rejected():
                self._reject(message)
            case messages.StartProgress():
                self.on_progress(message)
            case messages.EngineInfo():
                self._begin(message)
            case messages.LockGranted():
                self._try_next()
            case messages.Seen():
                self.on_seen(message.snapshot)
            case messages.Profile():
                self.on_seen(message.steps)
            case messages.Dropped():
                self.on_dropped(message)
            case messages.DrainServer():
                _log.info("draining: %s", message.reason)
                self.asks_to_drain.set()
            case messages.EngineFailure():
                self._failure = message.reason

    def _begin(self, info: messages.EngineInfo) -> None:
        """Takes an engine that is ready into use, behind what goes on there."""
        old = info.rules if self.info is None else self.info.rules
        fixed = (name for name in old.__struct_fields__ if name != "num_ranks")  # fewer may have come back
        if names := [name for name in fixed if _differ(name, info.rules, old)]:
            self.fail(f"the engine that was started anew has another {', '.join(names)}: what it serves has changed")
            return
        self.info = info
        if self._must_flush:  # what host memory holds outlives an engine
            self._must_flush = False
            self._send(messages.Flush())
        if self.state == "restarting":
            self._sending = asyncio.create_task(self._send_again())
        else:
            self._open()

    def _open(self) -> None:
        self.state, self.reason = "ready", ""
        self.settled.set()
        self.on_ready()

    async def _send_again(self) -> None:
        """Sends all that waits, in slices, and then one suspect after the other as this front's turn comes.

        New requests come after those that an engine had, and whole: where two fronts send such in parts, the engine has
        room for neither's last part.
        """
        assert self.info is not None
        nbytes = 0
        again = (self._send_behind(*waiting) for waiting in self._in_flight.take_waiting())
        new = (self._send_new(*unsent) for unsent in self._in_flight.take_unsent(self.info.rules))
        for sent in chain(again, new):
            nbytes += sent
            if nbytes > _AGAIN_BYTES:
                nbytes = 0
                await asyncio.sleep(0)
        self._sending = None
        if self.state == "restarting":
            self._open()
            if self._in_flight.quarantined:
                self._send(messages.AcquireLock())

    def _send_new(self, requests: Sequence[PreparedRequest], ids: Sequence[int]) -> int:
        """Sends requests that no engine has had; returns how many bytes their prompts are."""
        gone = [i for i in ids if i not in self._in_flight.by_id]
        for request_id in ids:
            if (live := self._in_flight.by_id.get(request_id)) is not None:
                live.is_there = True
        for message in _frames_of(requests):
            self._send(message)
        if gone:
            self._send(messages.Abort(gone))
        return sum(len(request.tokens) for request in requests)

    def _send_behind(self, request_id: int, live: InFlightRequest) -> int:
        """Sends one sequence behind the tokens that it has; returns how many bytes these and its prompt are."""
        assert self.info is not None
        request = live.request_behind(self.info.rules)
        live.is_there = True
        if live.restarts > live.resumes:
            live.resumes = live.restarts
            self.on_again()
        self._send(messages.Add([request]))
        return len(request.tokens)

    def _try_next(self) -> None:
        """Sends the next suspect, for which no other is there, or says that there is none left."""
        found = self._in_flight.next_quarantined()
        if found is None:
            self._send(messages.ReleaseLock())
        else:
            self._send_behind(*found)

    def _take(self, step: messages.Outputs) -> None:
        """Puts the outputs of a step before their sinks, columns first."""
        rows, in_flight, ready = step.columns(), self._in_flight.by_id, self._ready
        if len(rows.tokens) == len(rows):
            for request_id, token in zip(rows.ids.tolist(), rows.tokens.tolist(), strict=True):
                live = in_flight.get(request_id)
                if live is not None:  # else aborted meanwhile
                    live.tokens.append(token)
                    stream = live.stream
                    stream.pending.append(token)
                    if not stream.is_queued:
                        stream.is_queued = True
                        ready.append(stream)
        else:
            for output in rows:
                self._put(output.request_id, output.token_ids, output.token_ids)
        for output in step.details:
            self._put(output.request_id, output.token_ids, [output])
            if output.finish_reason is not None:
                in_flight.pop(output.request_id, None)
        self._engine_is_idle = step.stats is not None and _num_held(step.stats) == 0
        if step.stats is not None:
            self.stats = step.stats
            self.on_stats(step.stats)
            if self._in_flight.waiting and self._sending is None and _num_held(step.stats) < self.capacity:
                self._sending = asyncio.create_task(self._send_again())
        if self._in_flight.quarantine_is_over:
            self._try_next()
        if not self._is_scheduled:
            self._run()

    def _put(self, request_id: int, token_ids: list[int], items: Sequence[int | EngineOutput]) -> None:
        live = self._in_flight.by_id.get(request_id)
        if live is None:
            return
        live.tokens.extend(token_ids)
        stream = live.stream
        stream.pending.extend(items)
        if not stream.is_queued:
            stream.is_queued = True
            self._ready.append(stream)

    def _run(self) -> None:
        """Has sinks take what has come: a slice now, the others as soon as the event loop has looked around.

        Tokens that come for a sink while it waits for its turn are taken together.
        """
        self._is_scheduled = False
        self._hand_over()
        self._schedule()

    def _schedule(self) -> None:
        if self._ready and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _hand_over(self) -> None:
        ready, left = self._ready, SLICE
        while ready and left > 0:
            stream = ready.popleft()
            left -= max(1, len(stream.pending))
            stream.is_queued = False
            stream.arrived()

    def put_off(self, stream: RequestStream) -> None:
        """Calls `arrived` of a sink again when others have had their turn."""
        if stream.is_queued:
            return
        stream.is_queued = True
        self._ready.append(stream)
        self._schedule()

    def _reject(self, message: messages.Rejected) -> None:
        error: Exception = Refused(message.message, message.kind == "invalid")
        if message.kind == "queue_full":
            error = Busy(message.message)
        for request_id in message.request_ids:
            if (live := self._in_flight.by_id.get(request_id)) is None:
                continue
            if live.restarts and message.kind == "queue_full":  # it was taken before: it waits for room
                live.is_there = False
                self._in_flight.waiting.append(request_id)
            elif self._in_flight.pop(request_id):
                live.stream.fail(error)


def _frames_of(requests: Sequence[PreparedRequest]) -> Iterator[messages.Add]:
    """Yields the messages that carry requests, each of a size that is decoded in a millisecond."""
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


def _differ(name: str, one: object, other: object) -> bool:
    return getattr(one, name) != getattr(other, name)


def _num_held(stats: messages.Stats) -> float:
    """Returns how many sequences of all fronts the engine holds, running and waiting."""
    numbers = (stats.get(name, 0) for name in ("running", "waiting"))
    return sum(number for number in numbers if isinstance(number, int | float))
