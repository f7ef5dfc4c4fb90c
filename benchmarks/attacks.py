"""What honest clients feel while a server over an engine without a model is attacked.

  python -m benchmarks.attacks [--seconds 10] [--only NAME]

Each attack runs in a process of its own, with two threads that leave the cores to server and clients. Another process
asks for `/health` every 50 ms on a new connection, and reads a stream of a token per 20 ms. A line per attack: how
often it was made, the worst gap of that stream, `/health` at the median, the 99th percentile and the worst, by how much
resident memory of all the server's processes rose, and how often the honest client failed. Exit status 0 means that all
lines keep `GOAL`.

Attacks are the reproductions of what once failed. Each is a function of a port and a time until which it may go on,
makes itself once or many times, and returns how often. What the server answers does not matter. `benchmarks.soak
--hostile` makes them on a server with many honest clients.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.instances import longest_gap, memory
from benchmarks.record import Cell, Report, arguments, run
from dsv3.http_client import Address, Client, RequestFailed
from tests.dsv3.server import serving
from tests.dsv3.text import tiny
from tools.load import complete

GOAL = {"gap_s": 1.0, "p99_s": 0.5, "memory_mib": 500}
"""What honest clients may feel while an attack runs: gaps of a stream, `/health` at the 99th percentile; growth."""

_NONE = "none"
_STEP_S, _HEALTH_S = 0.02, 0.05
_NICE = 10  # of attackers
_MIB = 2**20
_TIMEOUT_S = 60.0
PATIENCE_S = 120.0
"""Seconds in which attackers and probe end after their time."""
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_USER = b'{"messages":[{"role":"user","content":"x"}],'
_PARTS = b'{"role":"user","content":[' + b",".join([b'{"type":"text","text":""}'] * 310) + b"]}"


def _filled(head: bytes, unit: bytes, tail: bytes, mib: float) -> bytes:
    return head + b",".join([unit] * int((mib * _MIB - len(head) - len(tail)) // (len(unit) + 1))) + tail


def requests() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Returns the path of each costly request and what makes its body, by its name."""
    kwargs, parts = _USER + b'"chat_template_kwargs":{', b'{"messages":['
    logprobs = {"n": 128, "max_tokens": 300, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    ids = {"prompt": [5] * 131_071, "n": 128, "max_tokens": 1}
    some_ids = b"[" + b"  345," * 4999 + b"1]"
    text, asked = rb"\n\u00e9x", b'{"prompt":[5],"max_tokens":1,"user":['
    chats: dict[str, Callable[[], bytes]] = {
        "chat_template_kwargs, 2.5 M bad entries": lambda: _filled(kwargs, b'"000001":[]', b"}}", 28.6),
        "4,096 messages x 310 empty text parts": lambda: _filled(parts, _PARTS, b"]}", 31.6),
        "n=128, 300 tokens, top_logprobs=20": lambda: json.dumps(json.loads(_USER[:-1] + b"}") | logprobs).encode(),
    }
    completions: dict[str, Callable[[], bytes]] = {
        "logit_bias, 2.5 M bad entries": lambda: _filled(b'{"prompt":[5],"logit_bias":{', b'"000001":""', b"}}", 31),
        "prompt = [[[]],[[]],...]": lambda: _filled(b'{"prompt":[', b"[[]]", b"]}", 32),
        "prompt = [1,1,...]": lambda: _filled(b'{"prompt":[', b"1", b"]}", 32),
        "1,020 prompts of 5,000 ids": lambda: _filled(b'{"max_tokens":1,"prompt":[', some_ids, b"]}", 29.19),
        "a text of 16 MiB, two thirds escaped": lambda: b'{"prompt":"' + text * int(15.9 * _MIB / 9) + b'"}',
        'user = [{"a":0},...]': lambda: _filled(asked, b'{"a":0}', b"]}", 32),
        "user = [100,...]": lambda: _filled(asked, b"100", b"]}", 32),
        "131,071 ids, n=128": lambda: json.dumps(ids).encode(),
    }
    paths = {_CHAT: chats, _COMPLETIONS: completions}
    return {name: (path, make) for path, makers in paths.items() for name, make in makers.items()}


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)


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


@functools.cache
def _made(name: str) -> tuple[str, bytes]:
    path, make = requests()[name]
    return path, make()


