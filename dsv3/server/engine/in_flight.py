"""The sequences that a front has in the engine, and which of them is to blame where engines die again and again.

An engine that dies is replaced, and its sequences go on in the next one. Where a request kills each engine that it is
sent to, all others die with it again. So those that were there when two engines died one after the other, and have got
no further in between, are *suspects*: they are sent one at a time. The one that the third engine dies with is not sent
again, and nobody else has to go.
"""

import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from dsv3.scheduler.request import EngineOutput, PreparedRequest, RequestRules, behind

SAFE_TOKENS = 16
"""Tokens after which a sequence has passed the place where an engine died: that was two steps of 8 tokens further on
than its front had heard of."""
_SUSPICIOUS = 2  # engines


class EngineDied(Exception):
    """Engines have died with this request, and it is not given to another one; the message is fit for clients."""


class RequestStream(Protocol):
    """Where the outputs of one engine request go.

    What comes is appended to `pending`, a token alone where the request simply goes on; soon after, `arrived` is
    called, once for all that has come meanwhile. Whoever takes only a part of `pending` asks for another call by
    `put_off`; `SLICE` outputs are enough for one. `is_queued` is the client's. `fail` is called at most once, with
    EngineUnavailable, EngineDied, Busy or Refused, and nothing comes after it.
    """

    pending: list[int | EngineOutput]
    is_queued: bool

    def arrived(self) -> None: ...
    def fail(self, error: Exception) -> None: ...


class InFlightRequest:
    """A sequence whose last output has not come: where outputs go, and all that another engine needs to go on.

    `tokens` are those that have come. `deaths` counts engines that died with it, one after the other, before it had got
    past the place where the one before died; `restarts` counts all of them, `resumes` those behind which it goes on.
    """

    __slots__ = ("deaths", "index", "is_there", "request", "restarts", "resumes", "safe_at", "stream", "tokens")

    def __init__(self, stream: RequestStream, request: PreparedRequest, index: int):
        self.stream, self.request, self.index = stream, request, index
        self.tokens: array.array[int] = array.array("i")
        self.is_there = False  # an engine has it
        self.deaths = self.restarts = self.resumes = self.safe_at = 0

    @property
    def is_safe(self) -> bool:
        """Whether it has got past the place where an engine died with it."""
        return len(self.tokens) >= self.safe_at

    def request_behind(self, rules: RequestRules) -> PreparedRequest:
        """Returns the request that goes on behind the tokens that have come."""
        return behind(_on_ranks(self.request, rules), self.index, np.array(self.tokens, "<i4"), rules)

    def note_death(self) -> None:
        """Notes that its engine has died."""
        self.deaths = 1 if self.is_safe else self.deaths + 1
        self.restarts += 1
        self.safe_at = len(self.tokens) + SAFE_TOKENS
        self.is_there = False


class InFlightRequests:
    """All sequences of a front by request id; each is given to at most `max_restarts` engines after its first.

    `waiting` are those to send again as soon as there is an engine, `quarantined` those to send one at a time; some of
    either may have ended. `in_quarantine` is the suspect that the engine has.
    """

    def __init__(self, max_restarts: int):
        self.by_id: dict[int, InFlightRequest] = {}
        self.waiting: deque[int] = deque()
        self.quarantined: deque[int] = deque()
        self.in_quarantine: int | None = None
        self._max_restarts = max_restarts
        # New requests that the engine takes together, and the ids of their sequences: by each id that has not ended.
        self._unsent: dict[int, tuple[Sequence[PreparedRequest], Sequence[int]]] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, requests: Sequence[PreparedRequest], streams: Sequence[RequestStream]) -> list[int]:
        """Takes the sequences of new requests, with a sink for each; returns their ids."""
        found = ((request, i) for request in requests for i in range(request.sampling.n))
        ids = []
        for (request, i), stream in zip(found, streams, strict=True):
            ids.append(request.request_id + i)
            self.by_id[ids[-1]] = InFlightRequest(stream, request, i)
        return ids

    def put_off(self, requests: Sequence[PreparedRequest], ids: Sequence[int]) -> None:
        """Keeps new requests, whose sequences have the given ids, until there is an engine."""
        self._unsent.update(dict.fromkeys(ids, (requests, ids)))

    def take_unsent(self, rules: RequestRules) -> Iterator[tuple[list[PreparedRequest], Sequence[int]]]:
        """Yields what was put off and has not ended, with the ids of its sequences, and takes it off the list.

        What came together comes together: the engine takes all of it or none.
        """
        while self._unsent:
            for request_id in list(self._unsent):
                if (new := self._unsent.get(request_id)) is not None:  # else it came with an earlier one, or has ended
                    requests, ids = new
                    for i in ids:
                        self._unsent.pop(i, None)
                    yield [_on_ranks(request, rules) for request in requests], ids

    def pop(self, request_id: int) -> InFlightRequest | None:
        """Forgets a sequence and returns it; None where it has ended."""
        self._unsent.pop(request_id, None)  # the last one of those that came together takes their prompts along
        return self.by_id.pop(request_id, None)

    def on_engine_death(self) -> list[tuple[InFlightRequest, EngineDied]]:
        """Notes that the engine has died; returns, with the reason, the sequences that no other engine is given."""
        tried = None if self.in_quarantine is None else self.by_id.get(self.in_quarantine)
        guilty = tried if tried is not None and not tried.is_safe and not self._others_are_doubtful(tried) else None
        ended = []
        for request_id, live in list(self.by_id.items()):
            if live.is_there:
                live.note_death()
                if live is guilty or live.restarts > self._max_restarts:
                    ended.append((self.by_id.pop(request_id), self._reason(live)))
        self.in_quarantine = None
        self.quarantined = deque(reversed([i for i, live in self.by_id.items() if live.deaths >= _SUSPICIOUS]))
        self.waiting = deque(i for i, live in self.by_id.items() if live.restarts and live.deaths < _SUSPICIOUS)
        return ended

    def take_waiting(self) -> Iterator[tuple[int, InFlightRequest]]:
        """Yields the sequences to send, and takes them off the list as it goes."""
        while self.waiting:
            request_id = self.waiting.popleft()
            if (live := self.by_id.get(request_id)) is not None:
                yield request_id, live

    def next_quarantined(self) -> tuple[int, InFlightRequest] | None:
        """Puts the next suspect on trial, the youngest first; None where there is none left."""
        while self.quarantined:
            self.in_quarantine = self.quarantined.popleft()
            if (live := self.by_id.get(self.in_quarantine)) is not None:
                return self.in_quarantine, live
        self.in_quarantine = None
        return None

    @property
    def quarantine_is_over(self) -> bool:
        """Whether the suspect on trial has passed the place where engines died with it, or has ended."""
        if self.in_quarantine is None:
            return False
        live = self.by_id.get(self.in_quarantine)
        return live is None or live.is_safe

    def _others_are_doubtful(self, tried: InFlightRequest) -> bool:
        return any(live.is_there and live.deaths and not live.is_safe for live in self.by_id.values() if live != tried)

    def _reason(self, live: InFlightRequest) -> EngineDied:
        times = f"{live.restarts} times" if live.restarts > 1 else "once"
        return EngineDied(f"the engine has died {times} with this request; it is not tried again")


def _on_ranks(request: PreparedRequest, rules: RequestRules) -> PreparedRequest:
    """Returns a request that asks for no rank that has gone."""
    if request.rank is not None and request.rank >= rules.num_ranks:
        return msgspec.structs.replace(request, rank=None)
    return request
