"""Frames: split from a stream that arrives in any pieces, or received one at a time."""

import asyncio
import socket

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from dsv3.processes import frames


class Said(msgspec.Struct):
    """A message of any size."""

    text: str


BODIES = st.lists(st.text(max_size=300), min_size=1, max_size=5)


@given(BODIES, st.integers(1, 50))
def test_frames_are_split_for_any_sizes_of_reads(texts, size):
    stream = b"".join(frames.encode(Said(text)) for text in texts)
    splitter = frames.Splitter()
    found = [bytes(body) for i in range(0, len(stream), size) for body in splitter.add(stream[i : i + size])]
    assert found == [msgspec.msgpack.encode(Said(text)) for text in texts]


@given(BODIES)
def test_one_frame_is_received_and_the_rest_stays(texts):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        first, *others = (frames.encode(Said(text)) for text in texts)
        theirs.sendall(first + b"".join(others))
        assert frames.receive_frame(ours) == first[frames.HEAD_BYTES :]
        theirs.shutdown(socket.SHUT_WR)
        rest = b"".join(others)
        assert ours.recv(len(rest) + 1, socket.MSG_WAITALL) == rest


@given(st.integers(0, 7))
def test_an_incomplete_frame_is_none(length):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frames.encode(Said("abc"))[:length])
        theirs.shutdown(socket.SHUT_WR)
        assert frames.receive_frame(ours) is None


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_last_frames_of_a_peer_arrive_although_a_write_fails(new_loop):
    """The peer sends and closes after this process has looked for data, and before it writes."""
    ours, theirs = socket.socketpair()
    received = []

    async def write_to_a_closed_end():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def on_end(error):
            received.append(error)
            ended.set()

        transport, _ = await loop.create_connection(
            lambda: frames.FrameProtocol(lambda body: received.append(bytes(body)), on_end), sock=ours
        )
        theirs.sendall(frames.encode(Said("first")) + frames.encode(Said("last")))
        theirs.close()
        transport.write(b"anything")
        await asyncio.wait_for(ended.wait(), 30)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(write_to_a_closed_end())
    assert received == [msgspec.msgpack.encode(Said(text)) for text in ("first", "last")] + [None]
