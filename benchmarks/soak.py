"""Streams from a running server with many clients, and checks that nothing is left.

  python -m launch.serve &
  setsid --wait python -m benchmarks.soak --seconds 120 --server_pid $!
  setsid --wait python -m benchmarks.soak --seconds 1800 --server_pid $! --hostile

Linux may divide the processor among sessions: with `setsid` clients have another one than the server, as where they are
on other machines; as root they get their turn before it. A share --disconnects of the requests hangs up half-way. At
the end no request may run or wait, no page may be in use, and nothing may have been compiled. With --server_pid the
resident memory of the server's processes may grow by at most --max_growth_mib from the middle third of the run to its
last third, and none of the descriptors may be left that they opened meanwhile; a worker that starts under load brings
its own. With --hostile all attacks of `benchmarks.attacks`, or those that --attack names, are made meanwhile, one after
the other for --attack_seconds; then no honest request may fail or be refused, and the goal of `benchmarks.attacks` is
kept. Exit status 0 means that all of this holds.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import statistics
import time

import numpy as np
import psutil

from benchmarks.attacks import ATTACKS, PATIENCE_S, Felt, besieged, percentiles, set_session_nice
from benchmarks.attacks import problems as problems_of
from benchmarks.instances import HELD, left_behind, longest_gap, memory, metrics
from benchmarks.record import Cell, Report, arguments, run
from dsv3.http_client import Address, Client
from tools.load import RequestRecord, complete

_SAMPLE_S, _TURN_S = 5.0, 0.02
_SPARE_DESCRIPTORS = 8
"""Connections of this client, and the API server's pipes to workers that have started meanwhile."""
_COMPILED = "dsv3:recompilations_total"


