"""What a router makes of KV events: it knows what an instance holds, and says so when it does not."""

import asyncio
import tempfile
from pathlib import Path

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from dsv3.config.publishing import KvEventsConfig
from dsv3.kv_cache.event_publisher import Publisher
from dsv3.kv_cache.events import Cleared, EventEncoder, EventQueue, PageTokens, Removed, Stored
from dsv3.kv_cache.page_keys import extend_keys, root_key
from router.cached_pages import CachedPages, EventEndpoint, Listener, read_batch, token_page_keys, zmq_context
from router.instance import Booking, Instance
from router.request import Prompt

RANKS = 2
URL = "http://127.0.0.1:1"
# Prompts of up to three pages over two kinds of page, of a tenant.
PROMPTS = st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=3))
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "clear"]), st.integers(0, RANKS - 1), PROMPTS), max_size=25
)


def tokens_of(pages: list[int], size: int = 64) -> np.ndarray:
    return np.repeat(np.array(pages, np.int32), size)


def keys_of(tenant: int, pages: list[int], size: int = 64) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(root_key("model", str(tenant)), keys, tokens_of(pages, size), size)
    return keys


def stored(rank: int, tenant: int, pages: list[int], size: int = 64) -> Stored:
    keys, root = keys_of(tenant, pages, size), root_key("model", str(tenant))
    return Stored(rank, "GPU", keys, PageTokens(keys, None, tokens_of(pages, size), root))


def tell(held: CachedPages, encoder: EventEncoder, *notes) -> None:
    record = EventQueue(9)
    for note in notes:
        record.append(note)
    record.end_batch()
    for rank, payload in encoder.messages(record.pop()):
        held.apply(rank, read_batch(payload))


@given(STEPS, PROMPTS, st.sampled_from([64, 128]))
def test_a_prompt_finds_what_a_rank_holds(steps, prompt, size):
    held, encoder, there = CachedPages(RANKS), EventEncoder(RANKS, size), set()
    for what, rank, (tenant, pages) in steps:
        keys = keys_of(tenant, pages, size)
        if what == "store":
            tell(held, encoder, stored(rank, tenant, pages, size))
            there |= {(rank, tenant, tuple(pages[: i + 1])) for i in range(len(pages))}
        elif what == "remove":
            tell(held, encoder, Removed(rank, "GPU", keys[-1:]))
            there.discard((rank, tenant, tuple(pages)))
        else:
            tell(held, encoder, Cleared())
            there.clear()
    names, wanted = token_page_keys(tokens_of(prompt[1], size)), prompt[1]
    spelled = [{pages for rank, _, pages in there if rank == mine} for mine in range(RANKS)]
    depths = [
        next((i for i in range(len(wanted)) if tuple(wanted[: i + 1]) not in mine), len(wanted)) for mine in spelled
    ]
    assert held.overlap(names) == max(depths) * size // 64


@given(st.binary(max_size=40))
def test_what_is_no_event_is_refused(payload):
    with pytest.raises(ValueError):
        read_batch(payload)


def test_a_rank_that_is_forgotten_finds_nothing():
    held = CachedPages(RANKS)
    for rank in range(RANKS):
        tell(held, EventEncoder(RANKS, 64), stored(rank, 0, [1, rank]))
    names = token_page_keys(tokens_of([1, 1]))
    assert held.overlap(names) == 2
    held.clear(1)
    assert held.overlap(names) == 1
    held.clear(0)
    assert held.overlap(names) == 0 == len(held)


def test_what_an_instance_tells_outweighs_what_was_sent_there():
    instance = Instance(URL, None, 9, 1.0)
    text, salted = (Prompt((b"a", b"b"), 128, token_page_keys(tokens_of([1, 2])), each) for each in (False, True))
    booking = Booking(instance, text, 0)  # nobody is heard
    booking.close()
    assert instance.overlap(text) == instance.overlap(salted) == 2
    instance.listener = Listener(EventEndpoint("tcp://*:1"), URL)
    instance.listener._is_current = [True]
    assert instance.overlap(text) == 0
    booking = Booking(instance, text, 0)  # what is being computed will be there
    assert instance.overlap(text) == 2 and instance.overlap(salted) == 0
    booking.on_tokens(1)
    assert instance.overlap(text) == 0
    tell(instance.listener.cached, EventEncoder(1, 64), stored(0, 0, [1, 2]), stored(0, 0, [3]))
    other = Prompt((b"c",), 64, token_page_keys(tokens_of([3])), is_salted=True)
    assert instance.overlap(text) == 2 and instance.overlap(other) == 0  # another tenant's, for all one knows


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "a", "tcp://a:5557"),
        ("tcp://[::]:5557", "::1", "tcp://[::1]:5557"),
        ("tcp://10.0.0.7:5557", "a", "tcp://10.0.0.7:5557"),
        ("ipc:///x", "127.0.0.1", "ipc:///x"),
        ("ipc:///x", "a", None),
        ("tcp://*:x", "a", None),
        ("tcp://*", "a", None),
    ],
)
def test_where_an_instance_is_heard(endpoint, host, expected):
    source = EventEndpoint(endpoint).at(host)
    assert (None if source is None else source.endpoint) == expected


async def until(condition, seconds: float = 12) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_listener_knows_what_came_before_it_and_survives_the_publisher():
    """Pages of before it listens, of while it listens, and none of a publisher that has gone."""

    async def run(directory: Path) -> None:
        fields = {"endpoint": f"ipc://{directory}/live", "replay_endpoint": f"ipc://{directory}/replay", "topic": "kv"}
        config = KvEventsConfig(enable_kv_cache_events=True, **fields)
        publisher, listener = Publisher(config, RANKS, 64), Listener(EventEndpoint(**fields, num_ranks=RANKS), URL)
        publisher.queue.append(stored(0, 0, [0, 1]))
        listener.start()
        names = [token_page_keys(tokens_of(pages)) for pages in ([0, 1], [1, 1])]
        await until(lambda: listener.is_live and listener.cached.overlap(names[0]) == 2)
        publisher.queue.append(stored(1, 0, [1, 1]))
        await until(lambda: listener.cached.overlap(names[1]) == 2)
        publisher.close()
        publisher = Publisher(config, RANKS, 64)
        publisher.queue.append(stored(0, 0, [1]))
        publisher.queue.append(Cleared())
        publisher.queue.end_batch()
        rest = stored(1, 0, [1])

        def heard() -> bool:  # a subscriber that connects again hears what is published from then on
            publisher.queue.append(rest)
            publisher.queue.append(Removed(0, "GPU", keys_of(0, [0])))
            return listener.cached.overlap(names[0]) == 0 and listener.cached.overlap(names[1]) == 1

        await until(heard)
        listener.close()
        publisher.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))


def test_more_ranks_are_listened_to_than_zmq_has_sockets_by_default():
    """Seven decode units of 144 ranks are that many."""
    assert zmq.Context().get(zmq.MAX_SOCKETS) < 7 * 144 + 20 < zmq_context().get(zmq.MAX_SOCKETS)
