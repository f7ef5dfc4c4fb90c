"""Streams from a running server with many clients, of which a fifth hang up half-way, and checks that nothing is left.

  python -m launch.serve &
  python benchmarks/soak.py --seconds 120 --server_pid $!

At the end no request may run or wait, and no page may be in use. With --server_pid the resident memory of the server's
processes may grow by at most --max_growth_mib from the middle third of the run to its last third. Exit status 0 means
that all of this holds.
"""

import asyncio
import dataclasses
import json
import random
import statistics
import time

import httpx
import psutil
from absl import flags as absl_flags

from launch import flags

_URL = absl_flags.DEFINE_string("url", "http://127.0.0.1:8000", "URL of the server.")
_KEY = absl_flags.DEFINE_string("api_key", None, "The server's API key.")
_CLIENTS = absl_flags.DEFINE_integer("clients", 64, "Concurrent streaming clients.", 1)
_SECONDS = absl_flags.DEFINE_float("seconds", 120.0, "Seconds for which clients start new requests.", 1.0)
_DISCONNECTS = absl_flags.DEFINE_float("disconnects", 0.2, "Share of requests whose client hangs up.", 0.0, 1.0)
_MAX_TOKENS = absl_flags.DEFINE_integer("max_tokens", 64, "Tokens of the longest answer.", 1)
_PID = absl_flags.DEFINE_integer(
    "server_pid", None, "Process id of the server; its memory and its children's are watched."
)
_GROWTH = absl_flags.DEFINE_float("max_growth_mib", 32.0, "MiB by which resident memory may grow.", 0.0)
_SEED = absl_flags.DEFINE_integer("seed", 0, "Seed of prompts, lengths and disconnects.")

_SAMPLE_S = 5.0
_LEFT_BEHIND = ("vllm:num_requests_running", "vllm:num_requests_waiting", "dsv3:pages_in_use")


@dataclasses.dataclass
class Tally:
    """Counts of what has happened so far; `rss` holds (seconds, bytes) samples."""

    finished: int = 0
    disconnected: int = 0
    busy: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    chunks: int = 0
    ttft: list[float] = dataclasses.field(default_factory=list)
    rss: list[tuple[float, int]] = dataclasses.field(default_factory=list)


def main() -> int:
    return asyncio.run(_soak())


async def _soak() -> int:
    tally, started = Tally(), time.monotonic()
    headers = {"authorization": f"Bearer {_KEY.value}"} if _KEY.value else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_CLIENTS.value)
    async with httpx.AsyncClient(base_url=_URL.value, headers=headers, timeout=120, limits=limits) as client:
        sampler = asyncio.create_task(_sample(client, tally, started))
        await asyncio.gather(*(_client(client, tally, i, started + _SECONDS.value) for i in range(_CLIENTS.value)))
        sampler.cancel()
        left = await _wait_until_idle(client)
        _sample_rss(tally, started)
    return _report(tally, left, time.monotonic() - started)


async def _client(client: httpx.AsyncClient, tally: Tally, number: int, deadline: float) -> None:
    """Sends one request after another until the deadline."""
    rng = random.Random(f"{_SEED.value}-{number}")
    while time.monotonic() < deadline:
        body = {
            "prompt": "def " + "x" * rng.randrange(1, 300) + f"{rng.random()}(",
            "max_tokens": rng.randint(1, _MAX_TOKENS.value),
            "stream": True,
            "ignore_eos": True,
        }
        stay = rng.random() >= _DISCONNECTS.value
        try:
            await _request(client, tally, body, None if stay else rng.randint(0, body["max_tokens"]))
        except httpx.HTTPError as error:
            tally.failed.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.1)


