"""The engine process's connections to API servers, tested from the other ends."""

import asyncio
import contextlib
import socket
import tempfile
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3.config.options import EngineOptions
from dsv3.processes import frames
from dsv3.sampling_params import SamplingParams
from dsv3.scheduler.request import (
    EngineOutput,
    EngineRequest,
    ExpertIds,
    RequestRules,
    StepOutputs,
    TokenLogprobs,
    Tokens,
    first_id,
    prepare,
    senders,
)
from dsv3.server.engine import api_servers as api_servers_module
from dsv3.server.engine import messages
from dsv3.server.engine.api_servers import ApiServerConnections, split_by_sender
from dsv3.server.engine.messages import EngineInfo

INFO = EngineInfo(RequestRules(vocab_size=9, max_model_len=9), max_num_seqs=1, num_pages=1)
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.lists(st.integers(0, 9), min_size=1, max_size=3)))


def columns_of(rows):
    ids = [first_id(sender) + number for sender, number, _ in rows]
    tokens = [token for *_, some in rows for token in some]
    counts = [len(some) for *_, some in rows]
    return Tokens(np.array(ids, np.int64), np.array(counts, np.int64), np.array(tokens, np.int32))


@given(st.lists(ROWS, max_size=3), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=5))
def test_each_sender_gets_its_own_outputs_in_order(columns, details):
    outputs = StepOutputs(
        [columns_of(rows) for rows in columns],
        [EngineOutput(request_id=first_id(sender) + number, token_ids=[]) for sender, number in details],
    )
    parts = split_by_sender(outputs)
    assert set(parts) == {senders(output.request_id) for output in outputs}
    for sender, part in parts.items():
        assert list(part) == [output for output in outputs if senders(output.request_id) == sender]


