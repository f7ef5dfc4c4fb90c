"""Starts servers for benchmarks, any command that answers or instances of the bundled model that can be killed, and
reads what they answer and hold.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import httpx
import numpy as np
import psutil

from benchmarks.record import ROOT

_STOP_S = 30.0
SERVE = [sys.executable, "-m", "launch.serve"]
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "dsv3:pages_in_use")
"""What is 0 on a server without requests."""
LIMITS = ["--max_num_seqs=16", "--max_model_len=512", "--max_num_batched_tokens=256"]


@dataclasses.dataclass
class Instance:
    """A server and where it answers."""

    url: str
    process: subprocess.Popen[bytes] = dataclasses.field(init=False)

    def kill(self) -> None:
        """Ends its processes at once, as a crash of the host does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """Returns a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def key_file(folder: Path) -> Path:
    """Writes the secret that the instances share."""
    path = folder / "transfer.key"
    path.write_text("benchmark " * 5)
    path.chmod(0o600)
    return path


def flags(role: str, key: Path) -> list[str]:
    """Returns the flags of an instance of a role; "alone" computes everything itself."""
    if role == "alone":
        return ["--kv_offloading_size=0.05"]
    shared = [f"--role={role}", "--kv_offloading_size=0.05", f"--transfer_key_file={key}"]
    return [*shared, f"--transfer_address=127.0.0.1:{free_port()}"] if role == "prefill" else shared


@contextlib.contextmanager
def running(
    command: Sequence[str],
    answers: Callable[[], bool],
    seconds: float = 600.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a server, waits until `answers()` and yields its process; ends it, its children and its host memory.

    Raises RuntimeError, with the end of what it has written, where it ends or does not answer within `seconds`.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | (environment or {}), stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + seconds
            while not answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    said = _written(log)[-2000:]
                    raise RuntimeError(f"{' '.join(command[:4])} ... does not answer: {said}")
                time.sleep(0.2)
            yield process
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)
            for path in re.findall(r"host memory in (\S+):", _written(log)):
                Path(path).unlink(missing_ok=True)


def _written(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


def is_healthy(url: str) -> bool:
    """Returns whether a server answers `/health`."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


@contextlib.contextmanager
def serving(*arguments: str, command: Sequence[str] = (), **environment: str) -> Iterator[Instance]:
    """Starts a server on a free port, waits until it is ready, and kills it at the end.

    It is the bundled model's with `LIMITS` on a CPU, or `command`.
    """
    port = free_port()
    instance = Instance(url=f"http://127.0.0.1:{port}")
    words = [*(command or (*SERVE, *LIMITS)), "--port", str(port), *arguments]
    is_ready = functools.partial(is_healthy, instance.url)
    with running(words, is_ready, environment={"JAX_PLATFORMS": "cpu", **environment}) as instance.process:
        try:
            yield instance
        finally:
            instance.kill()


def metrics(url: str) -> dict[str, float]:
    """Returns the sum of each metric's samples."""
    values: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text.splitlines():
        if not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
    return values


def left_behind(url: str, seconds: float = 30.0) -> dict[str, float]:
    """Returns the requests and pages that a server still has, as soon as it has none, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        values = metrics(url)
        left = {name: values[name] for name in HELD if values.get(name)}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def memory(pid: int) -> int:
    """Returns resident bytes of a process and its children."""
    total, process = 0, psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total


async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[dict[int, str], list[float]]:
    """Returns the text of each choice of a stream, and when each of its events came.

    Raises httpx.HTTPError where it has an error or does not end as it should.
    """
    texts: dict[int, str] = {}
    times, data = [], ""
    async with http.stream("POST", path, json=body | {"stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            times.append(time.monotonic())
            event = json.loads(data) if data != "[DONE]" else {"choices": []}
            if "choices" not in event:
                raise httpx.HTTPError(data)
            for choice in event["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + text
    if data != "[DONE]":
        raise httpx.HTTPError(f"a stream that ends with {data}")
    return texts, times[:-1]


def longest_gap(times: Sequence[float]) -> float:
    """Returns the longest time between two events; 0 where there are fewer."""
    return float(np.diff(times).max(initial=0.0))


def processor_s(*processes: psutil.Process) -> float:
    """Returns the processor seconds that processes have taken."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
