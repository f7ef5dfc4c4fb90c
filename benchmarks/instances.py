"""Starts instances of the bundled model for benchmarks that load them and kill some of them."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
