"""Frames between processes that share a secret, and what other peers get."""

import socket
import ssl
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.engine.cluster import wire
from dsv3.engine.cluster.wire import NoAnswer, Wire, WireError, accept, connect
from dsv3.processes.certificates import Credentials, credentials_of
from tests.dsv3.engine.cluster.local import FRAME_OVERHEAD, wires

KEY, OTHER_KEY = bytes(range(48)), bytes(range(48, 96))


def shake(leader_key: bytes = KEY, follower_key: bytes = KEY, process_id: int = 1) -> list[object]:
    """Both sides of a handshake: what each returned or raised, and the two sockets."""
    ours, theirs = socket.socketpair()
    result: list[object] = [None, None, ours, theirs]

    def lead() -> None:
        try:
            result[0] = accept(ours, credentials_of(leader_key), 3)
        except WireError as error:
            result[0] = error
            ours.close()

    thread = threading.Thread(target=lead)
    thread.start()
    try:
        result[1] = connect(theirs, credentials_of(follower_key), process_id)
    except WireError as error:
        result[1] = error
    thread.join()
    return result


def pair() -> tuple[Wire, Wire]:
    return wires(*socket.socketpair())


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


def test_messages_received_together_are_split() -> None:
    """Without waiting, whether they are in the socket or were read with an earlier message."""
    leader, follower = pair()
    for body in (b"one", b"two", bytes(100_000)):
        leader.send(body)
    assert follower.receive() == b"one"
    taken: list[bytes] = []
    while len(taken) < 2:
        taken += follower.receive_available()
    assert taken == [b"two", bytes(100_000)] and list(follower.receive_available()) == []
    leader.close()
    with pytest.raises(EOFError):
        list(follower.receive_available())


def test_a_follower_with_another_key_is_refused() -> None:
    leader, follower, _, _ = shake(follower_key=OTHER_KEY)
    assert "has another key" in str(leader)
    assert "cluster_key_file" in str(follower) and not isinstance(follower, NoAnswer)


@pytest.mark.parametrize("process_id", [0, 3, 2**32 - 1])
def test_impossible_process_ids_are_refused(process_id: int) -> None:
    leader, follower, _, _ = shake(process_id=process_id)
    assert f"process id {process_id} is not from 1 to 2" in str(leader)
    assert f"refused this process: process id {process_id} is not from 1 to 2" in str(follower)


