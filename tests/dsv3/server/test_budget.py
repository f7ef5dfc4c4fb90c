"""Memory of requests in an API server: limited, released, and without reference cycles."""

import asyncio
import contextlib
import gc
import json
import types
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3.scheduler.request import EngineOutput, RequestRules
from dsv3.server.config import ServerConfig
from dsv3.server.engine.client import EngineUnavailable
from dsv3.server.http.app import EventStream, make_router
from dsv3.server.http.bodies import ClientGone, unless_disconnected
from dsv3.server.http.exchange import WRITER, ResponseWriter
from dsv3.server.http.http_server import Connection
from dsv3.server.limits import SMALL_BYTES, Budget, DecodeThrottle, WorkersBusy
from dsv3.server.protocol.errors import ApiError
from dsv3.server.protocol.openai import CompletionRequest
from dsv3.server.serving.completions import CompletionHandler
from dsv3.server.serving.handler import RequestHandler
from dsv3.server.serving.prompts import completion_prompts
from dsv3.server.serving.request_parsing import read
from dsv3.server.serving.service import Service
from tests.dsv3.server.test_connections import on_a_server

RULES = RequestRules(vocab_size=500, max_model_len=2**18)


class Engine:
    """An engine client that ends each sequence with one token at once, or never."""

    state, capacity = "ready", 1000

    def __init__(self):
        self.info = types.SimpleNamespace(rules=RULES)
        self.stalls, self.aborted, self.streams = False, 0, []

    def new_ids(self, count):
        return 0

    def require_capacity(self, count):
        pass

    def submit(self, requests, streams):
        self.streams = list(streams)
        for request, stream in zip(requests, streams, strict=True):
            stream.pending = [EngineOutput(request_id=request.request_id, token_ids=[7], finish_reason="length")]
            if not self.stalls:
                asyncio.get_running_loop().call_soon(stream.on_outputs)

    def abort(self, request_ids):
        self.aborted += len(request_ids)


def on_an_api_server(scenario, budget=None):
    """Runs `scenario(connect, engine)` with an API server and its own engine."""

    async def run(connect):
        engine = Engine()
        service = Service(ServerConfig(Path(), ("m",)), engine, None, None)
        service.budget = budget or service.budget
        api_server.append(make_router(service))
        await scenario(connect, engine)
        api_server.clear()
        await service.close()

    api_server = []

    async def app(scope, receive, send):
        await api_server[0](scope, receive, send)

    on_a_server(app, run)


def post(body: bytes, length: int | None = None) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
    return f"{head}{length or len(body)}\r\n\r\n".encode() + body


def asked(**fields) -> bytes:
    return json.dumps({"prompt": [5], "max_tokens": 1} | fields).encode()


LARGE = [[5] * 5000] * 30  # JSON of 450 KiB


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (asked(), b"200"),
        (asked(stream=True), b"200"),
        (asked(prompt=LARGE), b"200"),
        (asked(n="x"), b"400"),
        (asked(prompt=LARGE, n="x"), b"400"),
        (asked(prompt=[5] * 2**18), b"400"),
        (asked(prompt=[[5]] * 1001), b"400"),
        (asked(model="other"), b"404"),
        (asked(), None),
    ],
    ids=["small", "stream", "large", "wrong", "large and wrong", "too long", "too many", "no model", "hung up"],
)
def test_a_request_leaves_no_reference_cycles(monkeypatch, body, status):
    """The garbage collector runs after thousands of objects of any size: 20 rejected bodies of 32 MiB stayed."""
    alive = weakref.WeakSet()
    for kind in (RequestHandler, Connection):
        monkeypatch.setattr(kind, "__init__", noted(kind.__init__, alive))

    async def scenario(connect, engine):
        engine.stalls = status is None
        client = await connect()
        await client.send(post(body))
        if status is None:
            await asyncio.sleep(0.05)
        else:
            assert (await client._some()).split()[1] == status
        client.connection.close()
        del client
        assert len(alive) == 2 or status is not None
        for _ in range(400):
            if not alive:
                break
            await asyncio.sleep(0.005)
        assert not list(alive)

    gc.disable()
    try:
        on_an_api_server(scenario)
    finally:
        gc.enable()


def noted(init, alive):
    def wrapped(self, *args):
        alive.add(self)
        init(self, *args)

    return wrapped


def test_bodies_beyond_the_budget_get_503_with_retry_after():
    """Small ones are accepted meanwhile, and large ones again once bytes are released."""
    large = asked(user="x" * 3 * SMALL_BYTES)

    async def scenario(connect, engine):
        holder = await connect()
        await holder.send(post(large[: 2 * SMALL_BYTES], len(large)))
        await asyncio.sleep(0.05)
        for body, status in [(large, b"503"), (asked(), b"200")]:
            other = await connect()
            with contextlib.suppress(ConnectionError):
                await other.send(post(body))
            head, answer = await other.response()
            assert head.split()[1] == status
            if status == b"503":
                assert json.loads(answer)["error"]["code"] == "queue_full" and b"retry-after: 1" in head
        await holder.send(large[2 * SMALL_BYTES :])
        assert (await holder.response())[0].split()[1] == b"200"
        again = await connect()
        await again.send(post(large))
        assert (await again.response())[0].split()[1] == b"200"

    on_an_api_server(scenario, Budget(small=SMALL_BYTES, large=4 * SMALL_BYTES))


