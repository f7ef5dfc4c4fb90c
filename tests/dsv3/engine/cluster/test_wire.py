"""Frames between processes that share a secret, and what everyone else gets."""

import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.engine.cluster import wire
from dsv3.engine.cluster.wire import Unanswered, Wire, WireError, accept, connect

KEY = bytes(range(48))


def shake(leader_key: bytes = KEY, follower_key: bytes = KEY, process_id: int = 1) -> list[object]:
    """Both sides of a handshake: what each returned or raised, and the two sockets."""
    ours, theirs = socket.socketpair()
    result: list[object] = [None, None, ours, theirs]

    def lead() -> None:
        try:
            result[0] = accept(ours, leader_key, 3)
        except WireError as error:
            result[0] = error
            ours.close()

    thread = threading.Thread(target=lead)
    thread.start()
    try:
        result[1] = connect(theirs, follower_key, process_id)
    except WireError as error:
        result[1] = error
    thread.join()
    return result


def pair() -> tuple[Wire, Wire]:
    leader, follower, _, _ = shake()
    return leader[1], follower


def test_both_ends_of_a_handshake_know_each_other() -> None:
    (process_id, leader), follower, _, _ = shake(process_id=2)
    assert process_id == 2
    for body in (b"", b"a", bytes(200_000)):
        leader.send(body)
        assert follower.receive() == body
        follower.send(body)
        assert leader.receive() == body
    follower.close()
    assert leader.receive() is None


def test_a_follower_with_another_key_is_refused() -> None:
    leader, follower, _, _ = shake(follower_key=KEY[::-1])
    assert "does not know the key" in str(leader)
    assert "cluster_key_file" in str(follower)


@pytest.mark.parametrize("process_id", [0, 3, 2**32 - 1])
def test_process_ids_that_cannot_be_are_refused(process_id: int) -> None:
    leader, follower, _, _ = shake(process_id=process_id)
    assert "is not from 1 to 2" in str(leader)
    assert "num_processes" in str(follower)


def test_a_leader_that_does_not_know_the_key_is_not_followed() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(wire._MAGIC + bytes(32) + b"?" * 32)  # a nonce, and a guess at the answer
    with pytest.raises(WireError, match="does not know the key"):
        connect(theirs, KEY, 1)


def test_something_else_at_the_port_is_told_apart() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    with pytest.raises(WireError, match="something else answers"):
        connect(theirs, KEY, 1)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_instead_of_a_proof_is_refused(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError):
        accept(ours, KEY, 3)
    ours.close()
    learned = theirs.recv(4096)
    assert len(learned) in (len(wire._MAGIC) + 32, len(wire._MAGIC) + 64)  # a nonce, and whether it is refused
    assert not any(learned[len(wire._MAGIC) + 32 :])


@pytest.mark.parametrize("hello", [b"", b"dsv3", wire._MAGIC + bytes(32)])
def test_a_connection_that_ends_before_the_leaders_proof_is_no_refusal(hello: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(hello)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(Unanswered):
        connect(theirs, KEY, 1)


def test_a_peer_that_says_nothing_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.05)
    ours, theirs = socket.socketpair()
    with pytest.raises(WireError, match="did not complete"):
        accept(ours, KEY, 3)
    theirs.close()


def captured(body: bytes) -> tuple[Wire, socket.socket, bytes]:
    """A receiving end, a socket that leads to it, and a frame that the true sender has made for it."""
    leader, follower, ours, theirs = shake()
    leader[1].send(body)
    frame = theirs.recv(2**16)
    return follower, ours, frame


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=40), st.data())
def test_a_changed_bit_anywhere_is_noticed(body: bytes, data: st.DataObject) -> None:
    receiver, sender, frame = captured(body)
    position = data.draw(st.integers(0, len(frame) * 8 - 1))
    changed = bytearray(frame)
    changed[position // 8] ^= 1 << position % 8
    sender.sendall(changed)
    sender.shutdown(socket.SHUT_WR)
    try:
        assert receiver.receive() is None  # a longer length: the rest never comes
        assert position < 32
    except WireError:
        pass


def test_a_replayed_frame_is_noticed() -> None:
    receiver, sender, frame = captured(b"again")
    sender.sendall(frame + frame)
    assert receiver.receive() == b"again"
    with pytest.raises(WireError, match="MAC"):
        receiver.receive()


def test_a_frame_sent_back_is_noticed() -> None:
    leader, _, ours, theirs = shake()
    leader[1].send(b"mine")
    theirs.sendall(theirs.recv(2**16))
    with pytest.raises(WireError, match="MAC"):
        leader[1].receive()
    ours.close()


def test_a_length_beyond_all_bounds_is_refused_before_anything_is_read() -> None:
    receiver, sender, frame = captured(b"x")
    sender.sendall(b"\xff\xff\xff\xff" + frame[4:])
    with pytest.raises(WireError, match="4294967295 bytes"):
        receiver.receive()


def test_a_message_that_no_frame_holds_is_not_sent() -> None:
    leader, _ = pair()
    with pytest.raises(WireError, match="fit a frame"):
        leader.send(bytes(wire.MAX_FRAME_BYTES + 1))


def test_a_cut_connection_ends_a_frame_half_way() -> None:
    receiver, sender, frame = captured(b"half")
    sender.sendall(frame[:-1])
    sender.shutdown(socket.SHUT_WR)
    assert receiver.receive() is None
