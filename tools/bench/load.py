"""The load generator: random prompts in a closed loop, and the figures of their latencies and throughput.

For `launch.doctor` and the benchmarks, which must not need another package. Users measure servers with aiperf
(docs/benchmarking.md).
"""

import asyncio
import collections
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from dsv3.http_client import Address, Client, RequestFailed
from tools.bench.stream import RequestRecord, complete

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
