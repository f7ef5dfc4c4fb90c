"""The clients of `benchmarks.front`, in a process of their own: one connection and one endless stream each.

Parses no JSON and builds no objects per event, so that it takes less of the machine than what it measures. Prints a
line when all streams have begun, another `seconds` later, and at last what it has seen.
"""

import asyncio
import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.front_engine import STEPS, step_times

_TOKENS = re.compile(rb'"(?:text|content)":"((?:\d{4} )+)"')
_RAMP_PER_S = 250


class Clients:
    """All streams, and what came of them."""

    def __init__(self, settings: dict):
        self.settings = settings
        self.times = step_times(Path(settings["model_dir"]))
        self.begun = self.done = 0
        self.failures: list[str] = []
        self.measures = False
        self.tokens = self.events = 0
        self.latencies: list[float] = []
        self.all_begun, self.all_done = asyncio.Event(), asyncio.Event()

    def note_begun(self) -> None:
        self.begun += 1
        if self.begun == self.settings["streams"]:
            self.all_begun.set()

    def note_done(self, problem: str | None) -> None:
        if problem is not None:
            self.failures.append(problem)
        self.done += 1
        if self.done == self.settings["streams"]:
            self.all_begun.set()
            self.all_done.set()


class Stream(asyncio.Protocol):
    """One request and its events; the numbers of its tokens must follow each other without a gap."""

    def __init__(self, clients: Clients, request: bytes):
        self._clients, self._request = clients, request
        self._rest = b""
        self._count = 0
        self._next: int | None = None
        self._is_done = False

    def connection_made(self, transport) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._rest + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return
        self._rest = data[end:]
        clients = self._clients
        for found in _TOKENS.findall(data, 0, end):
            clients.events += clients.measures
            for start in range(0, len(found), 5):
                self._take(int(found[start : start + 4]), now)
        if data.endswith(b"0\r\n\r\n") or b"[DONE]" in data[:end]:
            self._finish()

    def _take(self, number: int, now: float) -> None:
        clients = self._clients
        if self._next is None:
            clients.note_begun()
        elif number != self._next:
            self._end(f"token {number} came where {self._next} was due")
        self._next = (number + 1) % STEPS
        self._count += 1
        if clients.measures:
            clients.tokens += 1
            clients.latencies.append(now - clients.times[number])

    def _finish(self) -> None:
        wanted = self._clients.settings["max_tokens"]
        self._end(None if self._count == wanted else f"{self._count} tokens, expected {wanted}: {self._rest[-300:]!r}")

    def _end(self, problem: str | None) -> None:
        if not self._is_done:
            self._is_done = True
            self._clients.note_done(problem)
            self._transport.close()

    def connection_lost(self, error) -> None:
        self._end(f"the connection was lost after {self._count} tokens: {self._rest[-300:]!r}")


def request_of(settings: dict) -> bytes:
    """Returns the bytes that each client sends."""
    common = {"max_tokens": settings["max_tokens"], "stream": True, "ignore_eos": True}
    if settings["kind"] == "chat":
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]} | common
    else:
        path, body = "/v1/completions", {"prompt": [1, 2, 3]} | common
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def run(settings: dict) -> None:
    """Connects all clients, measures for a while, and waits for all streams to end."""
    clients, request = Clients(settings), request_of(settings)
    loop = asyncio.get_running_loop()
    for i in range(settings["streams"]):
        await loop.create_connection(lambda: Stream(clients, request), "127.0.0.1", settings["port"])
        if i % 50 == 49:
            await asyncio.sleep(50 / _RAMP_PER_S)
    await clients.all_begun.wait()
    await asyncio.sleep(1.0)  # the last heads and first tokens are behind us
    print("begin", flush=True)
    clients.measures = True
    await asyncio.sleep(settings["seconds"])
    clients.measures = False
    print("end", flush=True)
    await clients.all_done.wait()
    p50, p99 = np.percentile(clients.latencies or [np.nan], [50, 99])
    result = {
        "tokens": clients.tokens,
        "events": clients.events,
        "p50_s": p50,
        "p99_s": p99,
        "failed": len(clients.failures),
        "failures": clients.failures[:3],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    uvloop.run(run(json.loads(sys.argv[1])))
