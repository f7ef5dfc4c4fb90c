"""The channel between two processes, over real sockets: last messages, limits, and errors of the sending thread."""

import queue
import socket
import time

import pytest

from dsv3.engine.cluster.channel import Channel, ChannelError
from dsv3.engine.cluster.wire import MAX_MESSAGE_BYTES, Wire
from tests.dsv3.engine.cluster import local


class End:
    """A channel over one end of a connection, and its callbacks."""

    def __init__(self, connection: socket.socket, wire: Wire, heartbeat=lambda: b"beat", take=None, heartbeat_s=60.0):
        self.connection, self.wire = connection, wire
        self.messages: queue.Queue[bytes] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()
        self.channel = Channel(self.wire, heartbeat, take or self.messages.put, self.ends.put, heartbeat_s)

    def start(self) -> "End":
        self.channel.start()
        return self


def sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


@pytest.fixture
def pair():
    """Makes two ends that have not started; arguments go to the first."""
    made: list[End] = []

    def make(**settings) -> tuple[End, End]:
        ours, theirs = sockets()
        wires = local.wires(ours, theirs)
        made.extend([End(ours, wires[0], **settings), End(theirs, wires[1])])
        return made[-2], made[-1]

    yield make
    for end in made:
        end.wire.close()


def test_the_last_message_is_read_after_the_connection_has_ended(pair) -> None:
    """The reader's own sending fails first: it must not hide the data in its receive buffer."""
    ours, theirs = pair()
    ours.start()
    ours.channel.send(b"one")
    ours.channel.send_last(b"the reason")
    ours.channel.send(b"too late")
    length = len(b"one") + len(b"the reason") + 2 * local.FRAME_OVERHEAD
    while len(theirs.connection.recv(1000, socket.MSG_PEEK)) < length:
        time.sleep(0.01)
    ours.wire.close()
    with pytest.raises(ConnectionError):  # the first one provokes a reset, which a later one meets
        while True:
            theirs.wire.send(bytes(1000))
    theirs.start()
    theirs.channel.send(b"into the void")
    assert theirs.messages.get(timeout=30) == b"one"
    assert theirs.messages.get(timeout=30) == b"the reason"
    assert theirs.ends.get(timeout=30) == "has ended, or the connection to it is broken"
    assert theirs.messages.empty()


def test_many_channels_send_and_receive_at_once(pair) -> None:
    """Frames of many records, and of more than a socket holds, on one thread."""
    bodies = [bytes([i]) * (i * 5000) for i in range(60)] + [bytes(5 * 2**20)]
    ends = [end.start() for _ in range(4) for end in pair()]
    for body in bodies:
        for end in ends:
            end.channel.send(body)
    for end in ends:
        assert [end.messages.get(timeout=60) for _ in bodies] == bodies


def test_a_connection_that_is_stuck_holds_up_no_other_one(pair) -> None:
    stuck, _ = pair()
    stuck.start().channel.send(bytes(50 * 2**20))  # never read
    ours, theirs = (end.start() for end in pair())
    ours.channel.send(b"goes")
    assert theirs.messages.get(timeout=60) == b"goes"


def test_closed_means_the_peer_has_read_everything_even_an_invalid_message(pair) -> None:
    def refuse(body: bytes) -> None:
        raise ValueError("nonsense")

    ours, theirs = (end.start() for end in pair(take=refuse))
    theirs.channel.send(b"?")
    assert ours.ends.get(timeout=30) == "sent an invalid message (ValueError: nonsense)"
    ours.channel.send_last(b"the reason")
    assert theirs.messages.get(timeout=30) == b"the reason"
    assert not ours.channel.closed.is_set()
    theirs.channel.send(b"unread at the end, it would reset the connection")
    theirs.channel.send_last(b"")
    assert ours.channel.closed.wait(30) and theirs.channel.closed.wait(30)
    assert ours.ends.empty()


def test_a_message_that_is_too_long_is_refused_where_it_is_made(pair) -> None:
    ours, theirs = (end.start() for end in pair())
    with pytest.raises(ChannelError, match=f"message of {MAX_MESSAGE_BYTES + 1} bytes, at most {MAX_MESSAGE_BYTES}"):
        ours.channel.send(bytes(MAX_MESSAGE_BYTES + 1))
    ours.channel.send(b"the next one goes")
    assert theirs.messages.get(timeout=30) == b"the next one goes"


def test_an_error_of_the_sending_thread_is_reported(pair) -> None:
    def fail() -> bytes:
        raise RuntimeError("no pulse")

    ours, theirs = pair(heartbeat=fail, heartbeat_s=0.01)
    theirs.start()
    theirs.channel.send(b"heard before")
    ours.start()
    assert ours.ends.get(timeout=30) == "can no longer be sent to (RuntimeError: no pulse)"
    assert ours.channel.closed.is_set()


def test_a_last_message_that_is_too_long_is_reported(pair) -> None:
    ours, _ = (end.start() for end in pair())
    ours.channel.send_last(bytes(MAX_MESSAGE_BYTES + 1))
    assert "WireError" in ours.ends.get(timeout=30)


def test_heartbeats_break_the_silence(pair) -> None:
    _, theirs = (end.start() for end in pair(heartbeat_s=0.01))
    assert theirs.messages.get(timeout=30) == b"beat"


def test_heartbeats_are_received_after_the_last_message_is_sent(pair) -> None:
    ours, theirs = (end.start() for end in pair(heartbeat_s=0.01))
    theirs.channel.send_last(b"the reason")
    assert ours.messages.get(timeout=30) == b"the reason" and ours.channel.closed.wait(30)
    while not theirs.messages.empty():
        theirs.messages.get()
    assert [theirs.messages.get(timeout=30) for _ in range(3)] == [b"beat"] * 3
    ours.channel.send_last(b"heard")
    while theirs.messages.get(timeout=30) != b"heard":
        pass
    assert theirs.channel.closed.wait(30)
