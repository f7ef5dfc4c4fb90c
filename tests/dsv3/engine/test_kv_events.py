"""A router that receives KV events knows the contents of the engine's prefix indexes and host pool."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv3.engine.engine import Engine
from dsv3.kv_cache.event_publisher import END
from dsv3.kv_cache.events import hash_of
from dsv3.kv_cache.page_keys import extend_keys
from dsv3.kv_cache.tiers import tiers
from tests.dsv3.engine import toy
from tests.dsv3.engine.driving import drain, number, request, run

MakeEngine = Callable[..., Engine]
PROMPT = [i % 60 + 1 for i in range(200)]


class Router:
    """A subscriber's view of one rank's events: page hashes by medium, and each page's tokens."""

    def __init__(self, config: dict, rank: int, context: zmq.Context, page_size: int = 64) -> None:
        suffix = f"_dp{rank}" if rank else ""
        self.page_size = page_size
        self.rank, self.next, self.held = rank, 0, {"GPU": set(), "CPU": set(), "STORAGE": set()}
        self.tokens: dict[int, tuple[int | None, list[int]]] = {}
        self.extra: list[object] = []
        self.was_cleared = False
        self.live, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.live.setsockopt_string(zmq.SUBSCRIBE, config["topic"])
        self.live.connect(config["endpoint"] + suffix)
        self.replay.connect(config["replay_endpoint"] + suffix)

    def catch_up(self) -> None:
        """Requests all missed events, and applies them."""
        self.replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self.replay.poll(30_000)
            _, sequence, payload = self.replay.recv_multipart()
            if sequence == END:
                return
            assert int.from_bytes(sequence, "big") == self.next
            self.take(payload)

    def take(self, payload: bytes) -> None:
        self.next += 1
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == self.rank and events
        for event in events:
            getattr(self, event.pop("type"))(**event)

    def BlockStored(
        self, block_hashes, parent_block_hash, token_ids, block_size, medium, lora_id, lora_name, extra_keys=None
    ):
        assert (block_size, lora_id, lora_name) == (self.page_size, None, None)
        assert not self.held[medium] & {*block_hashes}, "stored twice"
        self.held[medium] |= {*block_hashes}
        if medium == "GPU":
            assert len(token_ids) == block_size * len(block_hashes)
        for i in range(len(token_ids) // block_size):
            spelled = parent_block_hash, token_ids[block_size * i : block_size * (i + 1)]
            assert self.tokens.setdefault(block_hashes[i], spelled) == spelled
            parent_block_hash = block_hashes[i]
        self.extra.append(extra_keys)

    def BlockRemoved(self, block_hashes, medium):
        assert self.was_cleared or {*block_hashes} <= self.held[medium], "removed and never stored"
        self.held[medium] -= {*block_hashes}

    def AllBlocksCleared(self):
        self.was_cleared = True
        for held in self.held.values():
            held.clear()

    def spells(self, page: int) -> list[int]:
        """The tokens of a prompt that ends with a page."""
        parent, tokens = self.tokens[page]
        return [*(self.spells(parent) if parent is not None else []), *tokens]


@pytest.fixture
def config() -> Iterator[dict]:
    """Events over sockets of the file system, whose paths are short."""
    folder = tempfile.mkdtemp(prefix="kv-")
    yield {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        "topic": "kv@here",
    }
    shutil.rmtree(folder)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def eventually(agreed: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not agreed():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def agrees(engine: Engine, router: Router) -> bool:
    """Whether a router knows what is findable on its rank and in the host's memory."""
    router.catch_up()
    index = engine.scheduler.caches[router.rank].index
    there = engine.scheduler.tiers
    on_device, on_host = ({hash_of(key) for key in keys} for keys in (index._page_of, there._host_pool._block_of))
    return router.held["GPU"] == on_device and router.held["CPU"] == on_host and not any(there._backlog.values())


_ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 230), st.integers(1, 90)),
    st.tuples(st.just("steps"), st.integers(1, 15)),
    st.sampled_from([("flush",), ("forget",), ("abort",)]),
)