async def _request(client: httpx.AsyncClient, tally: Tally, body: dict, leave_after: int | None) -> None:
    """Reads one stream; the client hangs up after `leave_after` chunks (0: before the first; None: never)."""
    sent = time.monotonic()
    if leave_after == 0:
        try:
            await client.post("/v1/completions", json=body, timeout=0.01)
        except httpx.TimeoutException:
            tally.disconnected += 1
            return
    seen, last = 0, ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await _refused(answer, tally)
            return
        async for line in answer.aiter_lines():
            if not line:
                continue
            if not seen:
                tally.ttft.append(time.monotonic() - sent)
            seen, last = seen + 1, line
            if '"error"' in line:
                tally.failed.append(line[:200])
            if leave_after is not None and seen >= leave_after:
                tally.disconnected += 1
                return
    tally.chunks += seen - 1
    tally.finished += 1
    if last != "data: [DONE]":
        tally.failed.append(f"a stream ended with {last[:100]!r}")


async def _refused(answer: httpx.Response, tally: Tally) -> None:
    text = (await answer.aread()).decode("utf-8", "replace")
    if answer.status_code == 503 and "queue_full" in text:
        tally.busy += 1
        await asyncio.sleep(0.2)
    else:
        tally.failed.append(f"{answer.status_code}: {text[:200]}")


async def _sample(client: httpx.AsyncClient, tally: Tally, started: float) -> None:
    while True:
        _sample_rss(tally, started)
        values = await _metrics(client)
        memory = f", {tally.rss[-1][1] / 2**20:.0f} MiB" if tally.rss else ""
        running, waiting, pages = (int(values[name]) for name in _LEFT_BEHIND)
        print(
            f"{time.monotonic() - started:5.0f} s: {running} running, {waiting} waiting, {pages} pages{memory}, "
            f"{tally.finished} finished, {tally.disconnected} hung up, {len(tally.failed)} failed",
            flush=True,
        )
        await asyncio.sleep(_SAMPLE_S)


def _sample_rss(tally: Tally, started: float) -> None:
    if _PID.value is None:
        return
    server = psutil.Process(_PID.value)
    total = sum(p.memory_info().rss for p in [server, *server.children(recursive=True)])
    tally.rss.append((time.monotonic() - started, total))


async def _metrics(client: httpx.AsyncClient) -> dict[str, float]:
    answer = await client.get("/metrics")
    answer.raise_for_status()
    values: dict[str, float] = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
    return values


async def _wait_until_idle(client: httpx.AsyncClient, seconds: float = 10.0) -> dict[str, float]:
    """Returns what is left behind, as soon as nothing is, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        values = await _metrics(client)
        left = {name: values[name] for name in _LEFT_BEHIND if values[name]}
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)


def _report(tally: Tally, left: dict[str, float], seconds: float) -> int:
    growth = _growth_mib(tally.rss)
    problems = [f"left behind: {left}"] if left else []
    problems += [f"{len(tally.failed)} requests failed, the first with {tally.failed[0]}"] if tally.failed else []
    problems += ["no stream finished"] if not tally.finished else []
    if growth is not None and growth > _GROWTH.value:
        problems.append(f"resident memory grew by {growth:.1f} MiB")
    summary = {
        "seconds": round(seconds, 1),
        "clients": _CLIENTS.value,
        "finished": tally.finished,
        "disconnected": tally.disconnected,
        "refused_busy": tally.busy,
        "failed": len(tally.failed),
        "chunks_per_second": round(tally.chunks / seconds, 1),
        "median_ttft_s": round(statistics.median(tally.ttft), 4) if tally.ttft else None,
        "rss_mib": [round(value / 2**20) for _, value in tally.rss],
        "rss_growth_mib": None if growth is None else round(growth, 1),
        "problems": problems,
    }
    print(json.dumps(summary, indent=2))
    return 1 if problems else 0


def _growth_mib(samples: list[tuple[float, int]]) -> float | None:
    """Growth from the median of the run's middle third to that of its last third; the first third warms up."""
    if len(samples) < 3:
        return None
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    return (statistics.median(v for _, v in last) - statistics.median(v for _, v in middle)) / 2**20


if __name__ == "__main__":
    flags.run(main)
