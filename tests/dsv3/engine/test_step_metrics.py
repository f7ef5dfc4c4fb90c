"""An engine's step metrics add up to what it has computed; on the wire they are Dynamo's `ForwardPassMetrics`.

Version 1: names, frames, numbers and idle messages.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from dsv3.config.publishing import StepMetricsConfig
from dsv3.engine import step_metrics as publisher
from dsv3.engine.engine import Engine
from dsv3.engine.step_metrics import (
    QueueMetrics,
    Scheduled,
    StepMetrics,
    StepMetricsRecorder,
    StepPublisher,
    encode,
    moments,
)
from tests.dsv3.engine.driving import drain, request, run

MakeEngine = Callable[..., Engine]
PROMPTS = {"num_prefill_requests": 0, "sum_prefill_tokens": 0, "var_prefill_length": 0.0}
ANSWERS = {"num_decode_requests": 0, "sum_decode_kv_tokens": 0, "var_decode_kv_tokens": 0.0}
NOTHING = {"version": 1, "worker_id": "", "dp_rank": 0, "counter_id": 0, "wall_time": 0.0} | {
    "scheduled_requests": PROMPTS | {"sum_prefill_kv_tokens": 0} | ANSWERS,
    "queued_requests": PROMPTS | ANSWERS,
}


def record_steps(engine: Engine) -> list[list[StepMetrics]]:
    """Records the step metrics of an engine; returns the list that they are added to."""

    class Sink(list):
        publish = list.append

    sink = Sink()
    engine._step_metrics = StepMetricsRecorder(engine.scheduler, sink, "w")
    return sink


def test_moments_are_those_of_each_rank():
    random = np.random.default_rng(0)
    ranks, values = random.integers(0, 3, 50), random.integers(0, 160_000, 50)
    found = moments(ranks, values, 4)
    for rank in range(3):
        mine = values[ranks == rank]
        assert (found.number[rank], found.total[rank]) == (len(mine), mine.sum())
        np.testing.assert_allclose(found.variance[rank], mine.var())
    assert (found.number[3], found.total[3], found.variance[3]) == (0, 0, 0.0)


def test_one_request_step_by_step(engine: Engine):
    steps = record_steps(engine)
    run(engine, request("a", [1] * 150, max_tokens=4, ignore_eos=True))
    scheduled = [each.scheduled_requests for step in steps for each in step if each.scheduled_requests != Scheduled()]
    prompts = [each for each in scheduled if each.num_prefill_requests]
    assert [(p.sum_prefill_tokens, p.sum_prefill_kv_tokens) for p in prompts] == [(100, 0), (50, 100)]
    assert {p.var_prefill_length for p in prompts} == {0.0}
    assert [each.sum_decode_kv_tokens for each in scheduled if each.num_decode_requests] == [151, 152, 153]
    assert all((each.worker_id, each.dp_rank) == ("w", rank) for step in steps for rank, each in enumerate(step))
    assert all(each.wall_time > 0 for step in steps for each in step)


def test_all_steps_together_are_what_was_computed(engine: Engine):
    """Ten requests on eight slots: two wait, and none is counted twice."""
    steps = record_steps(engine)
    for i in range(10):
        engine.add(request(f"r{i}", [i + 1] * (20 + 5 * i), max_tokens=5, ignore_eos=True))
    drain(engine)
    stats, scheduled = engine.stats(), [each.scheduled_requests for step in steps for each in step]
    assert sum(each.sum_prefill_tokens for each in scheduled) == stats.prompt_tokens
    rows = sum(each.num_decode_requests for each in scheduled)
    assert stats.generated_tokens - 10 <= rows <= stats.generated_tokens
    assert engine._step_tokens.total == stats.prompt_tokens + stats.generated_tokens
    assert 0 < sum(stats.step_tokens_counts) <= stats.steps
    assert all(0 <= each.var_prefill_length <= 25**2 for each in scheduled)
    first = [each.queued_requests for each in steps[0]]
    assert sum(each.num_prefill_requests for each in first) == 10 - engine.cfg.max_num_seqs * engine.cfg.num_ranks
    assert {each.num_decode_requests for each in first} == {0}


def test_queue_metrics_are_refreshed_once_stale(engine: Engine, monkeypatch):
    monkeypatch.setattr("dsv3.engine.step_metrics._QUEUE_S", 0.0)
    steps = record_steps(engine)
    for i in range(10):
        engine.add(request(f"q{i}", [i + 1] * 20, max_tokens=5, ignore_eos=True))
    drain(engine)
    assert [each.queued_requests for each in steps[-1]] == [QueueMetrics()] * 2
    assert engine.stats().waiting == 0


def test_a_message_is_a_map_with_the_names_of_dynamo():
    assert msgspec.msgpack.decode(encode(StepMetrics())) == NOTHING
    step = StepMetrics(1, "w", 2, 3, 0.5, Scheduled(1, 2, 3.0, 4, 5, 6, 7.0), QueueMetrics(1, 2, 3.0, 4, 5, 6.0))
    decoded = msgspec.msgpack.decode(encode(step))
    assert list(decoded["scheduled_requests"].values()) == [1, 2, 3.0, 4, 5, 6, 7.0]
    assert list(decoded["queued_requests"].values()) == [1, 2, 3.0, 4, 5, 6.0]


def test_each_rank_has_a_socket_and_an_idle_one_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publisher, "_IDLE_S", 0.01)
    endpoint = f"ipc://{tmp_path}/steps"
    with zmq.Context() as context:
        sockets = [context.socket(zmq.SUB) for _ in range(2)]
        sender = StepPublisher(StepMetricsConfig(endpoint, "me"), 2)
        for socket, suffix in zip(sockets, ("", "_dp1"), strict=True):
            socket.linger = 0
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint + suffix)
            assert socket.poll(60_000), "an idle one is heard, so whoever comes late knows that it is connected"
        monkeypatch.setattr(publisher, "_IDLE_S", 300.0)
        for i in range(1, 6):
            sender.publish([StepMetrics(worker_id="me", dp_rank=rank, wall_time=float(i)) for rank in range(2)])
            time.sleep(2e-3)  # so that some are sent alone
        for rank, socket in enumerate(sockets):
            received = [_receive(socket)]
            while received[-1].wall_time < 5:
                received.append(_receive(socket))
            assert [each.wall_time for each in received if each.wall_time] == [1, 2, 3, 4, 5]
            assert all(each.wall_time for each in received[-5:]), "one that works is not idle in between"
            numbers = [each.counter_id for each in received]
            assert numbers == list(range(numbers[0], numbers[0] + len(received)))
            assert {(each.worker_id, each.dp_rank, each.version) for each in received} == {("me", rank, 1)}
            assert all(each.scheduled_requests == Scheduled() for each in received)
            socket.close()
        sender.close()
        sender = StepPublisher(StepMetricsConfig(endpoint), 2)  # the endpoints are free again
        sender.close()


def _receive(socket: zmq.Socket) -> StepMetrics:
    assert socket.poll(60_000)
    topic, number, payload = socket.recv_multipart()
    metrics = msgspec.msgpack.decode(payload, type=StepMetrics)
    assert topic == b"" and number == metrics.counter_id.to_bytes(8, "big")
    return metrics


def test_an_endpoint_that_cannot_be_bound_is_refused():
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ValueError, match=r"step_metrics_config: endpoint: cannot bind .* free port"):
            StepPublisher(StepMetricsConfig(f"tcp://127.0.0.1:{port}"), 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": "1"}, "port: there is no such field; there are endpoint, worker_id"),
        ({"endpoint": 20380}, "endpoint: 20380 is not a text"),
        ({"endpoint": "20380"}, "endpoint: '20380' is not like"),
        ({"worker_id": None}, "worker_id: None is not a text"),
    ],
)
def test_bad_configurations_are_refused_by_name(given: dict, words: str):
    with pytest.raises(ValueError, match=words):
        StepMetricsConfig.from_json(given)
