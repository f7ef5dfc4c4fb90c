"""Bootstrap rooms: a decode instance finds its request in the prefill instance, in either order, or times out."""

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dsv3.kv_cache.tiers.host_pool import HostPool, host_pool_bytes
from dsv3.kv_cache.transfer import client, protocol
from dsv3.kv_cache.transfer import server as serving
from dsv3.kv_cache.transfer.client import Peers
from dsv3.kv_cache.transfer.protocol import PeerError, PeerHello
from dsv3.kv_cache.transfer.server import BootstrapRooms, PageServer

SIZE = 64
HELLO = PeerHello(protocol.VERSION, '{"weights":"w"}', SIZE)
SECRET = b"s" * 32


@pytest.fixture
def server() -> Iterator[PageServer]:
    host_pool = HostPool(np.zeros(host_pool_bytes(2, SIZE), np.uint8), SIZE, 2)
    server = PageServer("127.0.0.1", 0, SECRET, HELLO, host_pool, BootstrapRooms(["here:1", "there:2"]))
    yield server
    server.close()


def address_of(server: PageServer) -> str:
    return "{}:{}".format(*server.address)


def test_a_room_goes_from_queued_to_begun_and_stays_there():
    table = BootstrapRooms()
    for stage in ("queued", "begun", "gone"):
        table.update(None, stage)  # requests without a room
    table.update(1, "queued")
    table.update(2, "queued")
    table.update(1, "begun")
    table.update(1, "queued")  # another prompt of the same body
    table.update(1, "gone")
    table.update(2, "gone")
    table.update(3, "gone")
    assert table.stages([1, 2, 3]) == ["begun", "gone", "unknown"]


def test_the_oldest_rooms_are_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "_MAX_BOOTSTRAP_ROOMS", 2)
    table = BootstrapRooms()
    for number in (1, 2, 3):
        table.update(number, "queued")
    assert table.stages([1, 2, 3]) == ["unknown", "queued", "queued"]


def test_rooms_are_found_in_either_order_over_one_connection(server: PageServer):
    peers, connections = Peers(SECRET, HELLO), []
    connect = peers.rooms._connect
    peers.rooms._connect = lambda address: connections.append(connect(address)) or connections[-1]
    early = [peers.rooms.find(address_of(server), number) for number in range(20)]
    for number in range(20):
        server.bootstrap_rooms.update(number, "queued")
    for number in range(20):
        assert not early[number].done()
        server.bootstrap_rooms.update(number, "begun")
        assert early[number].result(60) == "here:1,there:2"
    late = peers.rooms.find(address_of(server), 7)
    assert late.result(60) == "here:1,there:2"
    assert len(connections) <= 2, "one, and another if the first has ended before the last room"


@pytest.mark.parametrize(
    ("stage", "words"),
    [("unknown", "has no request"), ("queued", "is still queued"), ("gone", "was aborted")],
)
def test_the_wait_for_a_request_that_does_not_begin_is_bounded(
    server: PageServer, monkeypatch: pytest.MonkeyPatch, stage: str, words: str
):
    monkeypatch.setattr(client, "UNKNOWN_ROOM_TIMEOUT_S", 0.0 if stage == "unknown" else 300.0)
    monkeypatch.setattr(client, "QUEUED_TIMEOUT_S", 0.0 if stage == "queued" else 300.0)
    if stage != "unknown":
        server.bootstrap_rooms.update(5, "queued")
    if stage == "gone":
        server.bootstrap_rooms.update(5, "gone")
    found = Peers(SECRET, HELLO).rooms.find(address_of(server), 5)
    with pytest.raises(PeerError, match=words):
        found.result(60)


def test_an_absent_or_dying_instance_fails_all_pending_rooms(server: PageServer, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        absent = "{}:{}".format(*listener.getsockname())
    peers = Peers(SECRET, HELLO)
    for words in ("refused", "less than 10 s ago"):
        with pytest.raises(PeerError, match=words):
            peers.rooms.find(absent, 1).result(60)
    asked = threading.Event()

    def dying(asked_for: list[int]) -> list[str]:
        asked.set()
        raise OSError("the process is killed")

    monkeypatch.setattr(server.bootstrap_rooms, "stages", dying)
    waits = [peers.rooms.find(address_of(server), number) for number in range(3)]
    assert asked.wait(60)
    for wait in waits:
        with pytest.raises(PeerError):
            wait.result(60)


def test_an_invalid_address_fails_all_pending_rooms():
    """IDNA rejects the name with an error that is not an OSError; it must not end the thread with rooms pending."""
    peers = Peers(SECRET, HELLO)
    for words in ("not a host and port", "less than 10 s ago"):
        waits = [peers.rooms.find("a..b:8998", number) for number in range(3)]
        for wait in waits:
            with pytest.raises(PeerError, match=f"{words}|less than 10 s ago"):
                wait.result(60)
    with pytest.raises(PeerError):
        peers.fetch("c..d:8998", [b"k" * 32], 0.0, lambda *_: None)


def test_any_error_of_the_polling_thread_fails_all_pending_rooms(monkeypatch: pytest.MonkeyPatch):
    def broken(address: str) -> None:
        raise KeyError("a bug")

    finder = client.RoomFinder(broken)
    with pytest.raises(PeerError, match="a bug"):
        finder.find("host:1", 1).result(60)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(PeerError, match="new thread"):
        finder.find("host:1", 1).result(60)
    assert not finder._pending_rooms


def test_polling_ends_without_pending_rooms(server: PageServer):
    peers = Peers(SECRET, HELLO)
    server.bootstrap_rooms.update(1, "begun")
    assert peers.rooms.find(address_of(server), 1).result(60)
    deadline = time.monotonic() + 60
    while peers.rooms._pending_rooms and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not peers.rooms._pending_rooms
