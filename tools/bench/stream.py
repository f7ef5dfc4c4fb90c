"""Sends one request and reads its stream: server-sent events to chunks, chunks to a record of token times."""

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from dsv3.http_client import Client, RequestFailed, ServerSentEvents

MAX_EVENT_BYTES = 1 << 24


class _StreamedChunk(msgspec.Struct):
    choices: list[dict[str, Any]] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_StreamedChunk)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One chunk with tokens: the time it was read, and the number of tokens (None: not reported by the server)."""

    time_s: float
    tokens: int | None


@dataclasses.dataclass
class RequestRecord:
    """The outcome of one request. Times are seconds on the monotonic clock; `error` is None after a success.

    The request was due at `scheduled_s`, its sending began at `sent_s`. `usage` is what the server reports.
    """

    index: int
    scheduled_s: float
    sent_s: float
    finished_s: float = math.nan
    arrivals: list[Arrival] = dataclasses.field(default_factory=list)
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None if the server does not report them."""
        return self.usage.get("prompt_tokens")

    @property
    def output_tokens(self) -> int | None:
        """Tokens of the answer: the server's usage, or else the number of streamed token ids; None without both.

        Chunks are never counted as tokens.
        """
        streamed = [arrival.tokens or 0 for arrival in self.arrivals]
        return self.usage.get("completion_tokens", sum(streamed) if streamed and all(streamed) else None)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the time the request was due to its first token."""
        return self.arrivals[0].time_s - self.scheduled_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """Seconds from the time the request was due to the end of its stream."""
        return self.finished_s - self.scheduled_s

    def inter_token_s(self) -> list[float]:
        """Returns one latency per token after the first chunk: a chunk of k tokens gives gap / k, k times.

        If the server does not report the tokens of every chunk, each chunk gives one latency.
        """
        are_known = all(arrival.tokens is not None for arrival in self.arrivals)
        latencies: list[float] = []
        for before, after in itertools.pairwise(self.arrivals):
            count = after.tokens if are_known and after.tokens else 1
            latencies += [(after.time_s - before.time_s) / count] * count
        return latencies

    def add(self, data: bytes) -> bool:
        """Adds an event of the stream; returns whether it is the last one. Raises RequestFailed for an error in it."""
        self.finished_s = time.monotonic()
        if data == b"[DONE]":
            return True
        try:
            chunk = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailed("malformed", f"{error}: {data[:200]!r}") from error
        if chunk.error is not None:
            raise RequestFailed("error event", str(chunk.error))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        ids = [choice["token_ids"] for choice in chunk.choices if choice.get("token_ids") is not None]
        if tokens := sum(map(len, ids)):
            self.arrivals.append(Arrival(self.finished_s, tokens))
        elif not ids and any(map(_has_text, chunk.choices)):
            self.arrivals.append(Arrival(self.finished_s, None))
        return False


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(map(delta.get, ("content", "reasoning_content", "reasoning", "tool_calls"))))


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the data of each server-sent event."""
    found = ServerSentEvents(MAX_EVENT_BYTES)
    async for piece in pieces:
        for data in found.push(piece):
            yield data


async def complete(
    client: Client,
    path: str,
    body: bytes,
    *,
    index: int,
    scheduled_s: float,
    timeout_s: float,
    leave_after: float = math.inf,
) -> RequestRecord:
    """Sends one streaming request and reads it to its end; a failure becomes the record's `error`.

    Kinds of error: those of `Client.request`, "timeout" (`timeout_s` after sending began), "error event" (an error
    inside the stream), "malformed", "finish: abort", "finish: error", and "left": the client has hung up after so many
    arrivals.
    """
    record, is_done = RequestRecord(index, scheduled_s, time.monotonic()), False
    try:
        async with asyncio.timeout(timeout_s), client.request("POST", path, body) as response:
            async for data in events(response.pieces()):
                is_done |= record.add(data)
                if len(record.arrivals) >= leave_after:
                    raise RequestFailed("left", f"after {leave_after} arrivals")
        if not is_done:
            raise RequestFailed("disconnected", "the stream ended without [DONE]")
        if record.finish_reason in ("abort", "error"):
            raise RequestFailed(f"finish: {record.finish_reason}", "the server aborted the request")
    except RequestFailed as failure:
        record.error, record.detail, record.finished_s = failure.kind, failure.detail, time.monotonic()
    except TimeoutError:
        record.error, record.detail = "timeout", f"not finished {timeout_s:g} s after it was sent"
        record.finished_s = time.monotonic()
    return record
