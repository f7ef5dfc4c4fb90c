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
import functools
import http.client
import json
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil

from benchmarks.bodies import ROOT, requests, serving

_STEP_S, _HEALTH_S, _MIB = 0.02, 0.05, 2**20
_GOAL = {"gap_s": 1.0, "p99_s": 0.5, "memory_mib": 500}
_TIMEOUT_S = 60.0


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
        yield connection


def _head(path: str, length: int) -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"{lines}\r\n\r\n".encode()


def tiny_chunks(port: int, until: float) -> int:
    """Sends bodies in chunks of one byte, until the server hangs up."""
    count = 0
    with _connected(port) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        while time.monotonic() < until:
            connection.sendall(b"1\r\na\r\n" * 1000)
            count += 1000
    return count


def half_heads(port: int, until: float) -> int:
    """Opens connections that never finish their head."""
    held = []
    with contextlib.ExitStack() as stack:
        while time.monotonic() < until and len(held) < 2000:
            connection = stack.enter_context(_connected(port))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: local")
            held.append(connection)
        time.sleep(max(0.0, until - time.monotonic()))
    return len(held)


_made = functools.cache(requests)


def costly(name: str) -> Callable[[int, float], int]:
    """Returns an attack that sends one of the costly bodies of `benchmarks.bodies` and reads the answer."""

    def attack(port: int, until: float) -> int:
        path, body = _made()[name]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S) as client:
            client.post(path, content=body, headers={"content-type": "application/json"})
        return 1

    return attack


def long_texts(port: int, until: float) -> int:
    """Sends texts of 6 MiB and hangs up."""
    body = json.dumps({"prompt": "word " * (6 * _MIB // 5), "max_tokens": 1}).encode()
    with _connected(port) as connection:
        connection.sendall(_head("/v1/completions", len(body)) + body)
        time.sleep(0.1)
    return 1


def chats(port: int, until: float) -> int:
    """Sends conversations of 60 KiB and hangs up while they are rendered."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 60}] * 700, "max_tokens": 1}).encode()
    with _connected(port) as connection:
        connection.sendall(_head("/v1/chat/completions", len(body)) + body)
    return 1


def unread(port: int, until: float) -> int:
    """Asks for large answers and reads none of them."""
    body = json.dumps({"prompt": [5, 6], "n": 16, "max_tokens": 400, "return_token_ids": True}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(_connected(port)).sendall(_head("/v1/completions", len(body)) + body)
        time.sleep(max(0.0, min(2.0, until - time.monotonic())))
    return 4


def not_json(port: int, until: float) -> int:
    """Sends NaN in a field that is ignored."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S) as client:
        for _ in range(100):
            body = b'{"prompt":[5],"max_tokens":1,"foo":NaN}'
            client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    return 100


ATTACKS: dict[str, Callable[[int, float], int]] = {
    "none": lambda port, until: time.sleep(max(0.0, until - time.monotonic())) or 0,
    "1-byte chunks": tiny_chunks,
    "half heads": half_heads,
    **{name: costly(name) for name in requests() if not name.startswith("the same")},
    "6 MiB texts, hung up": long_texts,
    "60 KiB chats, hung up": chats,
    "large answers, unread": unread,
    "NaN": not_json,
}


def _attack(name: str, port: int, seconds: float, results: Any) -> None:
    """Makes one attack again and again, on two threads; runs in a process of its own."""
    _made()
    until, counts = time.monotonic() + seconds, []

    def repeat() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(OSError, httpx.HTTPError):
                counts.append(ATTACKS[name](port, until))

    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 5)
    results.put(sum(counts))


def _probe(port: int, seconds: float, results: Any) -> None:
    """Reads a stream and asks for /health meanwhile; runs in a process of its own."""
    until, times, failures = time.monotonic() + seconds, [], []

    def ask() -> None:
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

    asking = threading.Thread(target=ask)
    asking.start()
    gap = _longest_gap(port, seconds, failures)
    asking.join()
    results.put((gap, times, failures))


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
    before = peak = _memory(pids)
    probe = spawn.Process(target=_probe, args=(port, seconds + 2, probed))
    probe.start()
    time.sleep(1.5)
    attacker = spawn.Process(target=_attack, args=(name, port, seconds, attacked))
    attacker.start()
    while attacker.is_alive():
        peak = max(peak, _memory(pids))
        time.sleep(0.2)
    gap, times, failures = probed.get(timeout=_TIMEOUT_S + seconds)
    p99 = statistics.quantiles(times, n=100)[98] if len(times) > 1 else times[0]
    memory = (peak - before) / _MIB
    print(
        f"| {name} | {attacked.get(timeout=_TIMEOUT_S):,} | {gap:.2f} s | {statistics.median(times) * 1e3:.0f}, "
        f"{p99 * 1e3:.0f}, {max(times) * 1e3:.0f} ms | {memory:.0f} MiB | {len(failures)} {' '.join(failures[:1])} |",
        flush=True,
    )
    return gap < _GOAL["gap_s"] and p99 < _GOAL["p99_s"] and memory < _GOAL["memory_mib"] and not failures


def _memory(pids: list[int]) -> int:
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
    arguments = parser.parse_args()
    print("| attack | made | worst gap | /health p50, p99, worst | memory | failed |\n" + "|---" * 6 + "|", flush=True)
    kept = []
    for name in ATTACKS:
        if arguments.only in name:
            with serving(ROOT, _STEP_S) as server:
                kept.append(_measure(name, server.port, [server.pid], arguments.seconds))
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
