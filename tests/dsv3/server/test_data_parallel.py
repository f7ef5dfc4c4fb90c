"""Independent engines behind one server: who gets a request, and what becomes of it when its engine dies."""

import asyncio
import re
import threading

import httpx
import numpy as np
import pytest

from dsv3.config.options import EngineOptions
from dsv3.config.server_options import ServerOptions
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.listing import ListedRequest, RequestList
from dsv3.scheduler.request import EngineRequest, PreparedRequest, RequestRules, prepare
from dsv3.server.config import ServerConfig
from dsv3.server.engine import data_parallel, messages
from dsv3.server.engine.client import EngineBusy, EngineClient, EngineUnavailable
from dsv3.server.engine.data_parallel import DataParallelClient, device_environments
from dsv3.server.engine.in_flight import SAFE_TOKENS
from tests.dsv3.server import serving
from tests.dsv3.server.test_request_receiver import Wire
from tests.dsv3.server.test_resume import COMPLETIONS
from tests.dsv3.server.test_survival import Streams

RULES = RequestRules(vocab_size=9, max_model_len=2000, fingerprint="print", page_size=4, num_ranks=2)
INFO = messages.EngineInfo(RULES, max_num_seqs=8, num_pages=9)


@pytest.fixture
def run():
    """Runs a test's coroutine on an event loop."""
    return lambda work: asyncio.run(asyncio.wait_for(work, 60))


class Stream:
    """Keeps what the client of a sequence gets."""

    def __init__(self):
        self.pending, self.is_queued, self.error = [], False, None

    def on_outputs(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        self.error = error


class Played(EngineClient):
    """A client of an engine that a test plays."""

    def __init__(self):
        super().__init__(max_num_queued_reqs=2, max_restarts=3)
        self.wire = self._transport = Wire()

    def start(self) -> None:
        """The engine is ready, for the first time or anew."""
        self._transport = self.wire
        self._on_engine_info(INFO)

    def sent(self) -> list[PreparedRequest]:
        """The requests that the engine has got since the last call."""
        found = [messages.to_engine.decode(frame[4:]) for frame in self.wire.frames]
        self.wire.frames.clear()
        return [request for message in found if isinstance(message, messages.Add) for request in message.requests]


def engines(count: int) -> DataParallelClient:
    client = DataParallelClient([Played() for _ in range(count)], messages.FIRST_SENDER)
    for member in client.members:
        member.start()
    return client


def asked(client: DataParallelClient, prompt: list[int], rank: int | None = None, n: int = 1) -> PreparedRequest:
    ids, sampling = client.new_ids(n), SamplingParams(n=n, seed=1, max_tokens=900)
    return prepare(EngineRequest(request_id=ids, prompt_token_ids=prompt, sampling=sampling, rank=rank), RULES)


def submit(client: DataParallelClient, *args, **settings) -> list[int]:
    """Submits a request; returns how many requests each engine has got for it."""
    request = asked(client, *args, **settings)
    client.submit([request], [Stream() for _ in range(request.sampling.n)])
    return [len(member.sent()) for member in client.members]


def test_requests_go_where_load_is_least_and_pages_are(run):
    async def work() -> None:
        client = engines(2)
        assert (client.state, client.info.max_num_seqs, client.info.rules.num_ranks) == ("ready", 16, 2)
        first, second = submit(client, [1] * 400), submit(client, [2] * 400)
        assert sorted([first, second]) == [[0, 1], [1, 0]]
        assert submit(client, [2] * 400 + [3]) == second  # the same work everywhere, and its pages there
        assert submit(client, [1] * 400 + [3]) == first
        assert submit(client, [5], rank=1) == [0, 1] and submit(client, [5], rank=0) == [1, 0]
        assert sorted(submit(client, [7], n=5)) == [0, 1] and sorted(submit(client, [7], n=5)) == [0, 1]
        assert client.num_in_flight == 16 and client.capacity == 10
        with pytest.raises(EngineBusy):
            submit(client, [7], n=6)
        client.abort_all(EngineUnavailable("x"))
        assert client.num_in_flight == 0

    run(work())


def test_a_sequence_is_found_in_whichever_engine_has_it(run):
    """The list of requests names its client's request and tenant."""

    async def work() -> None:
        client, streams = engines(2), [Stream(), Stream()]
        requests = [asked(client, [5], rank=rank) for rank in range(2)]
        for request, stream in zip(requests, streams, strict=True):
            client.submit([request], [stream])
        assert [client.stream_of(request.request_id) for request in requests] == streams
        assert client.stream_of(999) is None

    run(work())


def test_the_list_of_requests_has_those_of_all_engines(run):
    async def work() -> None:
        client = engines(2)
        listing = asyncio.create_task(client.inspect("requests"))
        await asyncio.sleep(0)
        for i, member in enumerate(client.members):
            await asyncio.sleep(0)
            [asks] = [messages.to_engine.decode(frame[4:]) for frame in member.wire.frames]
            listed = [ListedRequest(5 + i, "decoding", "", 0, 1.0 + i, 1, 2, 1, {}, 0, 0)]
            member._on_reply(messages.EngineReply(asks.number, RequestList(listed, 7)))
        found = await listing
        assert ([each.request_id for each in found.requests], found.total) == ([6, 5], 14)

    run(work())


def test_sequences_of_a_dead_engine_resume_in_the_others_and_wait_where_there_is_none(run):
    async def work() -> None:
        client = engines(3)
        one, *others = client.members
        for i in range(4):
            assert submit(client, [1 + i], rank=0) == [1, 0, 0]
        one._on_step(messages.Outputs(*_columns([0, 1, 2, 3], [7, 7, 7, 7]), [], None))
        one.suspend("it has died")
        await asyncio.sleep(0)
        moved = [each.sent() for each in others]
        assert client.state == "ready" and [len(each) for each in moved] == [2, 2]
        assert all(each.num_answered == 1 and each.prompt[-1] == 7 for each in [*moved[0], *moved[1]])
        assert submit(client, [8], rank=0) in ([0, 1, 0], [0, 0, 1])
        for each in others:
            for request_id in list(each._in_flight.by_id):  # they get on: nothing speaks against them
                each._on_step(messages.Outputs(*_columns([request_id] * SAFE_TOKENS, [7] * SAFE_TOKENS), [], None))
            each.suspend("it has died, too")
        assert client.state == "restarting" and client.num_in_flight == 5
        assert submit(client, [3]) == [0, 0, 0]
        others[1].start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client.state == "ready" and len(others[1].sent()) == 6 and others[1].num_in_flight == 6
        one.fail("it has died six times")
        assert client.state == "ready"
        for each in others:
            each.fail("no engine is left")
        assert client.state == "failed" and client.ended.is_set() and client.num_in_flight == 0

    run(work())


def _columns(ids: list[int], tokens: list[int]) -> tuple[bytes, bytes, bytes]:
    return np.array(ids, "<i8").tobytes(), b"", np.array(tokens, "<i4").tobytes()


def test_an_engine_that_cannot_start_ends_the_server(run):
    async def work() -> None:
        client = DataParallelClient([Played(), Played()], messages.FIRST_SENDER)
        client.members[0].start()
        assert client.state == "ready" and not client.settled.is_set()
        client.members[1].fail("the engine could not start")
        assert (client.state, client.reason) == ("failed", "the engine could not start")

    run(work())


@pytest.mark.parametrize(
    ("engine", "options", "names"),
    [
        ({}, {}, "data_parallel_size"),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, {}, "enable_expert_parallel"),
        ({"data_parallel_size": 2}, {"enable_weight_updates": True}, "enable_weight_updates"),
        ({"data_parallel_size": 2, "kv_events_config": {"enable_kv_cache_events": True}}, {}, "kv_events_config"),
    ],
)
def test_what_spans_engines_is_refused_by_name(tmp_path, engine, options, names):
    with pytest.raises(ValueError, match=f"data_parallel_backend: mp .*--{names}"):
        ServerConfig(
            tmp_path, ("m",), ServerOptions(data_parallel_backend="mp", **options), engine=EngineOptions(**engine)
        )


