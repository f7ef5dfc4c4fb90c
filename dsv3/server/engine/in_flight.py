"""In-flight requests of an API server, and the quarantine of requests that crash engines.

After an engine dies, its sequences resume in the next one. A request that crashes every engine would take all others
with it. So sequences that were in the engine when two engines died in a row, without progress in between, are
*quarantined*: they are sent one at a time. If the third engine dies too, only the sequence under test fails.
"""

import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from dsv3.scheduler.request import EngineOutput, PreparedRequest, RequestRules, resumed_request

SAFE_TOKENS = 16
"""Tokens after which a sequence has passed the position where an engine died: at most two steps of 8 tokens after the
last token received."""
_DEATHS_BEFORE_QUARANTINE = 2


class EngineDied(Exception):
    """Engines have died with this request, and it is not retried; the message may be sent to clients."""


class RequestStream(Protocol):
    """Receives the outputs of one sequence.

    The client appends outputs to `pending`, a bare token id if there is nothing else to report, and then calls
    `on_outputs` once for all of them. A stream that consumes only a part, such as `SLICE` outputs, calls
    `EngineClient.requeue` for another call. `is_queued` belongs to the client. `fail` is called at most once, as the
    last call, with EngineUnavailable, EngineDied, EngineBusy or RequestRejected.
    """

    pending: list[int | EngineOutput]
    is_queued: bool

    def on_outputs(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class InFlightRequest:
    """An unfinished sequence: its output stream, and its state for resuming it in another engine.

    `tokens` are those received. `restarts` counts the engines that died with it; `deaths` those in a row that died
    before it passed the position of the previous death; `resumes` is the value of `restarts` when it was last sent.
    """

    __slots__ = ("deaths", "in_engine", "index", "request", "restarts", "resumes", "safe_at", "stream", "tokens")

    def __init__(self, stream: RequestStream, request: PreparedRequest, index: int):
        self.stream, self.request, self.index = stream, request, index
        self.tokens: array.array[int] = array.array("i")
        self.in_engine = False
        self.deaths = self.restarts = self.resumes = self.safe_at = 0

    @property
    def is_safe(self) -> bool:
        """Whether it has passed the position where an engine died with it."""
        return len(self.tokens) >= self.safe_at

    def resumed_request(self, rules: RequestRules) -> PreparedRequest:
        """Returns the request that continues after the received tokens."""
        return resumed_request(_without_lost_rank(self.request, rules), self.index, np.array(self.tokens, "<i4"), rules)

    def record_death(self) -> None:
        """Counts the death of the engine that had it."""
        self.deaths = 1 if self.is_safe else self.deaths + 1
        self.restarts += 1
        self.safe_at = len(self.tokens) + SAFE_TOKENS
        self.in_engine = False


class InFlightRequests:
    """All sequences of an API server by request id; each is retried in at most `max_restarts` engines.

    `waiting` are those to resend as soon as an engine is ready, `quarantined` those to send one at a time; both may
    contain ids of finished sequences. `in_quarantine` is the quarantined sequence that the engine has now.
    """

    def __init__(self, max_restarts: int):
        self.by_id: dict[int, InFlightRequest] = {}
        self.waiting: deque[int] = deque()
        self.quarantined: deque[int] = deque()
        self.in_quarantine: int | None = None
        self._max_restarts = max_restarts
        # New requests that must be added together, with the ids of their sequences: by each id that is unfinished.
        self.unsent: dict[int, tuple[Sequence[PreparedRequest], Sequence[int]]] = {}

    def add(self, requests: Sequence[PreparedRequest], streams: Sequence[RequestStream]) -> list[int]:
        """Registers the sequences of new requests, with a stream for each; returns their ids."""
        sequences = ((request, i) for request in requests for i in range(request.sampling.n))
        ids = []
        for (request, i), stream in zip(sequences, streams, strict=True):
            ids.append(request.request_id + i)
            self.by_id[ids[-1]] = InFlightRequest(stream, request, i)
        return ids

    def defer(self, requests: Sequence[PreparedRequest], ids: Sequence[int]) -> None:
        """Stores new requests, whose sequences have the given ids, until an engine is ready."""
        self.unsent.update(dict.fromkeys(ids, (requests, ids)))

    def pop_unsent(self, rules: RequestRules) -> Iterator[tuple[list[PreparedRequest], Sequence[int]]]:
        """Removes and yields deferred requests that are unfinished, with the ids of their sequences.

        Requests that were submitted together stay together: the engine accepts all of them or none.
        """
        while self.unsent:
            for request_id in list(self.unsent):
                if (new := self.unsent.get(request_id)) is not None:  # else yielded with an earlier id, or finished
                    requests, ids = new
                    for i in ids:
                        self.unsent.pop(i, None)
                    yield [_without_lost_rank(request, rules) for request in requests], ids

    def pop(self, request_id: int) -> InFlightRequest | None:
        """Removes a sequence and returns it; None if it has ended."""
        self.unsent.pop(request_id, None)  # the last id of requests that belong together releases their prompts
        return self.by_id.pop(request_id, None)

    def move_waiting_to(self, others: "Sequence[InFlightRequests]") -> None:
        """Moves what waits for an engine, but for quarantined sequences, to those of other engines, in turns."""
        for i, (request_id, sequence) in enumerate(self.pop_waiting()):
            other = others[i % len(others)]
            other.by_id[request_id] = sequence
            other.waiting.append(request_id)
            del self.by_id[request_id]
        for request_id, new in self.unsent.items():  # those that belong together stay together
            others[0].by_id[request_id] = self.by_id.pop(request_id)
            others[0].unsent[request_id] = new
        self.unsent.clear()

    def on_engine_death(self) -> list[tuple[InFlightRequest, EngineDied]]:
        """Updates all sequences after an engine's death; returns those that are not retried, each with its error.

        The sequence under quarantine is not retried, unless another unsafe one was in the engine with it.
        """
        tested = None if self.in_quarantine is None else self.by_id.get(self.in_quarantine)
        fatal = tested if tested is not None and not tested.is_safe and not self._has_other_unsafe(tested) else None
        ended = []
        for request_id, sequence in list(self.by_id.items()):
            if sequence.in_engine:
                sequence.record_death()
                if sequence is fatal or sequence.restarts > self._max_restarts:
                    ended.append((self.by_id.pop(request_id), self._reason(sequence)))
        self.in_quarantine = None
        self.quarantined = deque(
            reversed([i for i, sequence in self.by_id.items() if sequence.deaths >= _DEATHS_BEFORE_QUARANTINE])
        )
        self.waiting = deque(
            i for i, sequence in self.by_id.items() if sequence.restarts and sequence.deaths < _DEATHS_BEFORE_QUARANTINE
        )
        return ended

    def pop_waiting(self) -> Iterator[tuple[int, InFlightRequest]]:
        """Removes and yields the sequences to resend."""
        while self.waiting:
            request_id = self.waiting.popleft()
            if (sequence := self.by_id.get(request_id)) is not None:
                yield request_id, sequence

    def next_quarantined(self) -> tuple[int, InFlightRequest] | None:
        """Moves the next quarantined sequence, the youngest first, to `in_quarantine`; returns None if none is left."""
        while self.quarantined:
            self.in_quarantine = self.quarantined.popleft()
            if (sequence := self.by_id.get(self.in_quarantine)) is not None:
                return self.in_quarantine, sequence
        self.in_quarantine = None
        return None

    @property
    def quarantine_passed(self) -> bool:
        """Whether `in_quarantine` has passed the position where engines died with it, or has ended."""
        if self.in_quarantine is None:
            return False
        sequence = self.by_id.get(self.in_quarantine)
        return sequence is None or sequence.is_safe

    def _has_other_unsafe(self, tested: InFlightRequest) -> bool:
        others = (sequence for sequence in self.by_id.values() if sequence != tested)
        return any(sequence.in_engine and sequence.deaths and not sequence.is_safe for sequence in others)

    def _reason(self, sequence: InFlightRequest) -> EngineDied:
        times = f"{sequence.restarts} times" if sequence.restarts > 1 else "once"
        return EngineDied(f"the engine has died {times} with this request; it is not retried")


def _without_lost_rank(request: PreparedRequest, rules: RequestRules) -> PreparedRequest:
    """Returns the request, without its `rank` if the engine no longer has that rank."""
    if request.rank is not None and request.rank >= rules.num_ranks:
        return msgspec.structs.replace(request, rank=None)
    return request
