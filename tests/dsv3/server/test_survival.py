"""Restarts of the engine: every stream resumes with the text that it would have had."""

import asyncio
import contextlib
import dataclasses
import errno
import os
import signal
import threading
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest

from dsv3.config.options import EngineOptions
from dsv3.processes.child import RestartPolicy
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.messages import Start
from dsv3.server.engine.supervisor import EngineSupervisor
from dsv3.server.http.api_server import _announce
from tests.dsv3.engine.cluster import local
from tests.dsv3.server import fake_engine, serving
from tests.dsv3.server.test_resume import BODIES, COMPLETIONS, Collected, collect, events
from tests.dsv3.text.dialects import write

CLIENTS = 32
LONG = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 60}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two API servers; 24 sequences run and 40 wait; a step takes 10 ms, a start half a second."""
    settings = {
        "options": {"api_server_count": 2},
        "engine": {"max_num_seqs": 24, "max_num_queued_reqs": 40},
        "factory_options": {"step_s": 0.01, "start_s": 0.5},
        "restarts": {"max_restarts": 1000},
        "watchdog_s": 2.0,
    }
    with serving.running(write(tmp_path_factory.mktemp("survival")), **settings) as server:
        yield server


class Streams:
    """Streams in their own threads."""

    def __init__(self, server, bodies):
        self.found: dict[int, Collected | BaseException] = {}
        self._server, self._bodies = server, bodies
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(len(bodies))]
        for thread in self._threads:
            thread.start()

    def _ask(self, i):
        path, body, count = self._bodies[i]
        try:
            self.found[i] = collect(events(self._server, path, body), count)
        except BaseException as error:
            self.found[i] = error

    def wait(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"
        for found in self.found.values():
            if isinstance(found, BaseException):
                raise found
        return [self.found[i].state() for i in range(len(self._bodies))]


@pytest.fixture(scope="module")
def asked(server):
    """All kinds of streams, with their undisturbed results."""
    kinds = [(path, body, 4 if "n" in body else 1) for path, body in BODIES.values()]
    kinds += [(COMPLETIONS, LONG | {"prompt": [5 + i, 6, 7, 8], "n": 1 + i % 2}, 1 + i % 2) for i in range(4)]
    bodies = (kinds * 3)[:CLIENTS]
    return bodies, Streams(server, bodies).wait()


def engine_of(server) -> psutil.Process | None:
    with contextlib.suppress(ValueError, psutil.NoSuchProcess):
        return server.engine_process()
    return None


def kill(server) -> None:
    server.engine_process().kill()


def stop(server) -> None:
    server.engine_process().send_signal(signal.SIGSTOP)


def kill_twice(server) -> None:
    """Kills the engine, and again while it restarts."""
    first = server.engine_process()
    first.kill()
    server.wait_for(lambda: (found := engine_of(server)) is not None and found.pid != first.pid)
    time.sleep(0.3)
    kill(server)


@pytest.mark.parametrize(
    ("seconds", "end"), [(0.0, kill), (0.15, kill), (0.4, kill), (0.2, kill_twice), (0.2, stop)],
    ids=["at the start", "early", "late", "during a restart", "stopped"],
)  # fmt: skip
def test_every_stream_resumes_after_the_engine_dies(server, asked, seconds, end):
    """Some of them run and some wait. On a busy machine all may have ended before the kill: then it retries."""
    bodies, undisturbed = asked
    for _ in range(5):
        before = server.metric("dsv3:engine_restarts_total"), server.metric("dsv3:continued_total")
        streams = Streams(server, bodies)
        server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0)
        time.sleep(seconds)
        end(server)
        assert streams.wait() == undisturbed
        server.wait_for(server.is_idle)
        assert server.metric("dsv3:engine_restarts_total") == before[0] + (2 if end is kill_twice else 1)
        if server.metric("dsv3:continued_total") > before[1]:
            return
    pytest.fail("no stream was there to go on, five times")


def test_health_reports_the_restart_and_new_requests_wait(server):
    """The server defers as many as its queue would hold; others get 503."""
    long = {"prompt": [5, 6, 7], "n": 50, "max_tokens": 30}
    answers: list[httpx.Response] = []

    def ask():
        answers.append(server.http.post(COMPLETIONS, json=long, timeout=60))

    kill(server)
    server.wait_for(lambda: server.http.get("/health").status_code == 503)
    health = server.http.get("/health").json()
    assert health["status"] == "restarting" and "being restarted" in health["reason"]
    assert server.http.get("/ready").status_code == 503
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(served) + len(refused) == 3 and served and refused
    assert all(len(answer.json()["choices"]) == 50 for answer in served)
    assert all(answer.json()["error"]["code"] == "queue_full" for answer in refused)
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    server.wait_ready()


@pytest.mark.parametrize("trouble", [fake_engine.CRASH_STEP, fake_engine.HANG])
def test_a_request_that_crashes_engines_fails_alone(server, asked, trouble):
    bodies, undisturbed = asked
    before = server.metric("dsv3:given_up_total"), server.metric("dsv3:engine_restarts_total")
    streams = Streams(server, bodies)
    server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0)
    answer = server.http.post(COMPLETIONS, json={"prompt": [5, trouble]}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "engine_died")
    assert "the engine has died 3 times with this request" in error["message"]
    assert streams.wait() == undisturbed
    assert server.metric("dsv3:given_up_total") == before[0] + 1
    assert server.metric("dsv3:engine_restarts_total") == before[1] + 3
    server.wait_for(server.is_idle)


def test_a_disconnect_during_a_restart_frees_everything(server):
    kill(server)
    with contextlib.suppress(httpx.ReadTimeout), server.http.stream("POST", COMPLETIONS, json=LONG, timeout=0.2):
        pass
    server.wait_ready()
    server.wait_for(server.is_idle)


def test_an_api_server_that_dies_during_a_restart_is_replaced(server):
    api_servers = [
        p for p in psutil.Process(server.process.pid).children() if "dsv3.server.http.api_server_child" in p.cmdline()
    ]
    kill(server)
    for api_server in api_servers:
        api_server.kill()
    assert not psutil.wait_procs(api_servers, 30)[1]
    server.wait_for(lambda: engine_of(server) is not None)
    body = LONG | {"return_token_ids": True}  # by new connections: old ones may lead to an API server that has ended
    answers = [httpx.post(server.url + COMPLETIONS, json=body, timeout=60) for _ in range(4)]
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == [LONG["prompt"] * 12] * 4
    server.wait_ready()


def test_a_new_api_server_accepts_connections_once_it_has_an_engine(server):
    """It starts while the engine is stopped: the first API server gets all connections until that is restarted."""
    [api_server] = [
        p for p in psutil.Process(server.process.pid).children() if "dsv3.server.http.api_server_child" in p.cmdline()
    ]
    stop(server)
    api_server.kill()
    found = []

    def ask():
        found.append(httpx.post(server.url + COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 1}, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(30)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in found] == [200] * len(threads)
    server.wait_ready()


def test_repeated_engine_deaths_end_the_server(model_dir):
    with serving.running(model_dir, restarts={"max_restarts": 1}, failure_linger_s=0.5) as server:
        first = server.engine_process()
        first.kill()
        server.wait_for(lambda: (found := engine_of(server)) is not None and found.pid != first.pid)
        server.wait_ready()
        kill(server)
        assert server.process.wait(30) == 1
        log = server.log.read_text()
        assert "the engine has died 2 times within 600 s and is not restarted" in log


def test_a_restart_that_times_out_counts_as_a_death(model_dir):
    """The new engine process is stopped while it starts."""
    policy = {"max_restarts": 1, "min_start_s": 0.5, "start_factor": 0.0}
    with serving.running(model_dir, restarts=policy, failure_linger_s=0.1, factory_options={"start_s": 1.0}) as server:
        kill(server)
        assert server.process.wait(30) == 1
        assert "not ready after" in server.log.read_text()


def test_the_server_drains_while_its_engine_restarts(model_dir):
    with serving.running(model_dir, factory_options={"step_s": 0.01, "start_s": 0.5}) as server:
        stream = Streams(server, [(COMPLETIONS, LONG, 1)])
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 1)
        kill(server)
        server.wait_for(lambda: server.http.get("/health").json()["status"] == "restarting")
        os.kill(server.process.pid, signal.SIGTERM)
        assert stream.wait()[0]["ids"] == [LONG["prompt"] * 12]
        assert server.process.wait(30) == 0


def test_a_spare_process_replaces_an_engine_of_several_processes(model_dir, tmp_path):
    cluster = dataclasses.asdict(local.options(tmp_path, 2))
    with serving.running(model_dir, cluster=cluster) as server:
        first = server.engine_process()

        def others():
            engines = (
                p for p in psutil.Process(server.process.pid).children() if "dsv3.engine.build" in serving.command_of(p)
            )
            return [each.pid for each in engines if each != first]

        server.wait_for(others)
        [spare] = others()
        first.kill()
        server.wait_for(lambda: (found := engine_of(server)) is not None and found.pid != first.pid)
        server.wait_ready()
        assert server.engine_process().pid == spare


def test_an_engine_outlives_a_spare_process_that_cannot_be_started(monkeypatch, caplog):
    """The client calls `on_ready` while it reads a frame, where an error would end the connection to the engine."""

    def launch(self, imports=()):
        if imports:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(EngineSupervisor, "_launch", launch)
    start = Start("module:function", "model", EngineOptions(), SimpleNamespace(cluster_spare=True))
    engine = EngineClient(max_num_queued_reqs=1)
    EngineSupervisor(engine, start, RestartPolicy())
    engine.on_ready()
    assert "no spare process" in caplog.text


@pytest.mark.parametrize(("state", "count"), [("ready", 2), ("restarting", 2), ("failed", 0)])
def test_a_server_registers_though_its_engine_dies_before_the_last_api_server_is_up(state, count):
    announced = []

    async def announce() -> None:
        settled = asyncio.Event()
        settled.set()
        service = SimpleNamespace(engine=SimpleNamespace(settled=settled, state=state))
        registrar = SimpleNamespace(start=lambda: announced.append("routers"))
        await _announce(service, SimpleNamespace(ready=lambda: asyncio.sleep(0)), registrar, announced.append)

    asyncio.run(announce())
    assert len(announced) == count