def test_each_engine_has_devices_of_its_own(monkeypatch):
    monkeypatch.setattr(data_parallel, "visible_gpus", lambda: 0)
    assert device_environments(2, 1) == [None, None]
    monkeypatch.setattr(data_parallel, "visible_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in device_environments(2, 2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,3")
    monkeypatch.setattr(data_parallel, "visible_gpus", lambda: 3)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in device_environments(3, 1)] == ["GPU-a", "GPU-b", "3"]
    with pytest.raises(ValueError, match="3 engines need 6 GPUs, CUDA_VISIBLE_DEVICES=GPU-a,GPU-b,3 has 3"):
        device_environments(3, 2)


def up(server) -> dict[str, float]:
    """Which engines are ready, by their label."""
    text = server.http.get("/metrics").text
    return dict(re.findall(r'^dsv3:engine_up\{engine="(\d)",[^}]*\} (\S+)$', text, re.MULTILINE))


def test_a_killed_engine_costs_no_stream_and_no_health(model_dir):
    """Two API servers before two engines, one of which is killed under streams; then both of them."""
    settings = {
        "options": {"api_server_count": 2, "data_parallel_backend": "mp"},
        "engine": {"data_parallel_size": 2, "max_num_seqs": 16},
        "factory_options": {"step_s": 0.01, "start_s": 0.3},
    }
    bodies = [(COMPLETIONS, {"prompt": [5 + i, 6, 7, 8], "max_tokens": 60}, 1) for i in range(16)]
    with serving.running(model_dir, **settings) as server:
        server.wait_for(lambda: set(up(server).values()) == {"1.0"})
        undisturbed = Streams(server, bodies).wait()
        for both in (False, True):
            continued, statuses, done = server.metric("dsv3:continued_total"), set(), threading.Event()

            def watch(done=done, statuses=statuses) -> None:
                with httpx.Client(base_url=server.url) as http:
                    while not done.is_set():
                        statuses.add(http.get("/health").status_code)

            watching = threading.Thread(target=watch)
            watching.start()
            streams = Streams(server, bodies)
            server.wait_for(lambda: server.metric("vllm:num_requests_running") >= 12)
            for process in engine_processes(server)[: 1 + both]:
                process.kill()
            assert streams.wait() == undisturbed
            done.set()
            watching.join()
            assert both or statuses == {200}
            assert server.metric("dsv3:continued_total") > continued  # on a busy machine many have ended before
            server.wait_for(lambda: set(up(server).values()) == {"1.0"})
        assert server.metric("dsv3:engine_restarts_total") == 3
        assert server.http.get("/v1/models").json()["data"][0]["data_parallel_size"] == 2


def engine_processes(server) -> list:
    return [p for p in serving.psutil.Process(server.process.pid).children() if "engine.process" in str(p.cmdline())]
