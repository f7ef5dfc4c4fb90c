"""Measures what one costly request does to a front: the longest piece of work, and memory.

  python -m benchmarks.bodies                      the requests of the table, each against a fresh server
  python -m benchmarks.bodies --tree OTHER         the same with the code of another tree
  python -m benchmarks.bodies --tree OTHER --small in turns with this one: small chats, from body to submission

"Longest piece" is processor time of the front between two turns of its event loop. "Peak" is how far resident memory of
front and engine rises meanwhile. "Whole" is the front's processor time for the request.
"""

import argparse
import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

from tests.dsv3.text import tiny

ROOT = Path(__file__).parents[1]
_CONTEXT, _MIB = 163_840, 2**20
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
        "the same, 600 k": lambda: _filled(kwargs, b'"000001":[]', b"}}", 6.9),
        "the same, 80 k": lambda: _filled(kwargs, b'"000001":[]', b"}}", 0.9),
        "4,096 messages x 310 empty text parts": lambda: _filled(parts, _PARTS, b"]}", 31.6),
        "the same, 1,000 messages": lambda: _filled(parts, _PARTS, b"]}", 7.7),
        "n=128, 300 tokens, top_logprobs=20": lambda: json.dumps(json.loads(_USER[:-1] + b"}") | logprobs).encode(),
    }
    completions: dict[str, Callable[[], bytes]] = {
        "logit_bias, 2.5 M bad entries": lambda: _filled(b'{"prompt":[5],"logit_bias":{', b'"000001":""', b"}}", 31),
        "prompt = [[[]],[[]],...]": lambda: _filled(b'{"prompt":[', b"[[]]", b"]}", 32),
        "the same, a million brackets": lambda: _filled(b'{"prompt":[', b"[[]]", b"]}", 2.49),
        "prompt = [1,1,...]": lambda: _filled(b'{"prompt":[', b"1", b"]}", 32),
        "1,020 prompts of 5,000 ids": lambda: _filled(b'{"max_tokens":1,"prompt":[', some_ids, b"]}", 29.19),
        "a text of 16 MiB, two thirds escaped": lambda: b'{"prompt":"' + text * int(15.9 * _MIB / 9) + b'"}',
        'user = [{"a":0},...]': lambda: _filled(asked, b'{"a":0}', b"]}", 32),
        "user = [100,...]": lambda: _filled(asked, b"100", b"]}", 32),
        "131,071 ids, n=128": lambda: json.dumps(ids).encode(),
        "the same with return_token_ids": lambda: json.dumps(ids | {"return_token_ids": True}).encode(),
    }
    paths = {_CHAT: chats, _COMPLETIONS: completions}
    return {name: (path, make) for path, makers in paths.items() for name, make in makers.items()}


class Server:
    """A running server and what can be measured of it."""

    def __init__(self, port: int, process: subprocess.Popen[str], longest: Path):
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)
        self.port, self.pid = port, process.pid
        self._front, self._longest = psutil.Process(process.pid), longest

    def post(self, path: str, body: bytes) -> httpx.Response:
        return self.http.post(path, content=body, headers={"content-type": "application/json"})

    def cpu(self) -> float:
        times = self._front.cpu_times()
        return times.user + times.system

    def longest(self) -> float:
        return struct.unpack("d", self._longest.read_bytes())[0]

    def memory(self, field: str) -> int:
        """Bytes of front and engine together: VmRSS now, VmHWM at most since `forget`."""
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in self._pids()]
        return sum(int(status.split(f"{field}:")[1].split()[0]) * 1024 for status in statuses)

    def forget(self) -> None:
        """Sets the longest piece and the peak back."""
        with self._longest.open("r+b") as file:  # a file that is cut, if only for a moment, ends the server
            file.write(bytes(8))
        for pid in self._pids():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def _pids(self) -> list[int]:
        children = [child for child in self._front.children() if child.status() != psutil.STATUS_ZOMBIE]
        engine = [child.pid for child in children if "dsv3.server.engine.process" in child.cmdline()]
        return [self._front.pid, *engine]


@contextlib.contextmanager
def serving(tree: Path, step_s: float = 0.005, http: str = "own") -> Iterator[Server]:
    """Yields a server made of the code of `tree`; `http` names one of `benchmarks.http_servers`."""
    with tempfile.TemporaryDirectory() as directory:
        longest = Path(directory) / "longest"
        longest.write_bytes(bytes(8))
        model_dir = str(tiny.write(Path(directory) / "model"))
        settings = {"model_dir": model_dir, "longest": str(longest), "max_model_len": _CONTEXT, "step_s": step_s}
        settings["http"] = http
        command = [sys.executable, str(ROOT / "benchmarks" / "bodies_server.py"), json.dumps(settings)]
        environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            port = int(process.stdout.readline().split()[1])
            assert process.stdout.readline() == "ready\n", "the server does not start"
            yield Server(port, process, longest)
        finally:
            process.terminate()
            process.wait(60)


def table(tree: Path, only: str) -> None:
    """Prints a line for each costly request with `only` in its name."""
    print("| request | MiB | status | longest piece | whole | peak | reply |\n" + "|---" * 7 + "|", flush=True)
    for name, (path, make) in requests().items():
        if only not in name:
            continue
        body = make()
        with serving(tree) as server:
            server.post(_CHAT, _USER + b'"max_tokens":1}').raise_for_status()
            time.sleep(0.2)
            server.forget()
            cpu, memory = server.cpu(), server.memory("VmRSS")
            answer = server.post(path, body)
            time.sleep(0.1)
            cpu, memory = server.cpu() - cpu, server.memory("VmHWM") - memory
            figures = f"{1e3 * server.longest():.0f} ms | {cpu:.2f} s | {memory / _MIB:.0f} MiB"
            reply = f"{len(answer.content) / _MIB:.1f} MiB"
            print(f"| {name} | {len(body) / _MIB:.1f} | {answer.status_code} | {figures} | {reply} |", flush=True)


def small_chats(trees: list[Path], rounds: int = 5) -> None:
    """Prints processor time from the body of a small chat to its submission, tree by tree in turns."""
    script = str(ROOT / "benchmarks" / "bodies_small.py")
    with tempfile.TemporaryDirectory() as directory:
        model_dir = str(tiny.write(Path(directory) / "model"))
        for _ in range(rounds):
            for tree in trees:
                environment = {**os.environ, "PYTHONPATH": str(tree)}
                command = [sys.executable, script, model_dir]
                took = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
                print(f"{took.stdout.strip()} us per chat: {tree.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=None)
    parser.add_argument("--only", default="")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    if arguments.small:
        small_chats([tree.resolve() for tree in (arguments.tree, ROOT) if tree is not None])
    else:
        table((arguments.tree or ROOT).resolve(), arguments.only)


if __name__ == "__main__":
    main()
