"""KV events: the queue is bounded, dropped batches leave gaps, and messages have vLLM's format."""

import msgspec
import numpy as np
import pytest

from dsv3.config.publishing import KvEventsConfig, endpoint_of
from dsv3.kv_cache import events as events_module
from dsv3.kv_cache.events import EventEncoder, EventQueue, PageTokens, Removed, Stored, hash_of
from dsv3.kv_cache.page_keys import window_keys


def key(i: int) -> bytes:
    return i.to_bytes(1, "big") * 32


def removed(i: int, rank: int | None = 0) -> Removed:
    return Removed(rank, "GPU", [key(i)])


def test_dropped_batches_leave_a_gap_in_the_numbers():
    events = EventQueue(capacity=2)
    for i in range(5):
        events.append(removed(i))
        events.end_batch()
    assert events.dropped == 3
    first, second = events.pop(), events.pop()
    assert (first.events, first.dropped) == ([removed(0)], 0)
    assert (second.events, second.dropped) == ([removed(1)], 3)
    events.append(removed(9))
    events.end_batch()
    assert events.pop().events == [removed(9)]
    events.end_batch()
    assert events.pop() is None


def decoded(messages):
    return {rank: msgspec.msgpack.decode(payload)[1:] for rank, payload in messages}


def test_messages_have_vllms_format():
    events, encoder = EventQueue(9), EventEncoder(2, 64)
    tokens = np.arange(128, dtype=np.int32)
    page_tokens = PageTokens([key(1), key(2)], None, tokens)
    events.append(Stored(1, "GPU", page_tokens.keys, page_tokens))
    events.append(Stored(None, "CPU", [key(2), key(3)]))
    events.append(removed(1, 1))
    events.append(removed(2, 1))
    events.end_batch()
    common = {"type": "BlockStored", "block_size": 64, "lora_id": None, "lora_name": None}
    one, two, three = (hash_of(key(i)) for i in (1, 2, 3))
    on_host = [
        {**common, "block_hashes": [two], "parent_block_hash": one, "token_ids": [*range(64, 128)], "medium": "CPU"},
        {**common, "block_hashes": [three], "parent_block_hash": None, "token_ids": [], "medium": "CPU"},
    ]
    on_device = {**common, "block_hashes": [one, two], "parent_block_hash": None, "medium": "GPU"}
    gone = {"type": "BlockRemoved", "block_hashes": [one, two], "medium": "GPU"}
    assert decoded(encoder.messages(events.pop())) == {
        0: [on_host, 0],
        1: [[{**on_device, "token_ids": [*range(128)]}, *on_host, gone], 1],
    }


def test_token_ids_of_pages_that_are_stored_again_are_kept_longest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events_module, "_MAX_PAGE_TOKENS", 2)
    events, encoder = EventQueue(9), EventEncoder(1, 64)
    for i in (1, 2, 1, 3):
        events.append(PageTokens([key(i)], None, np.full(64, i, np.int32)))
    events.append(Stored(0, "CPU", [key(1), key(2), key(3)]))
    events.end_batch()
    [[messages, _]] = decoded(encoder.messages(events.pop())).values()
    assert [message["token_ids"][:1] for message in messages] == [[1], [], [3]]


def test_window_pages_are_in_no_message():
    events, encoder = EventQueue(9), EventEncoder(1, 64)
    parts = window_keys(key(1), 3)
    events.append(Stored(0, "CPU", [*parts, key(1)]))
    events.append(Removed(0, "CPU", parts))
    events.append(Removed(0, "CPU", [parts[0], key(1)]))
    events.end_batch()
    [[messages, _]] = decoded(encoder.messages(events.pop())).values()
    assert [message["block_hashes"] for message in messages] == [[hash_of(key(1))]] * 2


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
