"""Start, disconnects, failure of the engine, draining and stopping."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
import uvloop

from dsv3.server.config import ServerConfig
from dsv3.server.engine.client import EngineClient
from dsv3.server.http.api_server import bind
from dsv3.server.http.serving import serving as serving_http
from dsv3.server.serving.service import Service
from dsv3.text.tokenizer import Tokenizer
from tests.dsv3.server import fake_engine, serving

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 2000}


class Requests:
    """Requests in their own threads."""

    def __init__(self, server):
        self._url = server.url
        self._threads = []
        self.answers = []

    def send(self, body, count=1):
        for _ in range(count):
            thread = threading.Thread(target=self._post, args=(body,))
            thread.start()
            self._threads.append(thread)

    def _post(self, body):
        try:
            self.answers.append(httpx.post(self._url + COMPLETIONS, json=body, timeout=60))
        except httpx.HTTPError as error:
            self.answers.append(error)

    def wait(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"
        return self.answers


@contextlib.contextmanager
def held(server, body, count=1):
    """Requests whose clients only wait, and disconnect at the end of the block."""
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
        yield


def test_health_reports_that_the_server_is_starting(model_dir):
    with serving.running(model_dir, ready=False, factory_options={"start_s": 1.0}) as server:
        server.wait_for(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/health").json()["status"] == "starting"
        answer = server.http.post(COMPLETIONS, json=ENDLESS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "starting")
        assert "retry-after" in answer.headers
        server.wait_ready()
        assert server.stop() == 0
        output = server.process.stdout.read()
        assert "[1/3] compiling program 0" in output
        assert "ready" in output
        assert "imported neither jax nor opentelemetry" in output


def test_a_failing_start_ends_the_process_with_the_reason(model_dir):
    options = {"factory_options": {"fail": "config.json: vocab_size is missing"}}
    with serving.running(model_dir, ready=False, **options) as server:
        assert server.process.wait(30) == 1
        assert "config.json: vocab_size is missing" in server.log.read_text()
        assert "Traceback" not in server.log.read_text()


def test_a_full_queue_returns_503_at_once(slow_server):
    with held(slow_server, ENDLESS, 5):
        slow_server.wait_for(lambda: slow_server.metric("vllm:num_requests_waiting") == 3)
        assert slow_server.http.get("/ready").status_code == 503
        assert slow_server.http.get("/health").status_code == 200
        before = slow_server.metric("vllm:admission_rejections_total")
        refused = slow_server.http.post(COMPLETIONS, json=ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) > 0
        assert slow_server.metric("vllm:admission_rejections_total") == before + 1
    slow_server.wait_for(slow_server.is_idle)
    assert slow_server.http.get("/ready").status_code == 200


def test_n_counts_against_the_queue_before_anything_is_copied(slow_server):
    for body in ({"prompt": [5], "n": 6}, {"prompt": [[5], [6]], "n": 3}, {"prompt": [[5]] * 1024, "n": 128}):
        answer = slow_server.http.post(COMPLETIONS, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert slow_server.http.post(COMPLETIONS, json={"prompt": [5], "n": 5, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_everything(server, stream):
    """Long before the requests would have finished."""

    def aborted():
        lines = server.http.get("/metrics").text.splitlines()
        [line] = [x for x in lines if x.startswith('vllm:request_success_total{finished_reason="abort"')]
        return float(line.rpartition(" ")[2])

    before = aborted()
    with held(server, ENDLESS | {"stream": stream, "n": 8}):
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 8)
    server.wait_for(server.is_idle)
    assert aborted() == before + 8


def test_a_disconnect_while_waiting_frees_the_queue(slow_server):
    with held(slow_server, ENDLESS, 2):
        slow_server.wait_for(lambda: slow_server.metric("vllm:num_requests_running") == 2)
        with held(slow_server, ENDLESS):
            slow_server.wait_for(lambda: slow_server.metric("vllm:num_requests_waiting") == 1)
        slow_server.wait_for(lambda: slow_server.metric("vllm:num_requests_waiting") == 0)
        assert slow_server.metric("vllm:num_requests_running") == 2
    slow_server.wait_for(slow_server.is_idle)


def test_clients_that_never_read_delay_no_other(server):
    """Streams fill the socket buffers; another request completes meanwhile, and a disconnect frees the engine."""
    with held(server, ENDLESS | {"stream": True}, 30):
        answer = server.http.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 5})
        assert answer.status_code == 200
    server.wait_for(server.is_idle)


def test_a_slow_reader_gets_everything(server, model_dir):
    """It reads nothing while its tokens are generated, more than the connection buffers."""
    n, max_tokens = 24, 1900
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.port))
        data = json.dumps(ENDLESS | {"n": n, "max_tokens": max_tokens, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == n)
        server.wait_for(server.is_idle)
        received = b"".join(iter(lambda: connection.recv(2**20), b""))
    *events, done, _ = received.partition(b"\r\n\r\n")[2].decode().split("\n\n")
    assert done == "data: [DONE]"
    texts = [""] * n
    for event in events:
        [choice] = json.loads(event.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    ids = [ENDLESS["prompt"][i % 3] for i in range(max_tokens)]
    assert texts == [Tokenizer.from_directory(model_dir).decode(ids)] * n
    assert len(events) < n * max_tokens  # tokens that had to wait came together


@pytest.mark.parametrize("trouble", ["kill", fake_engine.CRASH_STEP])
def test_the_death_of_the_engine_fails_all_requests(model_dir, trouble):
    """Without restarts; `test_survival` has the servers that restart their engine."""
    settings = {"factory_options": {"step_s": 0.01}, "failure_linger_s": 1.0, "options": {"max_request_restarts": 0}}
    with serving.running(model_dir, **settings) as server:
        requests = Requests(server)
        requests.send(ENDLESS, 2)
        requests.send(ENDLESS | {"stream": True}, 2)
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 4)
        if trouble == "kill":
            server.engine_process().kill()
        else:
            requests.send({"prompt": [trouble]})
        server.wait_for(lambda: server.http.get("/health").status_code == 503)
        health = server.http.get("/health").json()
        assert health["status"] == "failed"
        refused = server.http.post(COMPLETIONS, json=ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "failed")
        for answer in requests.wait():
            assert "engine" in answer.text
            assert answer.status_code == 503 or answer.text.rstrip().endswith("data: [DONE]")
            assert "secret" not in answer.text
        assert server.process.wait(30) == 1


def test_sigterm_drains(model_dir):
    with serving.running(model_dir, factory_options={"step_s": 0.01}, options={"shutdown_timeout": 60.0}) as server:
        requests = Requests(server)
        requests.send(ENDLESS | {"max_tokens": 250}, 2)
        requests.send(ENDLESS | {"max_tokens": 250, "stream": True}, 2)
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 4)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/health").json()["status"] == "draining"
        assert server.http.get("/ready").status_code == 503
        assert server.http.post(COMPLETIONS, json=ENDLESS).status_code == 503
        answers = requests.wait()
        assert [a.status_code for a in answers] == [200] * 4
        assert all('"finish_reason":"length"' in a.text for a in answers)
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("api_servers", [1, 2])
def test_requests_are_accepted_in_the_grace_period_after_sigterm(model_dir, api_servers):
    """`/health` fails at once, for routers; requests are served during the grace period and rejected after it."""
    options = {"shutdown_grace": 600.0, "shutdown_timeout": 600.0, "api_server_count": api_servers}
    with serving.running(model_dir, options=options, factory_options={"step_s": 0.01}) as server:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: all(server.http.get("/health").status_code == 503 for _ in range(5 * api_servers)))
        assert server.http.get("/ready").status_code == 503
        for _ in range(5):
            answer = server.http.post(COMPLETIONS, json=ENDLESS | {"max_tokens": 3})
            assert answer.status_code == 200, answer.text
        requests = Requests(server)
        requests.send(ENDLESS)
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)  # ends the grace period and the wait for those in flight
        assert "the server is shutting down" in requests.wait()[0].text
        assert server.process.wait(60) == 0


def test_requests_are_rejected_after_the_grace_period(model_dir):
    options = {"shutdown_grace": 0.2, "shutdown_timeout": 600.0}
    with serving.running(model_dir, options=options, factory_options={"step_s": 0.05}) as server:
        requests = Requests(server)
        requests.send(ENDLESS | {"max_tokens": 250})
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: server.http.post(COMPLETIONS, json=ENDLESS | {"max_tokens": 1}).status_code == 503)
        assert requests.wait()[0].status_code == 200
        assert server.process.wait(60) == 0


@pytest.mark.parametrize("second_signal", [signal.SIGTERM, signal.SIGINT, None])
def test_draining_ends_with_the_timeout_or_a_second_signal(model_dir, second_signal):
    timeout = 0.3 if second_signal is None else 600.0
    with serving.running(model_dir, factory_options={"step_s": 0.05}, options={"shutdown_timeout": timeout}) as server:
        requests = Requests(server)
        requests.send(ENDLESS)
        requests.send(ENDLESS | {"stream": True})
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 2)
        server.process.send_signal(signal.SIGTERM)
        if second_signal is not None:
            server.wait_for(lambda: server.http.get("/health").status_code == 503)
            server.process.send_signal(second_signal)
        for answer in requests.wait():
            assert "the server is shutting down" in answer.text
        assert server.process.wait(30) == 0


def test_an_idle_server_stops_at_once_with_its_processes(model_dir):
    with serving.running(model_dir, options={"shutdown_timeout": 600.0}) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == 2  # the engine and a template worker
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        _, alive = psutil.wait_procs(children, 10)
        assert not alive


def test_killing_api_server_0_ends_the_engine(model_dir):
    with serving.running(model_dir, factory_options={"step_s": 0.01}) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        Requests(server).send(ENDLESS)
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 1)
        os.kill(server.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, 10)
        assert not alive


def test_the_engine_process_ignores_signals(model_dir):
    """Process managers signal whole groups, but draining needs the engine."""
    with serving.running(model_dir, factory_options={"step_s": 0.01}) as server:
        requests = Requests(server)
        requests.send(ENDLESS | {"max_tokens": 50})
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 1)
        for number in (signal.SIGTERM, signal.SIGINT):
            server.engine_process().send_signal(number)
        [answer] = requests.wait()
        assert answer.status_code == 200


def test_soak_with_disconnects(server):
    """300 streams, every fifth of which disconnects: nothing is left, and memory does not grow."""
    engine, http = server.engine_process(), psutil.Process(server.process.pid)

    async def one(client, i):
        body = {"prompt": [5, 6, 7], "max_tokens": 40, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            async for _ in answer.aiter_lines():
                if i % 5 == 0:
                    break

    async def rounds(count):
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for _ in range(count):
                await asyncio.gather(*(one(client, i) for i in range(50)))

    asyncio.run(rounds(2))
    before = [p.memory_info().rss for p in (engine, http)]
    asyncio.run(rounds(4))
    server.wait_for(server.is_idle)
    after = [p.memory_info().rss for p in (engine, http)]
    assert max(a - b for a, b in zip(after, before, strict=True)) < 10 * 2**20


def test_an_api_server_that_stops_reading_does_not_stall_the_engine(server):
    """After a stop it receives all buffered outputs."""
    requests = Requests(server)
    requests.send({"prompt": [5, 6, 7], "max_tokens": 1800, "return_token_ids": True, "n": 8})
    server.wait_for(lambda: server.metric("vllm:num_requests_running") == 8)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        _wait_until_asleep(server.engine_process())  # it finishes all the requests meanwhile
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    [answer] = requests.wait()
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == [[5, 6, 7] * 600] * 8


def _wait_until_asleep(process, seconds=60):
    """Waits until a process sleeps for long, which an engine that steps does not."""
    deadline = time.monotonic() + seconds
    before = None
    while (now := process.num_ctx_switches().voluntary) != before:
        assert time.monotonic() < deadline
        before = now
        time.sleep(0.3)


def test_jax_logs_in_lines():
    """A GPU plugin that cannot start is logged once, in one line, without traceback."""
    code = (
        "import logging; from dsv3.logs import configure_logging; configure_logging()\n"
        "import jax\n"
        "log = logging.getLogger('jax._src.xla_bridge')\n"
        "try:\n    raise RuntimeError('no cuDNN')\n"
        "except RuntimeError:\n    log.exception('plugin error %s', 5)\n"
        "log.info('not shown')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=serving.ROOT, env=environment, check=True
    )
    [line] = done.stderr.splitlines()
    assert "plugin error 5: no cuDNN" in line


def test_collections_pass_over_what_a_server_starts_with():
    """A full collection stops all streams, and most of what it would look at are modules."""
    config, before = ServerConfig(Path(), ("m",)), [object()]

    def is_collected():
        return any(each is before for each in gc.get_objects())

    async def run():
        assert is_collected()
        service = Service(config, EngineClient(max_num_queued_reqs=1))
        async with serving_http(service, config, bind("127.0.0.1", 0)):
            assert not is_collected()
        assert is_collected()

    uvloop.run(run())