def client(connection: socket.socket, credentials: Credentials | None) -> ssl.SSLSocket:
    """A client that trusts any leader; shows a certificate of its own, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if credentials is not None:
        context.load_cert_chain(credentials.certificate, credentials.private_key)
    return context.wrap_socket(connection)


@pytest.mark.parametrize("credentials", [None, credentials_of(OTHER_KEY)])
def test_a_client_with_another_certificate_or_none_is_refused(credentials: Credentials | None) -> None:
    ours, theirs = socket.socketpair()
    refused: list[WireError] = []

    def lead() -> None:
        with pytest.raises(WireError, match="has another key") as caught:
            accept(ours, credentials_of(KEY), 3)
        refused.append(caught.value)

    thread = threading.Thread(target=lead)
    thread.start()
    with client(theirs, credentials) as stranger, pytest.raises(ssl.SSLError):
        stranger.sendall(b"\x04\0\0\0\x01\0\0\0")
        stranger.recv(100)
    thread.join()
    assert refused
    ours.close()


def test_a_leader_that_does_not_know_the_key_is_not_followed() -> None:
    """Whatever certificate of its own it shows."""
    leader, follower, _, _ = shake(leader_key=OTHER_KEY)
    assert isinstance(leader, WireError)
    assert "the leader has another key" in str(follower)


def test_another_service_at_the_port_is_recognized() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    with pytest.raises(WireError, match="something else answers"):
        connect(theirs, credentials_of(KEY), 1)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_instead_of_a_handshake_is_refused(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError):
        accept(ours, credentials_of(KEY), 3)
    ours.close()
    assert len(theirs.recv(4096)) <= 7  # an alert


@pytest.mark.parametrize("hello", [b"", b"\x16\x03\x03\x00\x7a\x02"])
def test_a_connection_that_ends_during_the_handshake_may_be_retried(hello: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(hello)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(NoAnswer):
        connect(theirs, credentials_of(KEY), 1)


def test_a_connection_that_ends_after_the_handshake_may_be_retried() -> None:
    ours, theirs = socket.socketpair()
    leader = Wire(ours, credentials_of(KEY), is_server=True)

    def lead() -> None:
        leader.shake_hands(time.monotonic() + 60)
        leader.end()

    thread = threading.Thread(target=lead)
    thread.start()
    with pytest.raises(NoAnswer):
        connect(theirs, credentials_of(KEY), 1)
    thread.join()


def test_a_peer_that_says_nothing_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.05)
    ours, theirs = socket.socketpair()
    with pytest.raises(WireError, match="did not complete"):
        accept(ours, credentials_of(KEY), 3)
    theirs.close()


def captured(body: bytes) -> tuple[Wire, socket.socket, bytes]:
    """A receiving end, a socket that leads to it, and a frame that the real sender has made for it."""
    ours, theirs = socket.socketpair()
    leader, follower = wires(ours, theirs)
    leader.send(body)
    frame = theirs.recv(2**16)
    assert len(frame) == len(body) + FRAME_OVERHEAD
    return follower, ours, frame


def test_what_is_sent_cannot_be_read_on_the_way() -> None:
    _, _, frame = captured(b"prompts travel as token ids")
    assert b"token" not in frame


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
        assert receiver.receive() is None  # a longer record: the rest never comes
        assert 24 <= position < 40
    except WireError:
        pass


def test_a_replayed_frame_is_noticed() -> None:
    receiver, sender, frame = captured(b"again")
    sender.sendall(frame + frame)
    assert receiver.receive() == b"again"
    with pytest.raises(WireError, match="an invalid TLS record"):
        receiver.receive()


def test_a_frame_sent_back_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    leader, _ = wires(ours, theirs)
    leader.send(b"mine")
    theirs.sendall(theirs.recv(2**16))
    with pytest.raises(WireError, match="an invalid TLS record"):
        leader.receive()
    ours.close()


def test_a_length_beyond_all_bounds_is_refused_before_anything_is_read() -> None:
    leader, follower = pair()
    leader._tls.write(b"\xff\xff\xff\xff")
    leader.pump()
    with pytest.raises(WireError, match="4294967295 bytes"):
        follower.receive()


def test_a_long_message_is_sent_in_parts() -> None:
    leader, follower = pair()
    bodies = [bytes(range(256)) * (size // 256) + b"x" * (size % 256) for size in (2**20, 2**20 + 1, 3 * 2**20, 7)]
    threading.Thread(target=lambda: [leader.send(body) for body in bodies]).start()
    assert [follower.receive() for _ in bodies] == bodies


def test_a_message_beyond_a_limit_is_refused_before_it_is_read() -> None:
    leader, follower = pair()
    sending = threading.Thread(target=leader.send, args=(bytes(2**21),))
    sending.start()
    with pytest.raises(WireError, match=f"{2**21} bytes; the limit is {2**21 - 1}"):
        follower.receive(limit=2**21 - 1)
    follower.discard(1.0)
    sending.join()


def test_a_message_that_is_too_long_is_not_sent(monkeypatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1000)
    leader, _ = pair()
    with pytest.raises(WireError, match="a message of 1001 bytes, at most 1000"):
        leader.send(bytes(1001))


def test_a_cut_connection_ends_a_frame_half_way() -> None:
    receiver, sender, frame = captured(b"half")
    sender.sendall(frame[:-1])
    sender.shutdown(socket.SHUT_WR)
    assert receiver.receive() is None
