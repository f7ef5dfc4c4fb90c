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
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.attacks import ATTACKS, attack, rotate
from benchmarks.record import Cell, Report, arguments, run
from tests.dsv3.server import serving
from tests.dsv3.text import tiny

_STEP_S, _HEALTH_S, _MIB = 0.02, 0.05, 2**20
_NONE = "none"
_BEAT_S, _PATIENCE_S = 0.05, 120.0
_TIMEOUT_S = 60.0

GOAL = {"gap_s": 1.0, "p99_s": 0.5, "memory_mib": 500}
"""What honest clients may feel while an attack runs: gaps of a stream, `/health` at the 99th percentile; growth."""


def _probe(port: int, seconds: float, results: Any) -> None:
    """Reads a stream and asks for /health meanwhile; runs in a process of its own."""
    times: list[float] = []
    failures: list[str] = []
    asking = threading.Thread(target=ask_health, args=(port, seconds, times, failures))
    asking.start()
    gap = _longest_gap(port, seconds, failures)
    asking.join()
    results.put((gap, times, failures))


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


def _measure(name: str, port: int, pids: list[int], seconds: float) -> list[Cell]:
    """Returns the line of one attack; its last cell says whether it keeps the goal."""
    spawn = multiprocessing.get_context("spawn")
    probed, attacked = spawn.Queue(), spawn.Queue()
    before = peak = memory(pids)
    probe = spawn.Process(target=_probe, args=(port, seconds + 2, probed))
    probe.start()
    time.sleep(1.5)
    work = (time.sleep, (seconds,)) if name == _NONE else (attack, (name, port, seconds, attacked))
    attacker = spawn.Process(target=work[0], args=work[1])
    attacker.start()
    while attacker.is_alive():
        peak = max(peak, memory(pids))
        time.sleep(0.2)
    gap, times, failures = probed.get(timeout=_TIMEOUT_S + seconds)
    growth, made = (peak - before) / _MIB, 0 if name == _NONE else attacked.get(timeout=_TIMEOUT_S)
    print(*failures[:1], sep="\n", file=sys.stderr, end="")
    keeps = gap < GOAL["gap_s"] and p99(times) < GOAL["p99_s"] and growth < GOAL["memory_mib"] and not failures
    health = [round(1e3 * value) for value in (statistics.median(times), p99(times), max(times))]
    return [name, made, gap, *health, round(growth), len(failures), "yes" if keeps else "no"]


def memory(pids: list[int]) -> int:
    """Returns resident bytes of processes and their children."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            total += sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
    return total


# What `benchmarks.soak --hostile` adds.


@dataclasses.dataclass
class Felt:
    """What a probe in a process of its own has felt, in seconds.

    `health` is the time of each answer of `/health`. `stalls` is by how much each of its sleeps was too long: that is
    the machine's doing, not the server's.
    """

    health: list[float]
    stalls: list[float]
    failures: list[str]


class Siege:
    """Attackers and a probe, each a process of its own, for some seconds."""

    def __init__(self, port: int, seconds: float, each_s: float, only: list[str]):
        spawn = multiprocessing.get_context("spawn")
        self._made, self._felt = spawn.Queue(), spawn.Queue()
        names = [name for name in ATTACKS if not only or name in only]
        self._processes = [
            spawn.Process(target=rotate, args=(names, port, seconds, each_s, self._made)),
            spawn.Process(target=_feel, args=(port, seconds, self._felt)),
        ]
        for process in self._processes:
            process.start()

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


def _feel(port: int, seconds: float, results: Any) -> None:
    felt, until = Felt([], [], []), time.monotonic() + seconds
    asking = threading.Thread(target=ask_health, args=(port, seconds, felt.health, felt.failures))
    asking.start()
    while time.monotonic() < until:
        before = time.monotonic()
        time.sleep(_BEAT_S)
        felt.stalls.append(time.monotonic() - before - _BEAT_S)
    asking.join()
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
    """Measures one attack on a server of its own."""
    engine = {"max_model_len": 163_840, "max_num_seqs": 256}
    with tempfile.TemporaryDirectory() as directory:
        model = tiny.write(Path(directory) / "model")
        with serving.running(model, engine=engine, factory_options={"step_s": _STEP_S}) as server:
            return _measure(name, server.port, [server.process.pid], seconds)


if __name__ == "__main__":
    run(main)
