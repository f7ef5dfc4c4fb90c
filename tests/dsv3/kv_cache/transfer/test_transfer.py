"""Pages from one instance to another, and every way in which the other can fail."""

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dsv3.kv_cache.page_keys import header_of
from dsv3.kv_cache.tiers.host_pool import HostPool, host_pool_bytes
from dsv3.kv_cache.transfer import protocol
from dsv3.kv_cache.transfer.client import Peers
from dsv3.kv_cache.transfer.protocol import PeerError, PeerHello
from dsv3.kv_cache.transfer.server import PageServer
from dsv3.processes.certificates import credentials_of, tls_context

SIZE = 40_000
SECRET = b"s" * 32
HELLO = PeerHello(protocol.VERSION, '{"weights":"w","cache_dtype":"float32"}', SIZE)


def key(i: int) -> bytes:
    return i.to_bytes(32, "little")


def payload(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def host_pool() -> HostPool:
    host_pool = HostPool(np.zeros(host_pool_bytes(8, SIZE), np.uint8), SIZE, 8)
    for i in range(5):
        host_pool.put(key(i), payload(i))
    return host_pool


@pytest.fixture
def server(host_pool: HostPool) -> Iterator[PageServer]:
    server = PageServer("127.0.0.1", 0, SECRET, HELLO, host_pool)
    yield server
    server.close()


class Landed(dict[bytes, np.ndarray]):
    def __call__(self, key: bytes, value: np.ndarray) -> None:
        self[key] = value.copy()

    def check(self, *numbers: int) -> None:
        assert list(self) == [key(i) for i in numbers]
        for i in numbers:
            np.testing.assert_array_equal(self[key(i)], payload(i))


def address_of(server: PageServer) -> str:
    return "{}:{}".format(*server.address)


def fetch(peers: Peers, address: str, *numbers: int, patience_s: float = 0.0) -> Landed:
    landed = Landed()
    assert peers.fetch(address, [key(i) for i in numbers], patience_s, landed) == len(landed)
    return landed


def test_pages_come_in_order_up_to_the_first_that_is_not_there(server: PageServer):
    peers = Peers(SECRET, HELLO)
    fetch(peers, address_of(server), 3, 0, 4).check(3, 0, 4)
    fetch(peers, address_of(server), 1, 9, 2).check(1)
    fetch(peers, address_of(server), 9).check()
    assert server.pages_sent == 4
    assert len(peers._idle) == 1, "one connection serves them all"


def test_a_page_that_is_still_computed_is_waited_for(server: PageServer, host_pool: HostPool):
    later = threading.Timer(0.05, host_pool.put, (key(7), payload(7)))
    later.start()
    fetch(Peers(SECRET, HELLO), address_of(server), 0, 7, 8, patience_s=0.3).check(0, 7)


def test_more_pages_than_one_question_holds(server: PageServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "MAX_KEYS", 2)
    fetch(Peers(SECRET, HELLO), address_of(server), 0, 1, 2, 3, 4).check(0, 1, 2, 3, 4)
    fetch(Peers(SECRET, HELLO), address_of(server), 0, 1, 2, 9, 4).check(0, 1, 2)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (PeerHello(9, HELLO.identity, SIZE), r"protocol version \(2 here, 9 there\)"),
        (PeerHello(2, '{"weights":"v","cache_dtype":"float32"}', SIZE), r"weights \(w here, v there\)$"),
        (PeerHello(2, '{"weights":"w","cache_dtype":"fp8"}', SIZE), r"cache_dtype \(float32 here, fp8 there\)$"),
        (PeerHello(2, HELLO.identity, SIZE + 1), "the bytes of a page"),
    ],
)
def test_another_model_is_refused_by_the_name_of_what_differs(server: PageServer, hello: PeerHello, words: str):
    with pytest.raises(PeerError, match=f"it refused: {words}"):
        fetch(Peers(SECRET, hello), address_of(server), 0)


def test_another_secret_gets_nothing(server: PageServer):
    with pytest.raises(PeerError):
        fetch(Peers(b"t" * 32, HELLO), address_of(server), 0)
    assert server.pages_sent == 0
    fetch(Peers(SECRET, HELLO), address_of(server), 0).check(0)


def test_strangers_neither_get_nor_hold_anything(server: PageServer, monkeypatch: pytest.MonkeyPatch):
    """Those that say nothing are displaced by those that come after them, long before their time is over."""
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 300.0)
    strangers = [socket.create_connection(server.address, 5) for _ in range(80)]
    strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    fetch(Peers(SECRET, HELLO), address_of(server), 0, 1).check(0, 1)
    for each in strangers[:10]:
        each.settimeout(60)
        assert each.recv(1000) == b"", "it has been displaced"
    for each in strangers:
        each.close()


def test_a_peer_that_has_ended_is_avoided_for_a_while(server: PageServer):
    peers, address = Peers(SECRET, HELLO), address_of(server)
    fetch(peers, address, 0)
    server.close()
    for connection in list(peers._idle):
        connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerError, match=address):
        fetch(peers, address, 0)
    with pytest.raises(PeerError, match="a moment ago"):
        fetch(peers, address, 0)


def test_a_kept_connection_that_has_ended_is_made_anew(server: PageServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "IDLE_S", 0.05)
    peers = Peers(SECRET, HELLO)
    fetch(peers, address_of(server), 0)
    time.sleep(0.2)
    monkeypatch.setattr(protocol, "IDLE_S", 60.0)  # it is still thought to be good
    fetch(peers, address_of(server), 1).check(1)


def _serve_once(answer: bytes | None) -> str:
    """Greets one instance as a server does, then answers its Want with `answer`; None: never. Returns its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with tls_context(credentials_of(SECRET), True).wrap_socket(connection, server_side=True) as tls:
            protocol.receive(tls, PeerHello)
            protocol.send(tls, protocol.HelloAnswer())
            protocol.receive(tls, protocol.Want)
            if answer is None:
                time.sleep(1)
            else:
                tls.sendall(answer)
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return "{}:{}".format(*listener.getsockname())


def _value(i: int, of: int | None = None) -> bytes:
    """A page as it is sent, with the header of `of`."""
    return protocol.HAVE + header_of(key(i if of is None else of), payload(i)).pack() + payload(i).tobytes()


GOOD = _value(0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_value(1), "not the one asked for"),
        (_value(1, of=0)[:-1] + b"\x00", "damaged|not the one"),
        (GOOD[:200], "too early"),
        (GOOD + b"\x01", "more pages"),
        (protocol.HAVE + bytes(128), "without a whole header"),
        (protocol.HAVE + header_of(key(0), payload(0)[:10]).pack(), "a page of 10 bytes"),
        (b"", "too early"),
    ],
    ids=["another-page", "damaged", "cut", "too-many", "no-header", "short", "nothing"],
)
def test_what_does_not_verify_is_not_landed(answer: bytes, words: str):
    landed = Landed()
    with pytest.raises(PeerError, match=words):
        Peers(SECRET, HELLO).fetch(_serve_once(answer), [key(0)], 0.0, landed)
    landed.check(*([0] if answer.startswith(GOOD) else []))


def test_a_peer_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "STALL_S", 0.1)
    with pytest.raises(PeerError, match="timed out"):
        Peers(SECRET, HELLO).fetch(_serve_once(None), [key(0)], 0.0, Landed())


def test_a_port_in_use_is_told(server: PageServer, host_pool: HostPool):
    with pytest.raises(ValueError, match="transfer_address: cannot listen"):
        PageServer("127.0.0.1", server.address[1], SECRET, HELLO, host_pool)
