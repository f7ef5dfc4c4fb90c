"""Attacks on a server, each at full speed: what `benchmarks.hostile` and `benchmarks.soak --hostile` make.

They are the reproductions of what once failed. Each is a function of a port and a time until which it may go on, makes
itself once or many times, and returns how often. What the server answers does not matter here.
"""

import contextlib
import functools
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

_MIB = 2**20
_TIMEOUT_S = 60.0
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


@functools.cache
def _made(name: str) -> tuple[str, bytes]:
    path, make = requests()[name]
    return path, make()


def costly(name: str) -> Callable[[int, float], int]:
    """Returns an attack that sends one of the costly bodies and reads the answer."""

    def attack(port: int, until: float) -> int:
        path, body = _made(name)
        left = max(0.1, until - time.monotonic())  # then it hangs up
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=left) as client:
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


def rotate(names: list[str], port: int, seconds: float, each_s: float, results: Any) -> None:
    """Makes one attack after the other, round and round, and puts how often each; runs in a process of its own."""
    until, counts = time.monotonic() + seconds, dict.fromkeys(names, 0)
    for name in itertools.cycle(names):
        if (left := until - time.monotonic()) <= 0:
            break
        counts[name] += _make(name, port, min(each_s, left))
    results.put(counts)


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
