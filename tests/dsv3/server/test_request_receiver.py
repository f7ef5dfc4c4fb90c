"""Between two steps the engine takes a slice of what fronts ask for; requests that belong together go in whole."""

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3.processes import frames
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import EngineRequest, InvalidRequest, PreparedRequest, RequestRules, fan_out, prepare
from dsv3.server.engine import messages, process
from dsv3.server.engine.client import EngineClient
from dsv3.server.engine.process import RequestReceiver

RULES = RequestRules(vocab_size=100, max_model_len=2**20)
BAD = 99
SLICE = 4


def prepared(first_id: int, n: int = 1, prompt=(1, 2)) -> PreparedRequest:
    params = SamplingParams(n=n, max_tokens=1, seed=7)
    return prepare(EngineRequest(request_id=first_id, prompt_token_ids=list(prompt), sampling=params), RULES)


class Engine:
    """Notes what it is handed; has room for `room` more."""

    def __init__(self, room: int):
        self.room, self.taken, self.aborted = room, [], []

    def submit(self, request: PreparedRequest) -> None:
        assert request.sampling.n == 1
        if BAD in request.prompt:
            raise InvalidRequest("bad")
        self.room -= 1
        assert self.room >= 0
        self.taken.append(request.request_id)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)

    def flush(self) -> None:
        self.flushed_after = len(self.taken)


class ApiServer:
    def __init__(self):
        self.live, self.sent = set(), []

    def send(self, message) -> None:
        self.sent.append(message)


class ApiServers:
    def __init__(self):
        self.received, self.removed = deque(), []

    @property
    def has_messages(self) -> bool:
        return bool(self.received)

    def take(self):
        while self.received:
            yield self.received.popleft()

    def remove(self, api_server) -> None:
        self.removed.append(api_server)


@pytest.fixture(autouse=True)
def small_slice(monkeypatch):
    monkeypatch.setattr(process, "SLICE", SLICE)


GROUPS = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), max_size=6)


@given(groups=GROUPS, room=st.integers(0, 40), bad=st.sets(st.integers(0, 5)), goes=st.booleans())
def test_all_or_none_in_slices(groups, room, bad, goes):
    engine, api_servers, api_server = Engine(room), ApiServers(), ApiServer()
    first, asked = 0, []
    for number, sizes in enumerate(groups):
        requests, ids = [], range(first, first + sum(sizes))
        for n in sizes:
            is_last = first + n == ids.stop
            requests.append(prepared(first, n, (1, BAD) if number in bad and is_last else (1, 2)))
            first += n
        asked.append(list(ids))
        api_servers.received.append((api_server, messages.Add(requests)))
    if goes:
        api_servers.received.append((api_server, None))
    receiver = RequestReceiver(engine, api_servers)
    for _ in range(100):
        if not receiver.has_work:
            break
        before = len(engine.taken)
        assert receiver.take()
        assert len(engine.taken) - before <= SLICE
    assert not receiver.has_work and not receiver.take()
    refused = {i for rejection in api_server.sent for i in rejection.request_ids}
    for number, ids in enumerate(asked):
        assert refused.issuperset(ids) or refused.isdisjoint(ids)
        stays = [i for i in ids if i in engine.taken and i not in engine.aborted]
        assert stays == ([] if goes or refused.issuperset(ids) else ids)
        assert number not in bad or refused.issuperset(ids)
    assert api_server.live == (set() if goes else {i for ids in asked for i in ids} - refused)
    assert api_servers.removed == [api_server] * goes


def test_a_request_that_is_taken_in_part_keeps_its_room():
    """A second one, which would fit by itself, is refused and not let in between."""
    engine, api_servers, api_server = Engine(10), ApiServers(), ApiServer()
    api_servers.received += [
        (api_server, messages.Add([prepared(0, 9)])),
        (api_server, messages.Add([prepared(100, 2)])),
    ]
    receiver = RequestReceiver(engine, api_servers)
    receiver.take()
    assert engine.taken == [0, 1, 2, 3] and not api_server.sent
    while receiver.has_work:
        receiver.take()
    assert engine.taken == list(range(9))
    assert api_server.sent == [messages.Rejected([100, 101], "queue_full", "the queue is full")]


def test_flushing_keeps_its_place_among_the_requests():
    engine, api_servers, api_server = Engine(10), ApiServers(), ApiServer()
    for message in (messages.Add([prepared(0)]), messages.Flush(), messages.Add([prepared(1)])):
        api_servers.received.append((api_server, message))
    RequestReceiver(engine, api_servers).take()
    assert (engine.taken, engine.flushed_after) == ([0, 1], 1)


def test_sequences_share_their_prompt():
    request = prepared(5, 3)
    several = fan_out(request)
    assert [one.request_id for one in several] == [5, 6, 7]
    assert [one.sampling.seed for one in several] == [7, 8, 9]
    assert all(one.tokens is request.tokens and one.keys is request.keys for one in several)


class Wire:
    """The engine's end of a client's connection."""

    def __init__(self):
        self.frames = []

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def write(self, frame: bytes) -> None:
        self.frames.append(bytes(frame))


def test_a_prompt_is_sent_once_in_frames_of_bounded_size():
    """Before, each of `n` sequences carried it, all in one frame."""
    client, wire = EngineClient(max_num_queued_reqs=10**6), Wire()
    client.info, client.state = messages.EngineInfo(RULES, max_num_seqs=1, num_pages=1), "ready"
    client._transport = wire
    requests = [prepared(1000 * i, n=50, prompt=[1] * 100_000) for i in range(20)]
    client.submit(requests, [object()] * (20 * 50))
    assert sum(map(len, wire.frames)) < 1.2 * 20 * 4 * 100_000
    assert max(map(len, wire.frames)) < 2 * 2**20
    adds = [messages.to_engine.decode(frame[4:]) for frame in wire.frames]
    assert [add.has_more for add in adds] == [True] * (len(adds) - 1) + [False]
    assert [request for add in adds for request in add.requests] == requests
    assert max(map(len, wire.frames)) < frames.MAX_FRAME_BYTES
    assert client.num_live == 1000


async def sent_to_the_next_engine(client: EngineClient) -> list[messages.ToEngine]:
    client._transport = wire = Wire()
    client._begin(client.info)
    await client._sending
    return [messages.to_engine.decode(frame[4:]) for frame in wire.frames]


def test_what_comes_during_a_restart_is_sent_whole():
    """Two fronts that send sequences one at a time would each fill a half of the queue, and neither be served."""
    client = EngineClient(max_num_queued_reqs=10**6, max_restarts=3)
    client.info, client.state = messages.EngineInfo(RULES, max_num_seqs=1, num_pages=1), "ready"
    client._transport = Wire()
    old, *new = [prepared(1000 * i, n=3) for i in range(4)]
    client.submit([old], [object()] * 3)
    client.lose("it has died")
    client.submit(new[:2], [object()] * 6)
    client.submit(new[2:], [object()] * 3)
    client.abort([1001, *range(3000, 3003)])
    *again, together, abort = asyncio.run(sent_to_the_next_engine(client))
    assert [[one.request_id for one in add.requests] for add in again] == [[0], [1], [2]]
    assert (together.requests, abort.request_ids) == (new[:2], [1001])
    assert all(client._in_flight.by_id[i].is_there for i in (0, 1000, 2002)) and client.num_live == 8
