"""Two API servers on one port with one engine: clients and operators see one server."""

import contextlib
import itertools
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from dsv3.config.options import ClusterOptions
from dsv3.processes import frames
from dsv3.server.config import ServerConfig
from dsv3.server.http import messages
from dsv3.server.http.api_server_child import make_config
from dsv3.server.http.api_server_processes import start_message
from tests.dsv3.server import serving

COMPLETIONS = "/v1/completions"
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 2000}


def running(model_dir, **settings):
    options = settings.pop("options", {})
    return serving.running(model_dir, options={"api_server_count": 2} | options, **settings)


def test_all_api_servers_wait_for_a_silent_engine_as_long() -> None:
    """They take the limit of an instance of several processes: one that waits less would have the engine killed."""
    fields = {"coordinator": "localhost:1", "num_processes": 2, "process_id": 0, "cluster_key_file": "key"}
    cluster = ClusterOptions(**fields, cluster_silence_timeout=90.0)
    config = ServerConfig(Path("m"), ("m",), cluster=cluster)
    frame = frames.encode(start_message(config, 1, created=0))
    start = messages.to_api_server.decode(frame[frames.HEAD_BYTES :])
    assert make_config(start).heartbeat_watchdog_s == config.heartbeat_watchdog_s == 90.0


class Pair:
    """Both API servers of a server, with one client connected to each."""

    def __init__(self, server):
        self.server = server
        server.wait_for(lambda: self._is_listening() is not None)
        self.first, self.other = psutil.Process(server.process.pid), self._is_listening()
        self._stack = contextlib.ExitStack()
        self.http = {process.pid: self.connect(process) for process in (self.first, self.other)}

    def _is_listening(self):
        """The process of API server 1, once it accepts connections."""
        children = psutil.Process(self.server.process.pid).children()
        found = [child for child in children if "dsv3.server.http.api_server_child" in serving.command_of(child)]
        for child in found:
            if any(connection.status == psutil.CONN_LISTEN for connection in child.net_connections("tcp")):
                return child
        return None

    def connect(self, process) -> httpx.Client:
        """Returns a client of that API server: connects until it is the one that accepts."""
        for _ in range(1000):
            limits = httpx.Limits(
                keepalive_expiry=600
            )  # httpx's 5 s pass on a busy machine; then another API server accepts
            client = httpx.Client(base_url=self.server.url, timeout=60, limits=limits)
            answer = client.get("/health")
            stream = answer.extensions["network_stream"]
            client.connection = stream.get_extra_info("socket")
            port = stream.get_extra_info("client_addr")[1]
            if any(c.raddr and c.raddr.port == port for c in process.net_connections("tcp")):
                self._stack.callback(client.close)
                return client
            client.close()
        raise AssertionError("that API server accepts no connections")

    def both(self, path):
        return [client.get(path) for client in self.http.values()]

    def close(self):
        self._stack.close()


@contextlib.contextmanager
def pair_of(model_dir, **settings):
    with running(model_dir, **settings) as server:
        pair = Pair(server)
        try:
            yield pair
        finally:
            pair.close()


@pytest.fixture(scope="module")
def pair(model_dir, tmp_path_factory):
    """Two sequences run and three wait, from both API servers together; only the last test damages the server."""
    engine = {"max_num_seqs": 2, "max_num_queued_reqs": 3}
    options = {"profile_dir": str(tmp_path_factory.mktemp("profiles"))}
    with pair_of(model_dir, engine=engine, factory_options={"step_s": 0.005}, options=options) as found:
        yield found


class Asking:
    """A request in its own thread, on its own connection to one API server."""

    def __init__(self, pair, process, body):
        self.client = pair.connect(process)
        self.answer = None
        self._body = body
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self):
        try:
            self.answer = self.client.post(COMPLETIONS, json=self._body)
        except httpx.HTTPError as error:
            self.answer = error

    def hang_up(self):
        """Closes the connection, from which the thread may be reading."""
        self.client.connection.shutdown(socket.SHUT_RDWR)
        self.wait()

    def wait(self):
        self._thread.join(60)
        assert not self._thread.is_alive(), "a client hangs"
        return self.answer