class Ends:
    """The API servers' ends of their connections."""

    def __init__(self, count):
        self.stopped, self.first_gone = threading.Event(), threading.Event()
        self.connections, self.streams = [], []
        self._directory, self._listener = tempfile.TemporaryDirectory(), socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._directory.name}/engine")
        self._listener.listen()
        first, link = socket.socketpair()
        self._add(first)
        self.api_servers = ApiServerConnections(link, self._listener, self.stopped.set, self.first_gone.set)
        for sender in range(1, count):
            self.connect(messages.Connect(sender))
            while sender not in self.api_servers._api_servers:
                time.sleep(0.01)

    def connect(self, message):
        """Connects another API server with `message` as its first."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._listener.getsockname())
        self._add(connection)
        self.send(-1, message)

    def _add(self, connection):
        connection.settimeout(30)
        self.connections.append(connection)
        self.streams.append(connection.makefile("rb"))

    def receive(self, api_server):
        stream = self.streams[api_server]
        return messages.from_engine.decode(stream.read(frames.body_length(stream.read(frames.HEAD_BYTES))))

    def send(self, api_server, message):
        self.connections[api_server].sendall(frames.encode(message))

    def next_message(self):
        """Waits for the next message; returns it with its connection."""
        while True:
            for api_server, message in self.api_servers.receive():
                return api_server, message
            self.api_servers.wait(30)

    def close(self):
        """Ends the event loop, which the engine's process keeps until its own end."""
        loop = self.api_servers.loop
        asyncio.run_coroutine_threadsafe(self._cancel(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        while loop.is_running():
            time.sleep(0.001)
        loop.close()
        for each in (*self.streams, *self.connections, self._listener):
            each.close()
        self._directory.cleanup()

    async def _cancel(self):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def ends():
    with contextlib.closing(Ends(2)) as ends:
        yield ends


def test_outputs_go_to_the_senders_of_their_requests(ends):
    ends.api_servers.announce(INFO)
    assert [ends.receive(0), ends.receive(1)] == [INFO, INFO]
    ends.api_servers.deliver(StepOutputs([columns_of([(1, 0, [7])])], []), None)
    ends.api_servers.deliver(StepOutputs(), {"running": 1.0})
    assert list(ends.receive(1).columns()) == [EngineOutput(request_id=first_id(1), token_ids=[7])]
    for api_server in (0, 1):
        assert ends.receive(api_server).stats == {"running": 1.0}


def test_more_experts_and_masks_than_a_frame_holds_arrive_in_several(ends, monkeypatch):
    """Their requests may all begin, or end, in one step."""
    monkeypatch.setattr(api_servers_module, "FRAME_ARRAY_BYTES", 1000)
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 2000)
    experts = ExpertIds(0, 1, 1, "|u1", bytes(900))
    masks = [TokenLogprobs(0.0, [], [], bytes(450))] * 2
    details = [EngineOutput(request_id=i, token_ids=[], routed_experts=experts) for i in range(3)]
    details += [EngineOutput(request_id=i, token_ids=[1, 2], logprobs=masks) for i in range(3)]
    ends.api_servers.deliver(StepOutputs([columns_of([(0, 9, [7])])], details), {"running": 6.0})
    received = [ends.receive(0) for _ in range(6)]
    assert [each for message in received for each in message.details] == details
    assert [len(message.columns()) for message in received] == [1, 0, 0, 0, 0, 0]
    assert [message.stats for message in received] == [{"running": 6.0}, *[None] * 5]


def test_an_api_server_that_connects_late_gets_the_engine_info(ends):
    ends.api_servers.announce(INFO)
    ends.connect(messages.Connect(7))
    assert ends.receive(-1) == INFO


@pytest.mark.parametrize("first", [messages.Connect(0), messages.StopEngine(), messages.Start("", "", EngineOptions())])
def test_no_other_connection_can_be_api_server_0(ends, first):
    """A connection must send `Connect` with another number first."""
    ends.connect(first)
    assert ends.connections[-1].recv(1) == b""
    assert not ends.stopped.is_set() and not ends.first_gone.is_set() and len(ends.api_servers._api_servers) == 2


def test_a_disconnect_is_reported_once(ends):
    ends.connections[1].shutdown(socket.SHUT_RDWR)
    api_server, message = ends.next_message()
    assert (api_server.sender, message) == (1, None)
    ends.api_servers.remove(api_server)
    ends.api_servers.deliver(StepOutputs(), {"running": 0.0})
    assert ends.receive(0).stats == {"running": 0.0}
    assert not ends.first_gone.is_set()


def test_an_api_server_that_does_not_read_is_dropped(ends, monkeypatch):
    """API server 0, which can kill its process, is notified."""
    monkeypatch.setattr(api_servers_module, "MAX_BUFFERED_BYTES", 2**20)
    monkeypatch.setattr(api_servers_module, "STALL_S", 0.05)
    big = StepOutputs([columns_of([(1, i, [0]) for i in range(100_000)])], [])
    for _ in range(3):
        ends.api_servers.deliver(big, None)
    assert isinstance(ends.receive(0), messages.ApiServerDropped)
    api_server, message = ends.next_message()
    assert (api_server.sender, message) == (1, None)
    assert not ends.first_gone.is_set()


def test_a_step_with_more_than_the_buffer_reaches_an_api_server_that_reads(ends, monkeypatch):
    """Hundreds of rollouts with experts may end together."""
    monkeypatch.setattr(api_servers_module, "MAX_BUFFERED_BYTES", 2**20)
    monkeypatch.setattr(api_servers_module, "FRAME_ARRAY_BYTES", 2**20)
    experts = ExpertIds(0, 1, 1, "|u1", bytes(2**20))
    details = [EngineOutput(request_id=i, token_ids=[], routed_experts=experts) for i in range(8)]
    ends.api_servers.deliver(StepOutputs([], details), None)
    assert [each for _ in details for each in ends.receive(0).details] == details
    assert not ends.first_gone.is_set()


def test_only_api_server_0_may_stop_the_engine(ends):
    ends.send(1, messages.StopEngine())
    ends.send(1, messages.Abort([5]))
    assert ends.next_message()[1] == messages.Abort([5])
    assert not ends.stopped.is_set()
    ends.send(0, messages.StopEngine())
    assert ends.stopped.wait(30)
    ends.connections[0].shutdown(socket.SHUT_RDWR)
    assert ends.first_gone.wait(30)


def test_an_add_in_several_frames_is_received_as_one(ends):
    """Messages of other API servers may arrive between its frames."""
    params = SamplingParams(n=2, max_tokens=1)
    rules = RequestRules(vocab_size=9, max_model_len=9)
    one, two, other = (
        prepare(EngineRequest(request_id=i, prompt_token_ids=[1], sampling=params), rules) for i in range(3)
    )
    ends.send(0, messages.Add([one], has_more=True))
    ends.send(1, messages.Add([other]))
    api_server, message = ends.next_message()
    assert (api_server.sender, message) == (1, messages.Add([other]))
    ends.send(0, messages.Add([two]))
    api_server, message = ends.next_message()
    assert (api_server.sender, message) == (0, messages.Add([one, two]))


def test_one_api_server_at_a_time_holds_the_lock():
    """The lock is held until its holder releases it or disconnects; a release by others has no effect."""
    with contextlib.closing(Ends(3)) as ends:
        ends.send(1, messages.AcquireLock())
        assert ends.receive(1) == messages.LockGranted()
        ends.send(2, messages.ReleaseLock())
        ends.send(2, messages.AcquireLock())
        ends.send(2, messages.Abort([7]))  # messages of an API server keep their order
        api_server, _ = ends.next_message()
        assert api_server.sender == 2
        ends.connections[1].shutdown(socket.SHUT_RDWR)
        api_server, message = ends.next_message()
        assert (api_server.sender, message) == (1, None)
        ends.api_servers.remove(api_server)
        assert ends.receive(2) == messages.LockGranted()


def test_an_error_in_a_message_handler_disconnects_the_api_server(ends, monkeypatch):
    put = ApiServerConnections._enqueue

    def no_memory(self, api_server, message):
        if message is not None:
            raise MemoryError
        put(self, api_server, message)

    monkeypatch.setattr(ApiServerConnections, "_enqueue", no_memory)
    ends.send(1, messages.Flush())
    api_server, message = ends.next_message()
    assert (api_server.sender, message) == (1, None)


def test_a_malformed_message_ends_the_connection(ends):
    ends.connections[1].sendall(b"\x04\0\0\0abcd")
    api_server, message = ends.next_message()
    assert (api_server.sender, message) == (1, None)
