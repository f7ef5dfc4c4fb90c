"""Sends one request and reads its stream: server-sent events to chunks, chunks to a record of token times."""

import asyncio
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class RequestRecord:
    """The outcome of one request. Times are seconds on the monotonic clock; `error` is None after a success.

    The request was due at `scheduled_s`, its sending began at `sent_s`. `output_tokens` is the server's usage, or else
    the number of streamed token ids; None without both. Chunks are never counted as tokens.
    """

    index: int
    scheduled_s: float
    sent_s: float
    finished_s: float
    arrivals: tuple[Arrival, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the time the request was due to its first token."""
        return self.arrivals[0].time_s - self.scheduled_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """Seconds from the time the request was due to the end of its stream."""
        return self.finished_s - self.scheduled_s

    @property
    def counts_known(self) -> bool:
        """Whether every chunk reported its number of tokens."""
        return all(arrival.tokens is not None for arrival in self.arrivals)

    def inter_token_s(self) -> list[float]:
        """Returns one latency per token after the first chunk: a chunk of k tokens gives gap / k, k times.

        If the server does not report tokens per chunk, each chunk gives one latency.
        """
        latencies: list[float] = []
        for before, after in zip(self.arrivals, self.arrivals[1:], strict=False):
            count = after.tokens if self.counts_known and after.tokens else 1
            latencies += [(after.time_s - before.time_s) / count] * count
        return latencies


class _StreamState:
    """Collects the chunks of one stream."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.done_s: float | None = None

    def add_event(self, data: bytes) -> None:
        now = time.monotonic()
        if data == b"[DONE]":
            self.done_s = now
            return
        try:
            chunk = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailed("malformed", f"{error}: {data[:200]!r}") from error
        if chunk.error is not None:
            raise RequestFailed("error event", str(chunk.error))
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self._count(chunk.choices, now)

    def _count(self, choices: list[dict[str, Any]], now: float) -> None:
        ids = [choice["token_ids"] for choice in choices if choice.get("token_ids") is not None]
        tokens = sum(map(len, ids))
        if tokens:
            self.arrivals.append(Arrival(now, tokens))
        elif not ids and any(map(_has_text, choices)):
            self.arrivals.append(Arrival(now, None))

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a RequestRecord that follow from the stream."""
        streamed = [arrival.tokens or 0 for arrival in self.arrivals]
        counted = sum(streamed) if streamed and all(streamed) else None
        return {
            "arrivals": tuple(self.arrivals),
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "cached_tokens": (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "output_tokens": self.usage.get("completion_tokens", counted),
            "finish_reason": self.finish_reason,
        }


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
    reader, sent_s, error = _StreamState(), time.monotonic(), None
    try:
        async with asyncio.timeout(timeout_s), client.request("POST", path, body) as response:
            async for data in events(response.pieces()):
                reader.add_event(data)
                if len(reader.arrivals) >= leave_after:
                    raise RequestFailed("left", f"after {leave_after} arrivals")
        error = _stream_error(reader)
    except RequestFailed as failure:
        error = failure
    except TimeoutError:
        error = RequestFailed("timeout", f"not finished {timeout_s:g} s after it was sent")
    return RequestRecord(
        index=index,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        finished_s=time.monotonic() if error or reader.done_s is None else reader.done_s,
        error=error.kind if error else None,
        detail=error.detail if error else "",
        **reader.fields(),
    )


def _stream_error(reader: _StreamState) -> RequestFailed | None:
    if reader.done_s is None:
        return RequestFailed("disconnected", "the stream ended without [DONE]")
    if reader.finish_reason in ("abort", "error"):
        return RequestFailed(f"finish: {reader.finish_reason}", "the server aborted the request")
    return None
