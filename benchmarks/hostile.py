"""Attacks a server over an engine without a model, and measures what its honest clients feel meanwhile.

  python -m benchmarks.hostile [--seconds 10] [--only NAME]

Each attack runs at full speed in a process of its own, with two threads. Another process asks for `/health` every
50 ms on a new connection, and reads a stream of a token per 20 ms. A line per attack: how often it was made, the worst
gap of that stream, `/health` at the median, the 99th percentile and the worst, by how much resident memory of all the
server's processes rose, and what failed for the honest client. Exit status 0 means that all lines keep the goal:
`/health` within 0.5 s at the 99th percentile, gaps under 1 s, 500 MB, no failure.
"""

import argparse
import contextlib
import http.client
import multiprocessing
import statistics
import sys
import threading
import time
from typing import Any

import httpx
import psutil

from benchmarks.attacks import ATTACKS, attack
from benchmarks.bodies import ROOT, serving

_STEP_S, _HEALTH_S, _MIB = 0.02, 0.05, 2**20
_NONE = "none"
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


def _measure(name: str, port: int, pids: list[int], seconds: float) -> bool:
    """Prints the line of one attack; returns whether it keeps the goal."""
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
    print(
        f"| {name} | {made:,} | {gap:.2f} s | {statistics.median(times) * 1e3:.0f}, {p99(times) * 1e3:.0f}, "
        f"{max(times) * 1e3:.0f} ms | {growth:.0f} MiB | {len(failures)} {' '.join(failures[:1])} |",
        flush=True,
    )
    return gap < GOAL["gap_s"] and p99(times) < GOAL["p99_s"] and growth < GOAL["memory_mib"] and not failures


def memory(pids: list[int]) -> int:
    """Returns resident bytes of processes and their children."""
    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            total += sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--http", default="own", help="attack this server of `benchmarks.http_servers`")
    arguments = parser.parse_args()
    print("| attack | made | worst gap | /health p50, p99, worst | memory | failed |\n" + "|---" * 6 + "|", flush=True)
    kept = []
    for name in (_NONE, *ATTACKS):
        if arguments.only in name:
            with serving(ROOT, _STEP_S, arguments.http) as server:
                kept.append(_measure(name, server.port, [server.pid], arguments.seconds))
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
