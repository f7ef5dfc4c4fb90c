"""Two instances that are handed the same request meet under its number, whoever comes first, and whoever does not."""

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


def test_a_meeting_goes_from_queued_to_begun_and_stays_there():
    table = BootstrapRooms()
    for step in (table.open, table.begin, table.leave):
        step(None)  # requests of no meeting
    table.open(1)
    table.open(2)
    table.begin(1)
    table.open(1)  # another prompt of the same body
    table.leave(1)
    table.leave(2)
    table.leave(3)
    assert table.stages([1, 2, 3]) == ["begun", "gone", "unknown"]


def test_old_meetings_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "_MOST_BOOTSTRAP_ROOMS", 2)
    table = BootstrapRooms()
    for number in (1, 2, 3):
        table.open(number)
    assert table.stages([1, 2, 3]) == ["unknown", "queued", "queued"]


def test_whoever_comes_first_waits_and_all_waits_share_a_connection(server: PageServer):
    peers, connections = Peers(SECRET, HELLO), []
    connect = peers._finder._connect
    peers._finder._connect = lambda address: connections.append(connect(address)) or connections[-1]
    early = [peers.find(address_of(server), number) for number in range(20)]
    for number in range(20):
        server.bootstrap_rooms.open(number)
    for number in range(20):
        assert not early[number].done()
        server.bootstrap_rooms.begin(number)
        assert early[number].result(60) == "here:1,there:2"
    late = peers.find(address_of(server), 7)
    assert late.result(60) == "here:1,there:2"
    assert len(connections) <= 2, "one, and another where the first had nobody to ask for any more"


@pytest.mark.parametrize(
    ("stage", "words"),
    [("unknown", "no request has come"), ("queued", "the queue still holds"), ("gone", "was given up")],
)
def test_a_request_that_does_not_begin_is_waited_for_so_long_and_no_longer(
    server: PageServer, monkeypatch: pytest.MonkeyPatch, stage: str, words: str
):
    monkeypatch.setattr(client, "COMES_S", 0.0 if stage == "unknown" else 300.0)
    monkeypatch.setattr(client, "BEGINS_S", 0.0 if stage == "queued" else 300.0)
    if stage != "unknown":
        server.bootstrap_rooms.open(5)
    if stage == "gone":
        server.bootstrap_rooms.leave(5)
    found = Peers(SECRET, HELLO).find(address_of(server), 5)
    with pytest.raises(PeerError, match=words):
        found.result(60)


def test_an_instance_that_is_not_there_or_dies_ends_all_waits(server: PageServer, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = "{}:{}".format(*listener.getsockname())
    peers = Peers(SECRET, HELLO)
    for words in ("refused", "a moment ago"):
        with pytest.raises(PeerError, match=words):
            peers.find(nobody, 1).result(60)
    asked = threading.Event()

    def dying(asked_for: list[int]) -> list[str]:
        asked.set()
        raise OSError("the process is killed")

    monkeypatch.setattr(server.bootstrap_rooms, "stages", dying)
    waits = [peers.find(address_of(server), number) for number in range(3)]
    assert asked.wait(60)
    for wait in waits:
        with pytest.raises(PeerError):
            wait.result(60)


def test_an_address_that_is_none_ends_all_waits():
    """IDNA has no such name, which is no OSError; the thread died, and the address was dead with it."""
    peers = Peers(SECRET, HELLO)
    for words in ("no host and port", "a moment ago"):
        waits = [peers.find("a..b:8998", number) for number in range(3)]
        for wait in waits:
            with pytest.raises(PeerError, match=f"{words}|a moment ago"):
                wait.result(60)
    with pytest.raises(PeerError):
        peers.fetch("c..d:8998", [b"k" * 32], 0.0, lambda *_: None)


def test_whatever_ends_the_thread_that_asks_ends_the_waits(monkeypatch: pytest.MonkeyPatch):
    def broken(address: str) -> None:
        raise KeyError("a bug")

    finder = client.Finder(broken)
    with pytest.raises(PeerError, match="a bug"):
        finder.find("host:1", 1).result(60)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(PeerError, match="new thread"):
        finder.find("host:1", 1).result(60)
    assert not finder._waits


def test_nobody_is_asked_while_nobody_waits(server: PageServer):
    peers = Peers(SECRET, HELLO)
    server.bootstrap_rooms.begin(1)
    assert peers.find(address_of(server), 1).result(60)
    deadline = time.monotonic() + 60
    while peers._finder._waits and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not peers._finder._waits
