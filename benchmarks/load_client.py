"""Processor time per streamed event of the load generator and of a general HTTP client: 128 streams, paired runs.

  python benchmarks/load_client.py

A server process writes one event to every stream per 20 ms, as a decode step does. Each round reads all streams once
with `tools.bench` and once with httpx, both under uvloop. It compares processor time, not wall time: processor time
limits a client, and other work on the machine does not change it.
"""

import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import statistics
import time

import httpx
import uvloop

from dsv3.http_client import Address, Client
from tools.bench.stream import complete

STREAMS, EVENTS, TICK_S, ROUNDS = 128, 100, 0.02, 5
BODY = json.dumps({"model": "m", "prompt": [1] * 100, "stream": True}).encode()
CHOICE = {"index": 0, "text": " hello", "logprobs": None, "finish_reason": None, "token_ids": [1234]}
CHUNK = json.dumps({"id": "cmpl-0123456789abcdef", "object": "text_completion", "model": "m", "choices": [CHOICE]})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(text: str) -> bytes:
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


class Ticker:
    """Wakes all streams at the same moment."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._next.set()
            self._next = asyncio.Event()

    async def wait(self) -> None:
        await self._next.wait()


async def serve(port: multiprocessing.connection.Connection) -> None:
    ticker, chunk, last = Ticker(), chunked(CHUNK), chunked("[DONE]") + b"0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(BODY))
                writer.write(HEAD)
                for _ in range(EVENTS):
                    await ticker.wait()
                    writer.write(chunk)
                writer.write(last)

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=STREAMS)
    port.send(server.sockets[0].getsockname()[1])
    await ticker.run()


def run_server(port: multiprocessing.connection.Connection) -> None:
    uvloop.run(serve(port))


async def with_ours(url: str) -> int:
    client = Client(Address.parse(url))
    requests = [
        complete(client, "/v1/completions", BODY, index=i, scheduled_s=0.0, timeout_s=600.0) for i in range(STREAMS)
    ]
    records = await asyncio.gather(*requests)
    await client.close()
    return sum(record.output_tokens or 0 for record in records)


async def with_httpx(url: str) -> int:
    async def one(client: httpx.AsyncClient) -> int:
        tokens = 0
        async with client.stream("POST", f"{url}/v1/completions", content=BODY) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
        return tokens

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=None) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(STREAMS))))


def microseconds_per_event(read, url: str) -> float:
    began = time.process_time()
    tokens = uvloop.run(read(url))
    assert tokens == STREAMS * EVENTS, tokens
    return (time.process_time() - began) / tokens * 1e6


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=run_server, args=(theirs,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    pairs = [(microseconds_per_event(with_ours, url), microseconds_per_event(with_httpx, url)) for _ in range(ROUNDS)]
    server.terminate()
    for mine, other in pairs:
        print(f"tools.bench {mine:5.1f} us/event   httpx {other:5.1f} us/event   ratio {other / mine:.2f}")
    print(f"median ratio {statistics.median(other / mine for mine, other in pairs):.2f}")


if __name__ == "__main__":
    main()