@given(actions=st.lists(_ACTIONS, min_size=4, max_size=20))
@settings(max_examples=20, deadline=None, suppress_health_check=[*HealthCheck])
def test_a_router_knows_what_the_engine_has_cached(
    make_engine: MakeEngine, config: dict, context: zmq.Context, monkeypatch: pytest.MonkeyPatch, actions: list[tuple]
):
    """Pages are evicted from seven per rank and eight blocks; a new engine finds the blocks of the one before."""
    monkeypatch.setattr(tiers, "is_loading_faster", lambda *_: True)
    engine = make_engine(kv_offloading_size=4e-5, identity="f", kv_events_config=config)
    routers = [Router(config, rank, context) for rank in range(2)]
    names = []
    for what, *values in [*actions, ("add", 0, 200, 10)]:
        if what == "add":
            family, length, answer = values
            names.append(f"events{len(names)}")
            prompt = [(family * 7 + i) % 60 + 1 for i in range(length)]
            engine.add(request(names[-1], prompt, max_tokens=min(answer, 256 - length), ignore_eos=True))
        elif what == "flush":
            engine.flush()
        elif what == "abort" and names:
            engine.abort(number(names[-1]))
        elif what == "forget":
            for cache in engine.scheduler.caches:
                cache.clear()
        for _ in range(values[0] if what == "steps" else 1):
            engine.step()
        routers[0].catch_up()
    drain(engine)
    for router in routers:
        eventually(lambda router=router: agrees(engine, router))
        for page in router.held["GPU"]:
            keys: list[bytes] = []
            extend_keys(engine.rules.root(""), keys, np.array(router.spells(page), np.int32), 64)
            assert hash_of(keys[-1]) == page
            assert keys[-1] in engine.scheduler.caches[router.rank].index._page_of
        assert router.was_cleared == ("flush" in {what for what, *_ in actions})
    assert engine.stats().jobs["kv_events"].dropped == 0
    engine.events.close()
    engine.planners["pages"].memory.close()


def test_a_subscriber_receives_events(make_engine: MakeEngine, config: dict, context: zmq.Context):
    engine = make_engine(kv_events_config=config)
    router = Router(config, 0, context)
    for turn in range(100):  # a subscription takes a moment, and what is sent before is not heard
        prompt = [(turn + i) % 60 + 1 for i in range(70)]
        run(engine, request(f"live{turn}", prompt, max_tokens=1))
        if router.live.poll(100):
            break
    topic, sequence, payload = router.live.recv_multipart()
    assert topic == b"kv@here"
    router.next = int.from_bytes(sequence, "big")
    router.was_cleared = True  # it has missed the beginning
    router.take(payload)
    assert router.spells(max(router.held["GPU"]))
    engine.events.close()


def test_a_tenants_pages_are_marked(make_engine: MakeEngine, config: dict, context: zmq.Context):
    engine = make_engine(kv_events_config=config)
    router = Router(config, 0, context)
    run(engine, request("mine", PROMPT, salt="mine", max_tokens=1), request("all", PROMPT, max_tokens=1))
    other = Router(config, 1, context)
    for each in (router, other):
        eventually(lambda each=each: each.catch_up() or bool(each.held["GPU"]))
    marks = {tuple(mark) for each in (router, other) for extra in each.extra for mark in extra or () if mark}
    assert (engine.rules.root("mine").hex(),) in marks
    assert (engine.rules.root("").hex(),) not in marks
    assert not any("mine" in str(mark) for mark in marks)
    engine.events.close()


def test_invalidated_pages_are_removed(make_engine: MakeEngine, config: dict, context: zmq.Context):
    engine = make_engine(kv_events_config=config)
    routers = [Router(config, rank, context) for rank in range(2)]
    assert run(engine, request("bad", [*PROMPT, toy.POISON], max_tokens=3))["bad"].finish_reason == "error"

    def settled() -> bool:
        for router in routers:
            router.catch_up()
        return any(router.tokens for router in routers) and not any(router.held["GPU"] for router in routers)

    eventually(settled)
    engine.events.close()


def test_events_without_subscribers_or_off_cost_nothing(make_engine: MakeEngine, config: dict):
    for given_ in (None, {}, {**config, "publisher": "null"}, {**config, "enable_kv_cache_events": False}):
        engine = make_engine(kv_events_config=given_)
        assert engine.events is None and engine.scheduler.events is None
        assert "kv_events" not in engine.stats().jobs


def test_an_endpoint_in_use_ends_the_start(make_engine: MakeEngine, config: dict):
    taken = {**config, "endpoint": f"ipc://{Path(config['endpoint'][6:]).parent}/missing/events"}
    with pytest.raises(ValueError, match=r"kv_events_config: endpoint: .* cannot be opened"):
        make_engine(kv_events_config=taken)