def value(text, name):
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.split("{")[0] == name)


def test_metrics_of_each_api_server_include_both(pair):
    def totals(name):
        return {value(answer.text, name) for answer in pair.both("/metrics")}

    [before] = totals("vllm:generation_tokens_total")
    for client in pair.http.values():
        client.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 7}).raise_for_status()
    pair.server.wait_for(lambda: totals("vllm:generation_tokens_total") == {before + 14})
    for name in ("vllm:num_requests_running", "dsv3:engine_steps_total", "vllm:e2e_request_latency_seconds_count"):
        pair.server.wait_for(lambda name=name: len(totals(name)) == 1)
    assert len({answer.text for answer in pair.both("/v1/models")}) == 1


def test_the_dashboard_shows_both_api_servers_and_profiles_belong_to_the_engine(pair):
    """One API server starts the profile and the other stops it; both show the counts of both."""

    def stopped(client):
        answer = client.post("/stop_profile")
        return answer.status_code, answer.json().get("steps", 0)

    for starts, stops in itertools.permutations(pair.http.values()):
        starts.post("/start_profile").raise_for_status()
        starts.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 40}).raise_for_status()
        status, steps = stopped(stops)
        assert status == 200 and steps >= 40 and stopped(starts)[0] == 409

    def rates():
        curves = [a.json()["series"]["generation_tokens_per_second"] for a in pair.both("/dashboard/data")]
        return [max((value or 0 for value in curve), default=0) for curve in curves]

    pair.server.wait_for(lambda: min(rates()) > 0)


def test_the_queue_limit_holds_over_both_api_servers(pair):
    asking = [Asking(pair, pair.first, ENDLESS) for _ in range(3)] + [Asking(pair, pair.other, ENDLESS)]
    try:
        pair.server.wait_for(lambda: pair.server.metric("vllm:num_requests_waiting") == 2)
        assert [answer.status_code for answer in pair.both("/ready")] == [200, 200]
        asking.append(Asking(pair, pair.other, ENDLESS))
        pair.server.wait_for(lambda: [answer.status_code for answer in pair.both("/ready")] == [503, 503])
        assert [answer.status_code for answer in pair.both("/health")] == [200, 200]
        for client in pair.http.values():
            refused = client.post(COMPLETIONS, json=ENDLESS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
            assert int(refused.headers["retry-after"]) > 0
    finally:
        for each in asking:
            each.hang_up()
    pair.server.wait_for(pair.server.is_idle)


def test_an_api_server_that_stops_reading_delays_only_its_own_streams(pair):
    """It receives all buffered outputs when it continues."""
    slow = Asking(pair, pair.other, {"prompt": [5, 6, 7], "max_tokens": 300, "return_token_ids": True})
    pair.server.wait_for(lambda: pair.server.metric("vllm:num_requests_running") == 1)
    os.kill(pair.other.pid, signal.SIGSTOP)
    try:
        answer = pair.http[pair.first.pid].post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 5})
        assert answer.status_code == 200
        first = pair.http[pair.first.pid]
        pair.server.wait_for(lambda: value(first.get("/metrics").text, "vllm:num_requests_running") == 0)
    finally:
        os.kill(pair.other.pid, signal.SIGCONT)
    assert slow.wait().json()["choices"][0]["token_ids"] == [5, 6, 7] * 100