def costly(name: str) -> Callable[[int, float], int]:
    """Returns an attack that sends one of the costly bodies and reads the answer, or hangs up at the end."""

    def attack(port: int, until: float) -> int:
        path, body = _made(name)
        left = max(0.1, until - time.monotonic())
        ends = contextlib.suppress(httpx.ReadTimeout)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=left) as client, ends:
            client.post(path, content=body, headers={"content-type": "application/json"})
        return 1

    return attack


def at_once(path: str, body: dict[str, Any], connections: int, waits_s: float | None) -> Callable[[int, float], int]:
    """Returns an attack that sends a body over some connections at once, then waits and hangs up without reading.

    Where `waits_s` is None it waits for the beginning of each answer.
    """
    data = json.dumps(body).encode()

    def attack(port: int, until: float) -> int:
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(_connected(port)) for _ in range(connections)]
            for connection in held:
                connection.sendall(_head(path, len(data)) + data)
            for connection in held if waits_s is None else ():
                connection.recv(100)
            time.sleep(max(0.0, min(waits_s or 0.0, until - time.monotonic())))
        return connections

    return attack


def small(*bodies: bytes) -> Callable[[int, float], int]:
    """Returns an attack that sends small bodies in turns and reads the answers."""

    def attack(port: int, until: float) -> int:
        count = 0
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S) as client:
            while count < 100 and time.monotonic() < until:
                body = bodies[count % len(bodies)]
                client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
                count += 1
        return count

    return attack


