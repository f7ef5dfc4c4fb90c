"""The load generator: sends random prompts in a closed loop, records when tokens of each stream arrive, and computes
latencies and throughput.

For `launch.doctor` and the benchmarks, which must not need another package. Users measure servers with aiperf
(docs/benchmarking.md).
"""

import asyncio
import collections
import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from dsv3.http_client import Address, Client, RequestFailed, ServerSentEvents

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


PERCENTILES = (50, 90, 95, 99)
PATH = "/v1/completions"
MAX_REPLY_BYTES = 1 << 24
# Common in English and in programs: with the space before it, each is one token in most vocabularies.
_COMMON = """
    the of and to in is for that this with as are by from or an be not if it will can on at when all has have one but
    use which its used number name value list data file code time string return object method function class set type
    key path line text module import other new should must same first last only default index test error case part
    read write call result input output state order form size point end start make
"""
WORDS = _COMMON.split()
_WARM_UP_SEED = 1_000_003  # other prompts than the measured ones, which must not be in the prefix cache


class LoadError(Exception):
    """The load cannot run; the message gives the reason."""


async def run(
    url: str,
    *,
    input_len: int,
    output_len: int,
    concurrency: int,
    num_prompts: int,
    num_warmups: int = 1,
    vocab_size: int | None = None,
    timeout_s: float = 600.0,
    seconds: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Sends `num_prompts` random prompts, `concurrency` at a time, and returns the figures of `summarize`.

    Answers have `output_len` tokens. Prompts have `input_len` token ids below `vocab_size`, or without it as many
    common words. With `seconds` the load ends early and counts the requests that have ended; a request fails after
    `timeout_s`. Raises LoadError if the server lists no model, or a warm-up request fails.
    """
    client = Client(Address.parse(url))
    units = WORDS if vocab_size is None else range(vocab_size)
    try:
        model = await _served_model(client)
        warm_up = bodies(model, num_warmups, units, input_len, output_len, seed + _WARM_UP_SEED)
        for record in await closed_loop(client, warm_up, concurrency, timeout_s):
            if record.error is not None:
                raise LoadError(f"a warm-up request failed: {record.error}: {record.detail}")
        prompts = [*bodies(model, num_prompts, units, input_len, output_len, seed)]
        return summarize(await closed_loop(client, prompts, concurrency, timeout_s, seconds))
    finally:
        await client.close()


async def _served_model(client: Client) -> str:
    """Returns the first model that the server lists."""
    try:
        async with client.request("GET", "/v1/models") as response:
            return str(msgspec.json.decode(await response.read(MAX_REPLY_BYTES))["data"][0]["id"])
    except RequestFailed as error:
        raise LoadError(f"GET /v1/models: {error}") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise LoadError("GET /v1/models lists no model") from error


def bodies(
    model: str, count: int, units: Sequence[int] | Sequence[str], input_len: int, output_len: int, seed: int
) -> Iterator[bytes]:
    """Yields the bodies of `count` requests, equal for equal seeds; prompts are token ids or text, as `units` are."""
    rng = random.Random(seed)
    for _ in range(count):
        prompt: list[Any] = rng.choices(units, k=input_len)
        fields = {
            "model": model,
            "prompt": " ".join(prompt) if isinstance(units[0], str) else prompt,
            "max_tokens": output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_token_ids": True,
        }
        yield json.dumps(fields).encode()


async def closed_loop(
    client: Client, requests: Iterable[bytes], concurrency: int, timeout_s: float, seconds: float | None = None
) -> list[RequestRecord]:
    """Sends requests, `concurrency` at a time, and returns the records of those that ended within `seconds`."""
    queue, records = enumerate(requests), list[RequestRecord]()

    async def send_in_turn() -> None:
        for index, body in queue:
            now = time.monotonic()
            records.append(await complete(client, PATH, body, index=index, scheduled_s=now, timeout_s=timeout_s))

    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(send_in_turn())
    except TimeoutError:
        pass
    return sorted(records, key=lambda record: record.index)


def summarize(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Returns the figures of a load as plain data; latencies of successful requests in milliseconds."""
    good = [record for record in records if record.error is None]
    seconds = 0.0
    if records:
        seconds = max(record.finished_s for record in records) - min(record.scheduled_s for record in records)
    counts = collections.Counter(record.error for record in records if record.error)
    first = {record.error: record.detail[:300] for record in reversed(records) if record.error}
    read, written = (_sum(getattr(record, f"{name}_tokens") for record in good) for name in ("prompt", "output"))
    both = None if read is None or written is None else read + written
    rates = {"requests_per_s": len(good), "output_tokens_per_s": written, "total_tokens_per_s": both}
    return {
        "requests": {"sent": len(records), "completed": len(good), "failed": len(records) - len(good)},
        "errors": {kind: {"count": count, "example": first[kind]} for kind, count in counts.most_common()},
        "throughput": {name: n / seconds if n is not None and seconds else None for name, n in rates.items()},
        "ttft_ms": distribution(record.ttft_s for record in good),
        "itl_ms": distribution(gap for record in good for gap in record.inter_token_s()),
        "e2e_ms": distribution(record.e2e_s for record in good),
    }


def distribution(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Returns mean, linearly interpolated percentiles and maximum of the known values in milliseconds; None without."""
    values = np.array([value for value in seconds if value is not None]) * 1e3
    if not values.size:
        return None
    percentiles = np.percentile(values, PERCENTILES)
    named = {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, percentiles, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}


def _sum(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)
