"""Instances of real processes: a server whose engine process leads, and followers, all on this machine."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from dsv3.config.options import ClusterOptions, EngineOptions
from tests.dsv3.engine import letters
from tests.dsv3.engine.cluster import local
from tests.dsv3.engine.cluster.relay import Relay
from tests.dsv3.server import serving
from tests.dsv3.server.serving import ROOT, Server

FACTORY = "tests.dsv3.engine.cluster.toy_cluster:start"


class Instance:
    """A server and its followers by process id, each with its log, and where jax's coordinator listens."""

    def __init__(
        self,
        server: Server,
        followers: dict[int, subprocess.Popen[str]],
        logs: dict[int, Path],
        cluster: ClusterOptions,
        start: Callable[[int], None],
        serve: Callable[[], Server],
        relay: Relay | None,
    ):
        self.server, self.followers, self._logs, self.start = server, followers, logs, start
        self._serve, self.relay = serve, relay
        self.coordinator, self.key = cluster.coordinator, cluster.cluster_key_file

    def wait_ready(self) -> None:
        """Waits until requests are served; prints all logs if the start fails."""
        while True:
            with contextlib.suppress(httpx.ConnectError):
                if self.server.http.get("/health").status_code == 200:
                    return
            if self.server.process.poll() is not None:
                raise AssertionError("\n".join(map(self.log, [0, *self.followers])))
            time.sleep(0.05)

    def serve_again(self) -> None:
        """Starts another server in place of one that has ended."""
        self.server = self._serve()
        self.wait_ready()

    def log(self, process_id: int) -> str:
        """The log of a process; the leader's engine shares its server's log."""
        return self.server.log.read_text() if process_id == 0 else self._logs[process_id].read_text()


def start_follower(
    cluster: ClusterOptions, model_dir: Path, engine: EngineOptions, log: Path, script: str = "toy_cluster", **more
) -> subprocess.Popen:
    """A follower of the toy's leader, or its supervisor."""
    options = {"cluster": dataclasses.asdict(cluster), "engine": dataclasses.asdict(engine)}
    arguments = {"model_dir": str(model_dir)} | options | more
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"tests.dsv3.engine.cluster.{script}", json.dumps(arguments)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )


@contextlib.contextmanager
def running(
    directory: Path,
    num_processes: int,
    cache: Path,
    *,
    silence: float = 20.0,
    engine: dict | None = None,
    spells: bool = False,
    supervised: bool = False,
    relayed: bool = False,
    cluster: dict | None = None,
    **more,
) -> Iterator[Instance]:
    """The toy served by `num_processes` processes with options `engine`, `cluster`; `more` goes to followers' scripts.

    The first failure ends it, unless it is `supervised`: then the returned processes are those of supervisors. Where
    `engine` has a transfer_key_file, each process serves its pages to others. One that `spells` has letters for its
    tokens, so that it takes grammars. Followers reach a leader that is `relayed` over a link that can be cut.
    """
    model_dir = directory / "model"
    model_dir.mkdir(exist_ok=True)
    (model_dir / "config.json").write_text("{}")
    if spells:
        letters.write(model_dir)
    leader = local.options(directory, num_processes, cluster_silence_timeout=silence, **(cluster or {}))
    given = [dict(engine or {}) for _ in range(num_processes)]
    per_node = leader.processes_per_node
    for i in range(0, num_processes if engine and "transfer_key_file" in engine else 0, per_node):
        address = f"127.0.0.1:{local.free_port()}"  # the next ports are those of further processes of the node
        for own in given[i : i + per_node]:
            own["transfer_address"] = address
    relay = Relay(leader.coordinator) if relayed else None
    reached = leader if relay is None else dataclasses.replace(leader, coordinator=relay.address)
    followers, logs = {}, {i: directory / f"follower{i}.log" for i in range(1, num_processes)}

    def start(i: int) -> None:
        """Starts follower `i`, for the first time or again, with caches as on hosts without a common file system."""
        own = EngineOptions(**given[i], compilation_cache_dir=str(cache / str(i // per_node)))
        place = dataclasses.replace(reached, process_id=i)
        script = "toy_supervisor" if supervised else "toy_cluster"
        followers[i] = start_follower(place, model_dir, own, logs[i], script, **more)

    try:
        for i in logs:
            start(i)
        settings = {
            "engine_factory": FACTORY,
            "engine": {**given[0], "compilation_cache_dir": str(cache / "0")},
            "cluster": dataclasses.asdict(leader),
            "options": {"max_request_restarts": 1000 if supervised else 0},
            "restarts": {"max_restarts": 1000},
        }
        with contextlib.ExitStack() as servers:

            def serve() -> Server:
                return servers.enter_context(serving.running(model_dir, ready=False, **settings))

            instance = Instance(serve(), followers, logs, leader, start, serve, relay)
            instance.wait_ready()
            yield instance
    finally:
        for process in followers.values():
            process.kill()
            process.wait()
        if relay is not None:
            relay.close()
