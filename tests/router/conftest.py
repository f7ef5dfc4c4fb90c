"""Routers and instances in processes of their own, shared where no test ends them."""

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.dsv3.server import serving
from tests.dsv3.text.dialects import write
from tests.forked import Forked

QUICK = ("--health_interval=0.1", "--queue_timeout=20")


class Router:
    """A running router."""

    def __init__(self, process: Forked, url: str):
        self.process, self.url = process, url
        self.http = httpx.Client(base_url=url, timeout=60, verify=False)

    def samples(self, name: str) -> list[float]:
        """A metric's samples, in the order of their labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return [float(line.rpartition(" ")[2]) for line in sorted(lines) if line.split("{")[0].split(" ")[0] == name]

    def listens(self) -> bool:
        """Whether it hears all instances' KV events."""
        return set(self.samples("dsv3:router_instance_tells")) == {1.0}

    def metric(self, name: str) -> float:
        """Their sum."""
        return sum(self.samples(name))


@contextlib.contextmanager
def routing(*arguments: str, ready: bool = True) -> Iterator[Router]:
    """A router that says it is well, or one that has just begun to listen."""
    assert sys.__stderr__ is not None
    process = Forked("tests.router.routed", json.dumps(["--port=0", *QUICK, *arguments]), sys.__stderr__)
    try:
        first = process.stdout.readline()
        assert first.startswith("routing at "), first
        router = Router(process, first.split()[-1])
        wait_until(lambda: not ready or router.http.get("/health").status_code == 200)
        yield router
        router.http.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def running_servers(model_dir: Path, count: int, **settings) -> Iterator[list[serving.Server]]:
    """Servers that a test may end."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving.running(model_dir, **settings)) for _ in range(count)]


def instances(*servers) -> str:
    return "--instances=" + ",".join(server.url for server in servers)


@pytest.fixture(scope="session")
def dialect_dir(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("routed"))


def telling(directory: Path) -> dict:
    """Settings of a server that says which pages it holds."""
    directory.mkdir()
    endpoints = {"endpoint": f"ipc://{directory}/live", "replay_endpoint": f"ipc://{directory}/replay"}
    return {"engine": {"kv_events_config": {"enable_kv_cache_events": True, **endpoints}}}


@pytest.fixture(scope="module")
def pair(dialect_dir):
    """Two servers that no test ends, and that say which pages they hold.

    They end with the file that uses them: beside the router that asks after their health, 4 % of a core until then.
    """
    with tempfile.TemporaryDirectory() as short:  # a socket's path has room for a hundred bytes
        first, second = telling(Path(short, "a")), telling(Path(short, "b"))
        with serving.running(dialect_dir, **first) as one, serving.running(dialect_dir, **second) as other:
            yield one, other


@pytest.fixture(scope="module")
def router(pair):
    with routing(instances(*pair)) as router:
        yield router
