"""Starts servers for benchmarks: any command that answers, or instances of the bundled model that can be killed."""

import contextlib
import dataclasses
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

import httpx

from benchmarks.record import ROOT

_STOP_S = 30.0
LIMITS = ["--max_num_seqs=16", "--max_model_len=512", "--max_num_batched_tokens=256"]


@dataclasses.dataclass
class Instance:
    """A server and where it answers."""

    process: subprocess.Popen[str]
    url: str

    def kill(self) -> None:
        """Ends its processes at once, as a crash of the host does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """Returns a port that nobody has now, nor the next one."""
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
) -> Iterator[None]:
    """Starts a server and waits until `answers()`; ends it and its children.

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
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"{' '.join(command[:4])} ... does not answer: {said}")
                time.sleep(0.2)
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)


def is_healthy(url: str) -> bool:
    """Returns whether a server answers `/health`."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Instance]:
    """Starts a server and waits until it is ready; gives its shared memory back at the end."""
    command = [sys.executable, "-m", "launch.serve", "--port", "0", *LIMITS, *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if ready := re.search(r"ready at (http://\S+)", line):
                instance = Instance(process, ready[1])
                break
        else:
            raise RuntimeError("".join(lines))
        yield instance
        instance.kill()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in re.findall(r"host memory in (\S+):", "".join(lines)):
            Path(path).unlink(missing_ok=True)
