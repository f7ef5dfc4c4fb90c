"""Starts servers in their own processes, with the fake engine by default."""

import contextlib
import json
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from tests.forked import Forked

ROOT = Path(__file__).parents[3]
FAKE = "tests.dsv3.server.fake_engine:make"


class Server:
    """A running server: its address, its process and a client."""

    def __init__(self, process: Forked, log: Path):
        self.process = process
        self.log = log
        first = process.stdout.readline()
        assert first.startswith("port "), first + log.read_text()
        self.port = int(first.split()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def wait_started(self) -> None:
        """Waits for the line that all API servers have an engine."""
        assert "ready\n" in iter(self.process.stdout.readline, ""), self.log.read_text()

    def wait_ready(self) -> None:
        """Polls until each of several new connections is to an API server whose engine is ready."""
        new_connection = {"Connection": "close"}
        self.wait_for(lambda: all(self.http.get("/health", headers=new_connection).is_success for _ in range(8)))

    def wait_for(self, condition, seconds: float = 60) -> None:
        """Polls until `condition()` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [float(x.rpartition(" ")[2]) for x in lines if x.split("{")[0] == name]
        assert found, name
        return sum(found)

    def is_idle(self) -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "dsv3:pages_in_use")
        return all(self.metric(name) == 0 for name in names)

    def engine_process(self) -> psutil.Process:
        """Returns the engine process; a younger one may be its spare."""
        children = psutil.Process(self.process.pid).children()
        engines = [p for p in children if "dsv3.server.engine.process" in command_of(p)]
        return min(engines, key=lambda each: each.create_time())

    def stop(self, seconds: float = 30) -> int:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def command_of(process: psutil.Process) -> str:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def running(model_dir: Path, *, ready: bool = True, open_files: int = 0, **settings) -> Iterator[Server]:
    """A server with `settings` of `ServerConfig`, its options as dictionaries; killed with its children at the end.

    `open_files` is their hard limit of open files, where that is not 0.
    """
    settings = {"model_dir": str(model_dir), "model_names": ["tiny"], "engine_factory": FAKE} | settings
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        process = Forked("tests.dsv3.server.served", json.dumps(settings), log, open_files)
        family: list[psutil.Process] = []
        try:
            server = Server(process, Path(log.name))
            if ready:
                server.wait_started()
            family = psutil.Process(process.pid).children(recursive=True)
            yield server
            server.stop()
        finally:
            for child in [*family, process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()
