"""Starts a server with a model and default options, times the phases of its start, loads it, and ends it."""

import asyncio
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools import load as bench
from tools.doctor.install import GB, used_bytes
from tools.doctor.rows import CaseResult, run_cases

_LOAD_S = 20.0
_INPUT_LEN, _OUTPUT_LEN = 128, 64
_AT_ONCE = 16
_MOST_PROMPTS = 4000
_REQUEST_S, _WHOLE_LOAD_S, _END_S = 60.0, 240.0, 60.0
_KEPT = 30  # lines of its output that a server which does not start is judged by
# The phases of a start in their order, by what the line begins with that ends each.
_PHASES = {"server": "serving ", "engine": "loading the weights", "weights": "[0/", "programs": "ready at "}


class StartedServer:
    """A server's process; its output goes to standard error, each line with the seconds since the start."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "launch.serve", "--host=127.0.0.1", "--port=0", f"--model={directory}"]
        self._began, self._lines = time.monotonic(), queue.SimpleQueue[tuple[float, str]]()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            seconds = time.monotonic() - self._began
            print(f"{seconds:8.2f} {line}", end="", file=sys.stderr, flush=True)
            self._lines.put((seconds, line.rstrip()))

    def wait_ready(self, seconds: float) -> tuple[str, dict[str, float]]:
        """Returns the server's address and the seconds of each phase. Raises RuntimeError where it does not start."""
        took, last, said = dict[str, float](), 0.0, list[str]()
        for name, begins in _PHASES.items():
            line = ""
            while not line.startswith(begins):
                at, line = self._next(seconds, said)
                said = [*said, line][-_KEPT:]
            took[f"{name} s"], last = at - last, at
        return line.split()[2], {**took, "ready s": last}

    def _next(self, seconds: float, said: Sequence[str]) -> tuple[float, str]:
        """Returns the next line and when it came."""
        while time.monotonic() < self._began + seconds:
            ended = self.process.poll()  # before the look: what it says last is in the queue soon after
            try:
                return self._lines.get(timeout=1)
            except queue.Empty:
                if ended is not None:
                    cause = next(
                        (each for each in said if re.search("error", each, re.IGNORECASE)), "it printed no error"
                    )
                    raise RuntimeError(f"the server ended with status {ended}: {cause}") from None
        raise RuntimeError(f"not ready after {seconds:.0f} s; its last line: {said[-1] if said else 'none'}")

    def end(self) -> int:
        """Ends the process as an operator does, and returns its exit status. Raises TimeoutExpired where it hangs."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_END_S)

    def kill(self) -> None:
        """Kills what is left of it, the engine's process included, which has a session of its own."""
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)

    def tree(self) -> list[int]:
        """Returns the processes that it has started, and theirs."""
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]

    def resident_bytes(self) -> float:
        """Returns what its processes hold of the host's memory, pages that they share counted in each."""
        sizes = []
        for pid in (self.process.pid, *self.tree()):
            try:
                found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            except OSError:
                continue
            sizes += [int(found[1]) * 1024.0] if found else []
        return sum(sizes)


def check_server(directory: Path, seconds: float) -> int:
    """Prints the rows of a server that has `seconds` to start; returns the exit status of a check."""
    before, held = max(used_bytes(), default=0.0), dict[str, float]()
    server, url = StartedServer(directory), ""

    def measure(when: str) -> None:
        held.update(
            {f"host GB {when}": server.resident_bytes() / GB, f"GPU GB {when}": max(used_bytes(), default=0.0) / GB}
        )

    def start() -> CaseResult:
        nonlocal url
        url, took = server.wait_ready(seconds)
        measure("ready")
        return CaseResult("start", True, "", took)

    def load() -> CaseResult:
        report = asyncio.run(_load(url))
        measure("after load")
        return _load_row(report)

    def memory() -> CaseResult:
        return CaseResult(
            "memory",
            True,
            "host: all processes of the server together; GPU: the fullest one",
            {"GPU GB before": before / GB, **held},
        )

    def end() -> CaseResult:
        status = server.end()
        left = max(used_bytes(), default=0.0) - before
        says = f"exit status {status}" + (f"; {left / GB:.1f} GB of a GPU are still in use" if left > GB else "")
        return CaseResult("end", status == 0 and left <= GB, says)

    try:
        return run_cases({"start": start}) or run_cases({"load": load, "memory": memory, "end": end})
    finally:
        server.kill()


async def _load(url: str) -> dict[str, Any]:
    """Loads a server for a short time and returns the figures."""
    async with asyncio.timeout(_WHOLE_LOAD_S):
        return await bench.run(
            url,
            input_len=_INPUT_LEN,
            output_len=_OUTPUT_LEN,
            concurrency=_AT_ONCE,
            num_prompts=_MOST_PROMPTS,
            num_warmups=_AT_ONCE,
            timeout_s=_REQUEST_S,
            seconds=_LOAD_S,
        )


def _load_row(report: dict[str, Any]) -> CaseResult:
    requests, errors = report["requests"], report["errors"]
    figures = {
        "requests": requests["completed"],
        **{name: x for name, x in report["throughput"].items() if x is not None},
    }
    for name in ("ttft_ms", "itl_ms"):
        figures |= {f"{name} {rank}": report[name][rank] for rank in ("p50", "p99") if report[name]}
    failures = "; ".join(f"{each['count']} x {kind}: {each['example']}" for kind, each in errors.items())
    says = f"{requests['failed']} of {requests['sent']} requests failed: {failures}" if errors else ""
    if not errors and not requests["completed"]:
        says = f"no request was answered in {_LOAD_S:.0f} s"
    return CaseResult(
        "load",
        not says,
        says or f"{_AT_ONCE} requests at once, {_INPUT_LEN} words in and {_OUTPUT_LEN} tokens out",
        figures,
    )


if __name__ == "__main__":
    sys.exit(check_server(Path(sys.argv[1]), float(sys.argv[2])))