@dataclasses.dataclass
class Totals:
    """Counts of what has happened so far; `rss` and `descriptors` (by process id) hold samples.

    `gaps` is the longest time between two chunks of each stream that came to its end. `late` is by how much each turn
    of the clients' own event loop was late, which lengthens the gaps that it falls into.
    """

    disconnected: int = 0
    busy: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    ttft: list[float] = dataclasses.field(default_factory=list)
    gaps: list[float] = dataclasses.field(default_factory=list)
    late: list[float] = dataclasses.field(default_factory=list)
    rss: list[int] = dataclasses.field(default_factory=list)
    descriptors: list[dict[int, int]] = dataclasses.field(default_factory=list)

    def add(self, record: RequestRecord) -> float:
        """Counts a request; returns for how long its client waits before the next one."""
        self.ttft += [] if record.ttft_s is None else [record.ttft_s]
        if record.error is None:
            self.gaps.append(longest_gap([arrival.time_s for arrival in record.arrivals]))
            return 0.0
        if record.error == "left" or (record.error == "timeout" and record.finished_s - record.sent_s < 1):
            self.disconnected += 1
            return 0.0
        if record.error == "http 503" and "queue_full" in record.detail:
            self.busy += 1
            return 0.2
        self.failed.append(f"{record.error}: {record.detail[:200]}")
        return 0.1

    def look(self, pid: int | None) -> None:
        """Notes memory and open descriptors of all the server's processes."""
        if pid is None:
            return
        self.rss.append(memory(pid))
        server = psutil.Process(pid)
        self.descriptors.append({})
        for process in [server, *server.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.descriptors[-1][process.pid] = process.num_fds()


def main(report: Report) -> int:
    given = arguments(
        __doc__, url="http://127.0.0.1:8000", clients=64, seconds=120.0, disconnects=0.2, max_tokens=64,
        server_pid=int, max_growth_mib=32.0, hostile=False, attack_seconds=10.0, attack=[],
    )  # fmt: skip
    if os.getsid(0) == os.getpid():  # started by setsid
        set_session_nice(-10)  # a client that waits for a core measures itself
    return asyncio.run(_soak(report, given))


async def _soak(report: Report, given: argparse.Namespace) -> int:
    tally, started, address = Totals(), time.monotonic(), Address.parse(given.url)
    names = (given.attack or list(ATTACKS)) if given.hostile else []
    tally.look(given.server_pid)
    with besieged(address.port, given.seconds, given.attack_seconds, names) as (attacking, feeling):
        client = Client(address)
        watching = [asyncio.create_task(each) for each in (_sample(tally, started, given), _watch_own_loop(tally))]
        try:
            await asyncio.gather(*(_client(client, tally, i, started, given) for i in range(given.clients)))
        finally:
            for each in watching:
                each.cancel()
            await client.close()  # with its connections, whose descriptors are not the server's
        made = await asyncio.to_thread(attacking.get, PATIENCE_S)
        felt = await asyncio.to_thread(feeling.get, PATIENCE_S)
    left = left_behind(given.url)
    if compiled := metrics(given.url).get(_COMPILED):
        left[_COMPILED] = compiled
    tally.look(given.server_pid)
    return _report(report, tally, made, felt, left, given)


async def _client(client: Client, tally: Totals, number: int, started: float, given: argparse.Namespace) -> None:
    """Sends one request after another until the deadline; some clients hang up, before the first chunk or later."""
    rng = random.Random(number)
    while time.monotonic() < started + given.seconds:
        body = {
            "prompt": "def " + "x" * rng.randrange(1, 300) + f"{rng.random()}(",
            "max_tokens": rng.randint(1, given.max_tokens),
            "stream": True,
            "ignore_eos": True,
        }
        leave_after = math.inf if rng.random() >= given.disconnects else rng.randint(0, body["max_tokens"])
        record = await complete(
            client, "/v1/completions", json.dumps(body).encode(), index=number, scheduled_s=time.monotonic(),
            timeout_s=120.0 if leave_after else 0.01, leave_after=leave_after,
        )  # fmt: skip
        await asyncio.sleep(tally.add(record))


async def _watch_own_loop(tally: Totals) -> None:
    while True:
        started = time.monotonic()
        await asyncio.sleep(_TURN_S)
        tally.late.append(time.monotonic() - started - _TURN_S)


async def _sample(tally: Totals, started: float, given: argparse.Namespace) -> None:
    while True:
        tally.look(given.server_pid)
        values = await asyncio.to_thread(metrics, given.url)
        running, waiting, pages = (int(values[name]) for name in HELD)
        resident = f", {tally.rss[-1] / 2**20:.0f} MiB" if tally.rss else ""
        print(
            f"{time.monotonic() - started:5.0f} s: {running} running, {waiting} waiting, {pages} pages{resident}, "
            f"{len(tally.gaps)} finished, {tally.disconnected} hung up, {len(tally.failed)} failed",
            flush=True,
        )
        await asyncio.sleep(_SAMPLE_S)


def _report(
    report: Report, tally: Totals, made: dict[str, int], felt: Felt, left: dict[str, float], given: argparse.Namespace
) -> int:
    growth, problems = _growth_mib(tally.rss), _problems(tally, felt, left, given)
    counts: list[list[Cell]] = [
        ["streams finished", len(tally.gaps)],
        ["hung up", tally.disconnected],
        ["refused, the queue being full", tally.busy],
        ["failed", len(tally.failed)],
        ["median of the first token (ms)", 1e3 * statistics.median(tally.ttft) if tally.ttft else None],
        ["growth of memory from the middle to the last third (MiB)", growth],
        ["requests, pages and compiled programs left", int(sum(left.values()))],
    ]
    report.table(f"{given.clients} clients, {given.seconds:g} s", ["what", "result"], counts)
    waits = {"longest gap of a stream": tally.gaps, "/health": felt.health,
             "turns of the clients' own loop, late": tally.late}  # fmt: skip
    rows = ([name, *percentiles(values)] for name, values in waits.items() if values)
    report.table("What clients felt", ["what", "p50 (ms)", "p99 (ms)", "worst (ms)"], rows)
    samples = {"resident memory (MiB)": [round(value / 2**20) for value in tally.rss],
               "descriptors": [sum(each.values()) for each in tally.descriptors]}  # fmt: skip
    rows = ([name, each[0], each[len(each) // 2], max(each), each[-1]] for name, each in samples.items() if each)
    report.table("The server's processes", ["what", "start", "middle", "peak", "end"], rows)
    if given.hostile:
        report.table("Attacks", ["attack", "made"], made.items())
    report.table("Problems", ["problem"], ([text] for text in problems))
    return 1 if problems else 0


def _problems(tally: Totals, felt: Felt, left: dict[str, float], given: argparse.Namespace) -> list[str]:
    problems = [f"left behind: {left}"] if left else []
    if given.hostile:
        peak = (max(tally.rss) - tally.rss[0]) / 2**20 if tally.rss else None
        problems += problems_of(felt, tally.gaps, peak)
        problems += [f"{tally.busy} requests were refused because the queue was full"] if tally.busy else []
    if tally.descriptors:
        problems += descriptor_problems(tally.descriptors[0], tally.descriptors[-1])
    problems += [f"{len(tally.failed)} requests failed, the first with {tally.failed[0]}"] if tally.failed else []
    problems += ["no stream finished"] if not tally.gaps else []
    growth = _growth_mib(tally.rss)
    if growth is not None and growth > given.max_growth_mib:
        problems.append(f"resident memory grew by {growth:.1f} MiB")
    return problems


def descriptor_problems(before: dict[int, int], after: dict[int, int]) -> list[str]:
    """Compares the processes that were there at the start; those that came meanwhile have their own descriptors."""
    start, end = sum(before.values()), sum(after.get(pid, 0) for pid in before)
    grown = end > start + _SPARE_DESCRIPTORS
    return [f"{start} descriptors at the start, {end} in the same processes at the end"] if grown else []


def _growth_mib(samples: list[int]) -> float | None:
    """Growth from the median of the run's middle third to that of its last third; the first third warms up."""
    if len(samples) < 3:
        return None
    _, middle, last = np.array_split(samples, 3)
    return float(np.median(last) - np.median(middle)) / 2**20


if __name__ == "__main__":
    run(main)
