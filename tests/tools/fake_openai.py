"""A small OpenAI-like server on a real socket with scripted responses; the model's name selects the script."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class FakeServer:
    """Received `bodies` and `heads`, the number of connections, and the address."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most_running: int = 0


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: Any) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return chunked(f"data: {text}\n\n".encode())


def token_chunk(ids: list[int], **choice: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": "x" * len(ids), "token_ids": ids, **choice}]})


def text_chunk(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}]})


def chat_chunk(**delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta}]})


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    return event(
        {
            "choices": [],
            "usage": {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details},
        }
    )


DONE = event("[DONE]") + chunked(b"")


def script(body: dict[str, Any]) -> list[bytes | float]:
    """Returns bytes to write and pauses in seconds; a response without DONE closes the connection."""
    size = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 3
    count = body["max_tokens"]
    finish = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    return {
        "plain": [HEAD, *[token_chunk([i]) for i in range(count)], finish, usage(size, count, cached=1), DONE],
        "pairs": [HEAD, *[token_chunk([i, i]) for i in range(count // 2)], usage(size, count), DONE],
        "uncounted": [HEAD, text_chunk("two words"), text_chunk(" more"), DONE],
        "ids_only": [HEAD, token_chunk([1, 2, 3]), token_chunk([4]), DONE],
        "reasoning": [HEAD, chat_chunk(role="assistant", content=""), chat_chunk(reasoning="hm"), usage(3, 1), DONE],
        "split": [HEAD, *[bytes([byte]) for byte in token_chunk([1]) + usage(size, 1) + DONE]],
        "comments": [HEAD, chunked(b": ping\r\n\r\ndata: "), chunked(b'{"choices": []}\r\n\r\n'), usage(size, 0), DONE],
        "paced": [HEAD, *[item for i in range(count) for item in (0.002, token_chunk([i]))], usage(size, count), DONE],
        "closes": [HEAD, token_chunk([1]), token_chunk([2])],
        "silent_end": [HEAD, token_chunk([1]), chunked(b"")],
        "drops": [],
        "hangs": [HEAD, token_chunk([1]), 60.0],
        "malformed": [HEAD, event("{not json"), 60.0, DONE],
        "error": [HEAD, token_chunk([1]), event({"error": {"message": "engine died"}}), DONE],
        "abort": [HEAD, token_chunk([1], finish_reason="abort"), usage(size, 1), DONE],
        "busy": [b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 15\r\n\r\nqueue is full\r\n"],
        "garbage": [b"SSH-2.0-OpenSSH\r\n\r\n"],
    }[body["model"]]


@contextlib.contextmanager
def fake_server(models: list[str] | None = None) -> Iterator[FakeServer]:
    """Serves from a thread until the end of the `with`."""
    state, started, loops = FakeServer(), threading.Event(), []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await _one(state, reader, writer, models or ["plain"]):
                pass
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        started.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield state
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def _one(
    state: FakeServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, models: list[str]
) -> bool:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    raw = await reader.readexactly(int(lengths[0].split(b":")[1]))
    route = head.split(b" ")[1].decode()
    if route.endswith("/v1/models"):
        _reply(writer, {"data": [{"id": name} for name in models]})
        return True
    body = json.loads(raw)
    state.heads.append(head)
    state.bodies.append(body)
    state.running += 1
    state.most_running = max(state.running, state.most_running)
    try:
        steps = script(body)
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                writer.write(step)
                await writer.drain()
    finally:
        state.running -= 1
    return (bool(steps) and steps[-1] == DONE) or body["model"] == "busy"


def _reply(writer: asyncio.StreamWriter, data: Any) -> None:
    text = (data if isinstance(data, str) else json.dumps(data)).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
