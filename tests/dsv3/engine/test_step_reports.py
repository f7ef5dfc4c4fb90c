"""Step metrics on the wire are Dynamo's `ForwardPassMetrics`, version 1: names, frames, numbers and signs of life."""

import time
from pathlib import Path

import msgspec
import pytest
import zmq

from dsv3.config.publishing import StepMetricsConfig
from dsv3.engine import step_reports as publisher
from dsv3.engine.step_reports import Queued, Scheduled, StepMetrics, StepPublisher, encode

PROMPTS = {"num_prefill_requests": 0, "sum_prefill_tokens": 0, "var_prefill_length": 0.0}
ANSWERS = {"num_decode_requests": 0, "sum_decode_kv_tokens": 0, "var_decode_kv_tokens": 0.0}
NOTHING = {"version": 1, "worker_id": "", "dp_rank": 0, "counter_id": 0, "wall_time": 0.0} | {
    "scheduled_requests": PROMPTS | {"sum_prefill_kv_tokens": 0} | ANSWERS,
    "queued_requests": PROMPTS | ANSWERS,
}


def test_a_message_is_a_map_with_the_names_of_dynamo():
    assert msgspec.msgpack.decode(encode(StepMetrics())) == NOTHING
    step = StepMetrics(1, "w", 2, 3, 0.5, Scheduled(1, 2, 3.0, 4, 5, 6, 7.0), Queued(1, 2, 3.0, 4, 5, 6.0))
    told = msgspec.msgpack.decode(encode(step))
    assert list(told["scheduled_requests"].values()) == [1, 2, 3.0, 4, 5, 6, 7.0]
    assert list(told["queued_requests"].values()) == [1, 2, 3.0, 4, 5, 6.0]


def test_each_rank_has_a_socket_and_an_idle_one_says_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
            heard = [_heard(socket)]
            while heard[-1].wall_time < 5:
                heard.append(_heard(socket))
            assert [each.wall_time for each in heard if each.wall_time] == [1, 2, 3, 4, 5]
            assert all(each.wall_time for each in heard[-5:]), "one that works is not idle in between"
            numbers = [each.counter_id for each in heard]
            assert numbers == list(range(numbers[0], numbers[0] + len(heard)))
            assert {(each.worker_id, each.dp_rank, each.version) for each in heard} == {("me", rank, 1)}
            assert all(each.scheduled_requests == Scheduled() for each in heard)
            socket.close()
        sender.close()
        sender = StepPublisher(StepMetricsConfig(endpoint), 2)  # the endpoints are free again
        sender.close()


def _heard(socket: zmq.Socket) -> StepMetrics:
    assert socket.poll(60_000)
    topic, number, payload = socket.recv_multipart()
    metrics = msgspec.msgpack.decode(payload, type=StepMetrics)
    assert topic == b"" and number == metrics.counter_id.to_bytes(8, "big")
    return metrics


def test_an_endpoint_that_cannot_be_had_is_told():
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ValueError, match=r"step_metrics_config: endpoint: .* cannot be had"):
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