def test_an_api_server_that_dies_is_replaced(pair):
    """Its requests are aborted, those of the other API server continue."""
    lost = Asking(pair, pair.other, ENDLESS)
    kept = Asking(pair, pair.first, {"prompt": [5, 6, 7], "max_tokens": 300, "return_token_ids": True})
    pair.server.wait_for(lambda: pair.server.metric("vllm:num_requests_running") == 2)
    pair.other.kill()
    assert isinstance(lost.wait(), httpx.HTTPError)
    assert kept.wait().json()["choices"][0]["token_ids"] == [5, 6, 7] * 100
    first = pair.http[pair.first.pid]
    pair.server.wait_for(lambda: value(first.get("/metrics").text, "vllm:num_requests_running") == 0)
    again = Pair(pair.server)
    try:
        assert again.other.pid != pair.other.pid
        answer = again.http[again.other.pid].post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 5})
        assert answer.status_code == 200
    finally:
        again.close()


def test_sigterm_to_api_server_0_drains_both(model_dir):
    settings = {"factory_options": {"step_s": 0.01}, "options": {"shutdown_timeout": 60.0}}
    with pair_of(model_dir, **settings) as pair:
        children = pair.first.children(recursive=True)
        body = ENDLESS | {"max_tokens": 250}
        asking = [Asking(pair, process, body) for process in (pair.first, pair.other)]
        pair.server.wait_for(lambda: pair.server.metric("vllm:num_requests_running") == 2)
        pair.server.process.send_signal(signal.SIGTERM)
        pair.server.wait_for(lambda: {answer.status_code for answer in pair.both("/health")} == {503})
        assert [answer.json()["status"] for answer in pair.both("/health")] == ["draining"] * 2
        assert [client.post(COMPLETIONS, json=body).status_code for client in pair.http.values()] == [503, 503]
        answers = [each.wait() for each in asking]
        assert [answer.json()["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 2
        assert pair.server.process.wait(30) == 0
        _, alive = psutil.wait_procs(children, 10)
        assert not alive


def test_a_second_signal_aborts_the_requests_of_both(model_dir):
    settings = {"factory_options": {"step_s": 0.05}, "options": {"shutdown_timeout": 600.0}}
    with pair_of(model_dir, **settings) as pair:
        asking = [Asking(pair, process, ENDLESS) for process in (pair.first, pair.other)]
        pair.server.wait_for(lambda: pair.server.metric("vllm:num_requests_running") == 2)
        pair.server.process.send_signal(signal.SIGTERM)
        pair.server.wait_for(lambda: {answer.status_code for answer in pair.both("/health")} == {503})
        pair.server.process.send_signal(signal.SIGTERM)
        for each in asking:
            assert "the server is shutting down" in each.wait().text
        assert pair.server.process.wait(30) == 0


@pytest.mark.parametrize("trouble", ["kill", "hang"])
def test_the_death_of_the_engine_fails_the_requests_of_both(model_dir, trouble):
    """The API server with the waiting requests, here number 1, notices that the engine hangs."""
    settings = {"factory_options": {"step_s": 0.01}, "failure_linger_s": 2.0, "watchdog_s": 2.0}
    with pair_of(model_dir, **settings, options={"max_request_restarts": 0}) as pair:
        processes = (pair.other,) if trouble == "hang" else (pair.first, pair.other)
        asking = [Asking(pair, process, ENDLESS) for process in processes]
        pair.server.wait_for(lambda: pair.server.metric("vllm:num_requests_running") == len(processes))
        engine = pair.server.engine_process()
        engine.send_signal(signal.SIGKILL if trouble == "kill" else signal.SIGSTOP)
        for each in asking:
            answer = each.wait()
            assert answer.status_code == 503 and "engine" in answer.text
        pair.server.wait_for(lambda: {answer.status_code for answer in pair.both("/health")} == {503})
        # An API server may see the death of the killed engine before the report that it hung.
        reasons = ("has died",) if trouble == "kill" else ("has not answered for 2 s", "has died")
        assert all(
            answer.text.endswith(tuple(f'the engine {why}"}}' for why in reasons)) for answer in pair.both("/health")
        )
        assert pair.server.process.wait(30) == 1


def test_killing_api_server_0_ends_the_others(model_dir):
    with pair_of(model_dir, factory_options={"step_s": 0.01}) as pair:
        children = pair.first.children(recursive=True)
        os.kill(pair.first.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, 10)
        assert not alive
