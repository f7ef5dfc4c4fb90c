"""What waits to be sent is bounded, and what is lost shows."""

import msgspec
import numpy as np
import pytest

from dsv3.config.publishing import KvEventsConfig, endpoint_of
from dsv3.kv_cache.events import EventEncoder, EventQueue, Removed, Spelled, Stored, hash_of


def key(i: int) -> bytes:
    return i.to_bytes(1, "big") * 32


def removed(i: int, rank: int | None = 0) -> Removed:
    return Removed(rank, "GPU", [key(i)])


def test_lost_batches_leave_a_gap_where_they_were():
    record = EventQueue(most=2)
    for i in range(5):
        record.note(removed(i))
        record.close()
    assert record.dropped == 3
    first, second = record.take(), record.take()
    assert (first.notes, first.lost) == ([removed(0)], 0)
    assert (second.notes, second.lost) == ([removed(1)], 3)
    record.note(removed(9))
    record.close()
    assert record.take().notes == [removed(9)]
    record.close()
    assert record.take() is None


def decoded(messages):
    return {rank: msgspec.msgpack.decode(payload)[1:] for rank, payload in messages}


def test_messages_have_vllms_shape():
    record, encoder = EventQueue(9), EventEncoder(2, 64)
    tokens = np.arange(128, dtype=np.int32)
    spelled = Spelled([key(1), key(2)], None, tokens)
    record.note(Stored(1, "GPU", spelled.keys, spelled))
    record.note(Stored(None, "CPU", [key(2), key(3)]))
    record.note(removed(1, 1))
    record.note(removed(2, 1))
    record.close()
    common = {"type": "BlockStored", "block_size": 64, "lora_id": None, "lora_name": None}
    one, two, three = (hash_of(key(i)) for i in (1, 2, 3))
    on_host = [
        {**common, "block_hashes": [two], "parent_block_hash": one, "token_ids": [*range(64, 128)], "medium": "CPU"},
        {**common, "block_hashes": [three], "parent_block_hash": None, "token_ids": [], "medium": "CPU"},
    ]
    on_device = {**common, "block_hashes": [one, two], "parent_block_hash": None, "medium": "GPU"}
    gone = {"type": "BlockRemoved", "block_hashes": [one, two], "medium": "GPU"}
    assert decoded(encoder.messages(record.take())) == {
        0: [on_host, 0],
        1: [[{**on_device, "token_ids": [*range(128)]}, *on_host, gone], 1],
    }


def test_endpoints_of_ranks():
    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of("tcp://10.0.0.1:5557", 3) == "tcp://10.0.0.1:5560"
    assert endpoint_of("inproc://kv", 2) == "inproc://kv_dp2"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpont": "tcp://*:1"}, "endpont: there is no such field"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events: 1 is not true"),
        ({"publisher": "kafka"}, "publisher: 'kafka' is not one of zmq, null"),
        ({"endpoint": "5557"}, "endpoint: '5557' is not like"),
        ({"endpoint": None}, "endpoint: None is not like"),
        ({"replay_endpoint": "tcp://*:5557"}, "replay_endpoint: .* is endpoint, too"),
        ({"buffer_steps": 0}, "buffer_steps: 0 is not an integer from 1"),
        ({"hwm": True}, "hwm: True is not"),
        ({"max_queue_size": 1.5}, "max_queue_size: 1.5 is not"),
        ({"topic": 3}, "topic: 3 is not a text"),
    ],
)
def test_a_bad_config_is_refused_by_its_field(given: dict, words: str):
    with pytest.raises(ValueError, match=words):
        KvEventsConfig.from_json(given)


def test_defaults_are_vllms():
    config = KvEventsConfig.from_json({"enable_kv_cache_events": True, "publisher": None, "replay_endpoint": None})
    assert config.is_on and config.endpoint == "tcp://*:5557"
    assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (10_000, 100_000, 100_000, "")
    assert not KvEventsConfig.from_json({}).is_on
