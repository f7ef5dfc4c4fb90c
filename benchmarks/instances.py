"""Starts servers for benchmarks: any command that answers, or instances of the bundled model that can be killed."""

import contextlib
import dataclasses
import functools
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
from typing import IO

import httpx
import psutil

from benchmarks.record import ROOT

_STOP_S = 30.0
SERVE = [sys.executable, "-m", "launch.serve"]
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


def processor_s(*processes: psutil.Process) -> float:
    """Returns the processor seconds that processes have taken."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
