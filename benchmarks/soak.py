"""Streams from a running server with many clients, of which a fifth hang up half-way, and checks that nothing is left.

  python -m launch.serve &
  python -m benchmarks.soak --seconds 120 --server_pid $!
  python -m benchmarks.soak --seconds 1800 --server_pid $! --hostile

At the end no request may run or wait, no page may be in use, and nothing may have been compiled. With --server_pid the
resident memory of the server's processes may grow by at most --max_growth_mib from the middle third of the run to its
last third, and none of the descriptors may be left that they opened meanwhile; a worker that starts under load brings
its own. With --hostile all attacks of `benchmarks.attacks` are made
meanwhile, one after the other; no honest request may fail or be told to come again, and the goal of
`benchmarks.hostile` is kept. Exit status 0 means that all of this holds.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import statistics
import time
from typing import Any

import httpx
import psutil
from absl import flags as absl_flags

from benchmarks.hostile import memory
from benchmarks.soak_hostile import Felt, Siege, percentiles
from benchmarks.soak_hostile import problems as problems_of
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
_HOSTILE = absl_flags.DEFINE_bool("hostile", False, "Attack the server meanwhile.")
_ATTACK_S = absl_flags.DEFINE_float("attack_seconds", 10.0, "Seconds of each attack, before the next one.", 0.1)
_ATTACKS = absl_flags.DEFINE_multi_string("attack", [], "Make only this attack; may be given several times.")
_SEED = absl_flags.DEFINE_integer("seed", 0, "Seed of prompts, lengths and disconnects.")

_SAMPLE_S = 5.0
_SPARE_DESCRIPTORS = 8  # this client's own connections, and the front's pipes to workers that have started meanwhile
_COMPILED = "dsv3:recompilations_total"
_LEFT_BEHIND = ("vllm:num_requests_running", "vllm:num_requests_waiting", "dsv3:pages_in_use")


@dataclasses.dataclass
class RouterStats:
    """Counts of what has happened so far; `rss` and `descriptors` (by process id) hold samples.

    `gaps` is the longest time between two chunks of each stream that came to its end.
    """

    finished: int = 0
    disconnected: int = 0
    busy: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    chunks: int = 0
    ttft: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    rss: list[int] = dataclasses.field(default_factory=list)
    descriptors: list[dict[int, int]] = dataclasses.field(default_factory=list)


def main() -> int:
    return asyncio.run(_soak())


async def _soak() -> int:
    tally, started, seconds = RouterStats(), time.monotonic(), _SECONDS.value
    headers = {"authorization": f"Bearer {_KEY.value}"} if _KEY.value else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_CLIENTS.value)
    async with httpx.AsyncClient(base_url=_URL.value, headers=headers, timeout=120, limits=limits) as client:
        _look(tally)
        sampler = asyncio.create_task(_sample(client, tally, started))
        siege = Siege(httpx.URL(_URL.value).port, seconds, _ATTACK_S.value, _ATTACKS.value) if _HOSTILE.value else None
        try:
            await asyncio.gather(*(_client(client, tally, i, started + seconds) for i in range(_CLIENTS.value)))
            felt = None if siege is None else await asyncio.to_thread(siege.end)
        finally:
            if siege is not None:
                siege.stop()
        sampler.cancel()
    async with httpx.AsyncClient(base_url=_URL.value, headers=headers, timeout=120) as client:
        left = await _wait_until_idle(client)  # the connections of the clients before are closed
        _look(tally)
    return _report(tally, felt, left, time.monotonic() - started)


async def _client(client: httpx.AsyncClient, tally: RouterStats, number: int, deadline: float) -> None:
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


async def _request(client: httpx.AsyncClient, tally: RouterStats, body: dict, leave_after: int | None) -> None:
    """Reads one stream; the client hangs up after `leave_after` chunks (0: before the first; None: never)."""
    sent = time.monotonic()
    if leave_after == 0:
        try:
            await client.post("/v1/completions", json=body, timeout=0.01)
        except httpx.TimeoutException:
            tally.disconnected += 1
            return
    seen, last, gap, came = 0, "", 0.0, 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await _refused(answer, tally)
            return
        async for line in answer.aiter_lines():
            if not line:
                continue
            now = time.monotonic()
            if not seen:
                tally.ttft.append(now - sent)
            else:
                gap = max(gap, now - came)
            seen, last, came = seen + 1, line, now
            if line.startswith('data: {"error"'):  # a text may be "error"
                tally.failed.append(line[:200])
            if leave_after is not None and seen >= leave_after:
                tally.disconnected += 1
                return
    tally.chunks += seen - 1
    tally.finished += 1
    tally.gaps.append(gap)
    if last != "data: [DONE]":
        tally.failed.append(f"a stream ended with {last[:100]!r}")


async def _refused(answer: httpx.Response, tally: RouterStats) -> None:
    text = (await answer.aread()).decode("utf-8", "replace")
    if answer.status_code == 503 and "queue_full" in text:
        tally.busy += 1
        await asyncio.sleep(0.2)
    else:
        tally.failed.append(f"{answer.status_code}: {text[:200]}")


async def _sample(client: httpx.AsyncClient, tally: RouterStats, started: float) -> None:
    while True:
        _look(tally)
        values = await _metrics(client)
        resident = f", {tally.rss[-1] / 2**20:.0f} MiB" if tally.rss else ""
        running, waiting, pages = (int(values[name]) for name in _LEFT_BEHIND)
        print(
            f"{time.monotonic() - started:5.0f} s: {running} running, {waiting} waiting, {pages} pages{resident}, "
            f"{tally.finished} finished, {tally.disconnected} hung up, {len(tally.failed)} failed",
            flush=True,
        )
        await asyncio.sleep(_SAMPLE_S)


def _look(tally: RouterStats) -> None:
    """Notes memory and open descriptors of all the server's processes."""
    if _PID.value is None:
        return
    tally.rss.append(memory([_PID.value]))
    server = psutil.Process(_PID.value)
    tally.descriptors.append({})
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            tally.descriptors[-1][process.pid] = process.num_fds()