def framing(port: int, until: float) -> int:
    """Sends requests whose length has two meanings, with another one hidden behind."""
    lines = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(100):
        with _connected(port) as connection:
            connection.sendall(lines + b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.recv(100)
    return 100


ATTACKS: dict[str, Callable[[int, float], int]] = {
    "1-byte chunks": tiny_chunks,
    "half heads": half_heads,
    **{name: costly(name) for name in requests()},
    "6 MiB texts, hung up": at_once(_COMPLETIONS, {"prompt": "word " * (6 * _MIB // 5), "max_tokens": 1}, 1, 0.1),
    "60 KiB chats, hung up": at_once(
        _CHAT, {"messages": [{"role": "user", "content": "x" * 60}] * 700, "max_tokens": 1}, 1, 0.0
    ),
    "4,001 messages, 100 at once": at_once(
        _CHAT, {"messages": [{"role": "user", "content": "hello"}] * 4001, "max_tokens": 1}, 50, None
    ),
    "large answers, unread": at_once(
        _COMPLETIONS, {"prompt": [5, 6], "n": 16, "max_tokens": 400, "return_token_ids": True}, 4, 2.0
    ),
    "NaN": small(b'{"prompt":[5],"max_tokens":1,"foo":NaN}'),
    "parameters at their bounds": small(
        b'{"prompt":[5],"max_tokens":1,"repetition_penalty":1e-38}',
        b'{"prompt":[5],"max_tokens":1,"top_p":1e-38}',
        b'{"prompt":[5],"max_tokens":1,"min_p":1.0,"temperature":0.7}',
        b'{"prompt":[5],"max_tokens":1,"n":100}',
    ),
    "two lengths": framing,
}


def rotate(names: list[str], port: int, seconds: float, each_s: float) -> dict[str, int]:
    """Makes one attack after the other, round and round; returns how often each."""
    until, counts = time.monotonic() + seconds, dict.fromkeys(names, 0)
    _leave_the_cores()
    for name in itertools.cycle(names):
        if (left := until - time.monotonic()) <= 0:
            break
        counts[name] += _make(name, port, min(each_s, left))
    return counts


def _leave_the_cores() -> None:
    """Lets clients and server run before this process, as if it were on another machine.

    Otherwise a client that waits for a core measures a gap of the server. Linux may divide the processor among sessions
    first; a file then has the value of the session.
    """
    os.setsid()
    os.nice(_NICE)
    set_session_nice(_NICE)


def set_session_nice(value: int) -> None:
    """Sets the priority of this process's session where Linux divides the processor so; below 0 only root may."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(value))


def _make(name: str, port: int, seconds: float) -> int:
    if name in requests():
        _made(name)
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
    return sum(counts)


@dataclasses.dataclass
class Felt:
    """What a probe in a process of its own has felt, in seconds.

    `health` is the time of each answer of `/health`, `gap` the longest of its own stream, where it reads one.
    """

    health: list[float]
    failures: list[str]
    gap: float = 0.0


@contextlib.contextmanager
def besieged(
    port: int, seconds: float, each_s: float, names: list[str], *, streams: bool = False
) -> Iterator[tuple[AsyncResult[dict[str, int]], AsyncResult[Felt]]]:
    """Starts attackers and a probe, each a process of its own; the probe may read a stream, too.

    Yields how often each attack was made, and what was felt, as results to wait for. Ends what still runs at the end.
    """
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        attacking = pool.apply_async(rotate, (names, port, seconds, each_s))
        yield attacking, pool.apply_async(_probe, (port, seconds, streams))


def _probe(port: int, seconds: float, streams: bool) -> Felt:
    return asyncio.run(_feel(port, seconds, streams))


async def _feel(port: int, seconds: float, streams: bool) -> Felt:
    felt, until = Felt([], []), time.monotonic() + seconds
    address = Address("127.0.0.1", port, tls=False, prefix="")
    reading = asyncio.create_task(_read_stream(felt, Client(address), seconds)) if streams else None
    while time.monotonic() < until:
        started, client = time.monotonic(), Client(address)
        try:
            async with asyncio.timeout(_TIMEOUT_S), client.request("GET", "/health") as answer:
                await answer.read(_MIB)
        except (RequestFailed, TimeoutError) as error:
            felt.failures.append(f"/health: {error}")
        felt.health.append(time.monotonic() - started)
        await client.close()
        await asyncio.sleep(_HEALTH_S)
    if reading is not None:
        await reading
    return felt


async def _read_stream(felt: Felt, client: Client, seconds: float) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": int(seconds / _STEP_S), "stream": True, "ignore_eos": True}
    record = await complete(
        client, _COMPLETIONS, json.dumps(body).encode(), index=0, scheduled_s=time.monotonic(),
        timeout_s=seconds + _TIMEOUT_S,
    )  # fmt: skip
    await client.close()
    felt.gap = longest_gap([record.sent_s, *(each.time_s for each in record.arrivals), record.finished_s])
    felt.failures += [f"stream: {record.error}: {record.detail[:100]}"] if record.error else []


def percentiles(seconds: Sequence[float]) -> list[float]:
    """Returns the median, the 99th percentile and the largest of some seconds, in milliseconds."""
    return [1e3 * float(each) for each in np.percentile(seconds, (50, 99, 100))]


def problems(felt: Felt, gaps: Sequence[float], growth_mib: float | None) -> list[str]:
    """Returns what misses the goal; `gaps` is the longest of each honest stream, in seconds."""
    found = [f"{len(felt.failures)} honest requests failed, the first with {felt.failures[0]}"] if felt.failures else []
    p99 = np.percentile(felt.health, 99)
    if p99 >= GOAL["p99_s"]:
        found.append(f"/health took {p99:.2f} s at the 99th percentile")
    if gaps and max(gaps) >= GOAL["gap_s"]:
        late = sum(gap >= GOAL["gap_s"] for gap in gaps)
        found.append(f"{late} of {len(gaps)} streams stood still, the longest for {max(gaps):.2f} s")
    if growth_mib is not None and growth_mib >= GOAL["memory_mib"]:
        found.append(f"resident memory rose by {growth_mib:.0f} MiB")
    return found


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
    names = [] if name == _NONE else [name]
    with tempfile.TemporaryDirectory() as directory:
        model = tiny.write(Path(directory) / "model")
        with (
            serving.running(model, engine=engine, factory_options={"step_s": _STEP_S}) as server,
            besieged(server.port, seconds, seconds, names, streams=True) as (attacking, feeling),
        ):
            before = peak = memory(server.process.pid)
            while not feeling.ready():
                peak = max(peak, memory(server.process.pid))
                time.sleep(0.2)
            made, felt = attacking.get(PATIENCE_S), feeling.get(0)
    growth = (peak - before) / _MIB
    print(*felt.failures[:1], sep="\n", file=sys.stderr, end="")
    keeps = "no" if problems(felt, [felt.gap], growth) else "yes"
    return [name, sum(made.values()), felt.gap, *percentiles(felt.health), round(growth), len(felt.failures), keeps]


if __name__ == "__main__":
    run(main)