def test_a_stream_reserves_its_body_until_it_ends():
    budget = Budget(small=200, large=0)
    body = asked(stream=True, user="x" * 80)

    async def scenario(connect, engine):
        engine.stalls = True
        first, second = await connect(), await connect()
        await first.send(post(body))
        await asyncio.sleep(0.05)
        await second.send(post(body))
        assert (await second.response())[0].split()[1] == b"503"
        first.connection.close()
        while not engine.aborted:
            await asyncio.sleep(0.005)
        engine.stalls = False
        await second.send(post(body))
        assert b" 200 " in await second._some()

    on_an_api_server(scenario, budget)


PARTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, SMALL_BYTES)), max_size=40)


@given(PARTS, st.integers(0, SMALL_BYTES), st.integers(SMALL_BYTES + 1, 4 * SMALL_BYTES))
def test_reservations_never_exceed_the_budget(parts, small, large):
    """Four requests grow, and end when they are rejected."""
    budget, sizes = Budget(small, large), dict.fromkeys(range(4), 0)
    with contextlib.ExitStack() as stack:
        holdings = [stack.enter_context(budget.reserve()) for _ in sizes]
        for who, nbytes in parts:
            size = sizes[who] + nbytes
            of_share = [s for other, s in sizes.items() if other != who and (s > SMALL_BYTES) == (size > SMALL_BYTES)]
            has_capacity = sum(of_share) + size <= (large if size > SMALL_BYTES else small)
            if has_capacity:
                holdings[who].grow(nbytes)
                sizes[who] = size
            else:
                with pytest.raises(WorkersBusy):
                    holdings[who].grow(nbytes)
                holdings[who].release()
                sizes[who] = 0
            assert [reservation.nbytes for reservation in holdings] == list(sizes.values())
    for share in (small, large):
        with budget.reserve() as reservation:
            reservation.grow(share)  # all of it was given back


def test_token_ids_take_four_bytes():
    """Also for bodies that are decoded on the event loop; a list needs 40."""

    async def prompts(body):
        return await completion_prompts(types.SimpleNamespace(), read(CompletionRequest, body))

    for prompt in ([345] * 5000, [[345] * 5000], [[345] * 5000] * 60):
        found = asyncio.run(prompts(asked(prompt=prompt)))
        assert [p.token_ids.tolist() for p in found] == (prompt if isinstance(prompt[0], list) else [prompt])
        assert {len(memoryview(p.token_ids).cast("B")) for p in found} == {4 * 5000}


@given(st.lists(st.tuples(st.integers(1, 100_000), st.booleans()), min_size=1, max_size=30))
def test_bodies_are_decoded_in_order_a_slice_per_iteration(bodies):
    """A body whose client disconnects while it waits is not decoded and delays no other."""

    async def run():
        turns, begun = DecodeThrottle(nbytes=10_000), []

        async def ask(number, size):
            await turns.wait(size)
            begun.append(number)

        tasks = [asyncio.create_task(ask(i, size)) for i, (size, _) in enumerate(bodies)]
        await asyncio.sleep(0)
        for i, (_, leaves) in enumerate(bodies):
            if leaves and not tasks[i].done():
                tasks[i].cancel()
        leaving = {i for i, (_, leaves) in enumerate(bodies) if leaves and i not in begun}
        while not all(task.done() for task in tasks):
            before = len(begun)
            await asyncio.sleep(0)
            read = [max(4096, bodies[i][0]) for i in begun[before:]]
            assert sum(read[:-1]) < 10_000, "one that passes the slice is its last"
        assert begun == [i for i in range(len(bodies)) if i not in leaving]

    asyncio.run(run())


def test_a_cancelled_body_delays_no_other():
    async def turns_until_read(leaves):
        turns, num_turns = DecodeThrottle(nbytes=10_000), 0
        _, gone, last = [asyncio.create_task(turns.wait(10_000)) for _ in range(3)]
        await asyncio.sleep(0)  # all have asked
        if leaves:
            gone.cancel()
        while not last.done():
            await asyncio.sleep(0)
            num_turns += 1
        return num_turns

    assert asyncio.run(turns_until_read(True)) < asyncio.run(turns_until_read(False))


@pytest.mark.parametrize("num_turns", range(8))
@pytest.mark.parametrize("streams", [True, False])
def test_a_generation_may_end_while_its_client_disconnects(streams, num_turns):
    """When the engine fails, all generations must end, also if some end at the same time by a disconnect."""

    async def run():
        engine, gone = Engine(), asyncio.Event()
        engine.stalls = True
        answer = CompletionHandler(Service(ServerConfig(Path(), ("m",)), engine, None, None), asked(stream=streams))
        await answer.prepare()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        writer = Mock(ResponseWriter)
        scope = {"type": "http", "http_version": "1.1", "extensions": {WRITER: writer}}
        work = EventStream(answer, lambda: None)(scope, receive, send) if streams else answer.whole()
        task = asyncio.create_task(work if streams else unless_disconnected(receive, work))
        while not engine.streams:
            await asyncio.sleep(0)
        [stream] = engine.streams
        stream.pending = [EngineOutput(request_id=0, token_ids=[7])]
        stream.on_outputs()
        while streams and not writer.write.called:
            await asyncio.sleep(0)
        gone.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        stream.fail(EngineUnavailable("the engine has died"))
        with contextlib.suppress(ClientGone, ApiError):
            await task

    asyncio.run(run())