async def _metrics(client: httpx.AsyncClient) -> dict[str, float]:
    answer = await client.get("/metrics")
    answer.raise_for_status()
    values: dict[str, float] = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
    return values


async def _wait_until_idle(client: httpx.AsyncClient, seconds: float = 30.0) -> dict[str, float]:
    """Returns what is left behind, as soon as nothing is, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        values = await _metrics(client)
        left = {name: values[name] for name in (*_LEFT_BEHIND, _COMPILED) if values.get(name)}
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)


def _report(
    tally: RouterStats, siege: tuple[dict[str, int], Felt] | None, left: dict[str, float], seconds: float
) -> int:
    growth = _growth_mib(tally.rss)
    problems = [f"left behind: {left}"] if left else []
    problems += _problems_of_siege(tally, siege[1]) if siege else []
    if tally.descriptors:
        problems += descriptor_problems(tally.descriptors[0], tally.descriptors[-1])
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
        "longest_gap_ms": percentiles(tally.gaps),
        **(_of_siege(*siege) if siege else {}),
        "rss_mib": _start_middle_end([round(value / 2**20) for value in tally.rss]),
        "descriptors": _start_middle_end([sum(counts.values()) for counts in tally.descriptors]),
        "rss_growth_mib": None if growth is None else round(growth, 1),
        "problems": problems,
    }
    print(json.dumps(summary, indent=2))
    return 1 if problems else 0


def descriptor_problems(before: dict[int, int], after: dict[int, int]) -> list[str]:
    """Compares the processes that were there at the start; those that came meanwhile have their own descriptors."""
    start, end = sum(before.values()), sum(after.get(pid, 0) for pid in before)
    grown = end > start + _SPARE_DESCRIPTORS
    return [f"{start} descriptors at the start, {end} in the same processes at the end"] if grown else []


def _problems_of_siege(tally: RouterStats, felt: Felt) -> list[str]:
    peak = (max(tally.rss) - tally.rss[0]) / 2**20 if tally.rss else None
    found = problems_of(felt, tally.gaps, peak)
    return [*found, f"{tally.busy} requests were told to come again"] if tally.busy else found


def _of_siege(made: dict[str, int], felt: Felt) -> dict[str, Any]:
    return {"attacks": made, "health_ms": percentiles(felt.health), "machine_stalls_ms": percentiles(felt.stalls)}


def _start_middle_end(samples: list[int]) -> dict[str, int] | None:
    if not samples:
        return None
    return {"start": samples[0], "middle": samples[len(samples) // 2], "peak": max(samples), "end": samples[-1]}


def _growth_mib(samples: list[int]) -> float | None:
    """Growth from the median of the run's middle third to that of its last third; the first third warms up."""
    if len(samples) < 3:
        return None
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    return (statistics.median(last) - statistics.median(middle)) / 2**20


if __name__ == "__main__":
    flags.run(main)
