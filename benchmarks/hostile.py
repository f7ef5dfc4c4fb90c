"""What honest clients feel while a server over an engine without a model is attacked.

  python -m benchmarks.hostile [--seconds 10] [--only NAME]

Each attack of `benchmarks.attacks` runs at full speed in a process of its own, with two threads. Another process asks
for `/health` every 50 ms on a new connection, and reads a stream of a token per 20 ms. A line per attack: how often it
was made, the worst gap of that stream, `/health` at the median, the 99th percentile and the worst, by how much resident
memory of all the server's processes rose, and how often the honest client failed. Exit status 0 means that all lines
keep `GOAL`.
"""

import contextlib
import dataclasses
import http.client
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.attacks import ATTACKS, rotate
from benchmarks.record import Cell, Report, arguments, run
from tests.dsv3.server import serving
from tests.dsv3.text import tiny

_STEP_S, _HEALTH_S, _MIB = 0.02, 0.05, 2**20
_NONE = "none"
_BEAT_S, _PATIENCE_S = 0.05, 120.0
_TIMEOUT_S = 60.0

GOAL = {"gap_s": 1.0, "p99_s": 0.5, "memory_mib": 500}
"""What honest clients may feel while an attack runs: gaps of a stream, `/health` at the 99th percentile; growth."""


def ask_health(port: int, seconds: float, times: list[float], failures: list[str]) -> None:
    """Asks for `/health` on new connections; notes how long each answer took, in seconds, and what failed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        started = time.monotonic()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
            connection.request("GET", "/health", headers={"Host": "localhost"})
            if connection.getresponse().status != 200:
                failures.append("health is not 200")
            connection.close()
        except OSError as error:
            failures.append(f"health: {error}")
        times.append(time.monotonic() - started)
        time.sleep(_HEALTH_S)


def p99(values: list[float]) -> float:
    """Returns the 99th percentile: the value that at most one in a hundred exceeds."""
    return sorted(values)[-1 - len(values) // 100]


def _longest_gap(port: int, seconds: float, failures: list[str]) -> float:
    body = {"prompt": [5, 6, 7], "max_tokens": int(seconds / _STEP_S), "stream": True, "ignore_eos": True}
    longest, last = 0.0, time.monotonic()
    try:
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=_TIMEOUT_S) as answer:
            if answer.status_code != 200:
                failures.append(f"stream: {answer.status_code}")
            for line in answer.iter_lines():
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                if '"error"' in line:
                    failures.append(line[:100])
    except httpx.HTTPError as error:
        failures.append(f"stream: {error}")
    return longest


def memory(pids: list[int]) -> int:
    """Returns resident bytes of processes and their children."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            total += sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
    return total


@dataclasses.dataclass
class Felt:
    """What a probe in a process of its own has felt, in seconds.

    `health` is the time of each answer of `/health`. `stalls` is by how much each of its sleeps was too long: that is
    the machine's doing, not the server's. `gap` is the longest of its own stream, where it reads one.
    """

    health: list[float]
    stalls: list[float]
    failures: list[str]
    gap: float = 0.0


class Siege:
    """Attackers and a probe, each a process of its own, for some seconds; the probe may read a stream, too."""

    def __init__(self, port: int, seconds: float, each_s: float, names: list[str], *, streams: bool = False):
        spawn = multiprocessing.get_context("spawn")
        self._made, self._felt = spawn.Queue(), spawn.Queue()
        self._processes = [
            spawn.Process(target=rotate, args=(names, port, seconds, each_s, self._made)),
            spawn.Process(target=_feel, args=(port, seconds, streams, self._felt)),
        ]
        for process in self._processes:
            process.start()

    def is_on(self) -> bool:
        """Returns whether the probe still runs."""
        return self._processes[1].is_alive() and self._felt.empty()

    def end(self) -> tuple[dict[str, int], Felt]:
        """Waits until attackers and probe have ended; returns how often each attack was made, and what was felt."""
        made, felt = self._made.get(timeout=_PATIENCE_S), self._felt.get(timeout=_PATIENCE_S)
        for process in self._processes:
            process.join(_PATIENCE_S)
        return made, felt

    def stop(self) -> None:
        """Ends whatever still runs."""
        for process in self._processes:
            with contextlib.suppress(ValueError):
                process.kill()


def _feel(port: int, seconds: float, streams: bool, results: Any) -> None:
    felt, until = Felt([], [], []), time.monotonic() + seconds
    with ThreadPoolExecutor(2) as pool:
        pool.submit(ask_health, port, seconds, felt.health, felt.failures)
        reading = pool.submit(_longest_gap, port, seconds, felt.failures) if streams else None
        while time.monotonic() < until:
            before = time.monotonic()
            time.sleep(_BEAT_S)
            felt.stalls.append(time.monotonic() - before - _BEAT_S)
    felt.gap = reading.result() if reading else 0.0
    results.put(felt)


def problems(felt: Felt, gaps: list[float], growth_mib: float | None) -> list[str]:
    """Returns what misses the goal; `gaps` is the longest of each honest stream, in seconds."""
    found = [f"{len(felt.failures)} of /health failed, the first with {felt.failures[0]}"] if felt.failures else []
    if p99(felt.health) >= GOAL["p99_s"]:
        found.append(f"/health took {p99(felt.health):.2f} s at the 99th percentile")
    if gaps and max(gaps) >= GOAL["gap_s"]:
        late = sum(gap >= GOAL["gap_s"] for gap in gaps)
        found.append(f"{late} of {len(gaps)} streams stood still, the longest for {max(gaps):.2f} s")
    if growth_mib is not None and growth_mib >= GOAL["memory_mib"]:
        found.append(f"resident memory rose by {growth_mib:.0f} MiB")
    return found


def percentiles(values: list[float]) -> list[float]:
    """Returns the median, the 99th percentile and the largest of some seconds, in milliseconds."""
    return [round(1e3 * value, 1) for value in (statistics.median(values), p99(values), max(values))]


def main(report: Report) -> int:
    given = arguments(__doc__, seconds=10.0, only="")
    columns = ["attack", "made", "worst gap of a stream (s)", "/health p50 (ms)", "p99 (ms)", "worst (ms)",
               "memory (MiB)", "failed", "keeps the goal"]  # fmt: skip
    names = (name for name in (_NONE, *ATTACKS) if given.only in name)
    table = report.table("Attacks", columns, (_attacked(name, given.seconds) for name in names))
    return 0 if all(row[-1] == "yes" for row in table.rows) else 1


def _attacked(name: str, seconds: float) -> list[Cell]:
    """Returns the line of one attack on a server of its own; its last cell says whether it keeps the goal."""
    engine = {"max_model_len": 163_840, "max_num_seqs": 256}
    with tempfile.TemporaryDirectory() as directory:
        model = tiny.write(Path(directory) / "model")
        with serving.running(model, engine=engine, factory_options={"step_s": _STEP_S}) as server:
            before = peak = memory([server.process.pid])
            siege = Siege(server.port, seconds, seconds, [] if name == _NONE else [name], streams=True)
            while siege.is_on():
                peak = max(peak, memory([server.process.pid]))
                time.sleep(0.2)
            made, felt = siege.end()
    growth = (peak - before) / _MIB
    print(*felt.failures[:1], sep="\n", file=sys.stderr, end="")
    health = [round(1e3 * value) for value in (statistics.median(felt.health), p99(felt.health), max(felt.health))]
    keeps = "no" if problems(felt, [felt.gap], growth) else "yes"
    return [name, sum(made.values()), felt.gap, *health, round(growth), len(felt.failures), keeps]


if __name__ == "__main__":
    run(main)
