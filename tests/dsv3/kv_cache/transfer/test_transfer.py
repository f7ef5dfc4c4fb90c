"""KV transfer between two instances by sockets, and the failures of either."""

import socket
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from dsv3.kv_cache.page_keys import make_header
from dsv3.kv_cache.tiers.host_pool import HostPool, host_pool_bytes
from dsv3.kv_cache.transfer import protocol
from dsv3.kv_cache.transfer import server as server_module
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


class Received(dict[bytes, np.ndarray]):
    def __call__(self, key: bytes, value: np.ndarray) -> None:
        self[key] = value.copy()

    def check(self, *numbers: int) -> None:
        assert list(self) == [key(i) for i in numbers]
        for i in numbers:
            np.testing.assert_array_equal(self[key(i)], payload(i))


def address_of(server: PageServer) -> str:
    return "{}:{}".format(*server.address)


def fetch(peers: Peers, address: str, *numbers: int, patience_s: float = 0.0) -> Received:
    received = Received()
    assert peers.fetch(address, [key(i) for i in numbers], patience_s, received) == len(received)
    return received


def test_pages_arrive_in_order_up_to_the_first_missing_one(server: PageServer):
    peers = Peers(SECRET, HELLO)
    fetch(peers, address_of(server), 3, 0, 4).check(3, 0, 4)
    fetch(peers, address_of(server), 1, 9, 2).check(1)
    fetch(peers, address_of(server), 9).check()
    assert server.pages_sent == 4
    assert len(peers._idle) == 1, "one connection serves them all"


def test_a_fetch_waits_for_a_page_that_is_still_computed(server: PageServer, host_pool: HostPool):
    later = threading.Timer(0.05, host_pool.put, (key(7), payload(7)))
    later.start()
    fetch(Peers(SECRET, HELLO), address_of(server), 0, 7, 8, patience_s=0.3).check(0, 7)


def test_a_fetch_of_more_pages_than_one_request_holds(server: PageServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "MAX_KEYS", 2)
    fetch(Peers(SECRET, HELLO), address_of(server), 0, 1, 2, 3, 4).check(0, 1, 2, 3, 4)
    fetch(Peers(SECRET, HELLO), address_of(server), 0, 1, 2, 9, 4).check(0, 1, 2)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (PeerHello(9, HELLO.identity, SIZE), r"protocol version \(3 here, 9 there\)"),
        (PeerHello(3, '{"weights":"v","cache_dtype":"float32"}', SIZE), r"weights \(w here, v there\)$"),
        (PeerHello(3, '{"weights":"w","cache_dtype":"fp8"}', SIZE), r"cache_dtype \(float32 here, fp8 there\)$"),
        (PeerHello(3, HELLO.identity, SIZE + 1), rf"bytes of a page \({SIZE} here, {SIZE + 1} there\)"),
    ],
)
def test_a_different_model_is_refused_with_the_fields_that_differ(server: PageServer, hello: PeerHello, words: str):
    with pytest.raises(PeerError, match=f"it refused: {words}"):
        fetch(Peers(SECRET, hello), address_of(server), 0)


def test_a_different_secret_gets_no_pages(server: PageServer):
    with pytest.raises(PeerError):
        fetch(Peers(b"t" * 32, HELLO), address_of(server), 0)
    assert server.pages_sent == 0
    fetch(Peers(SECRET, HELLO), address_of(server), 0).check(0)


def test_unauthenticated_connections_get_nothing_and_are_bounded(server: PageServer, monkeypatch: pytest.MonkeyPatch):
    """Silent connections are closed when newer ones arrive, long before their timeout."""
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 300.0)
    connections = [socket.create_connection(server.address, 5) for _ in range(80)]
    connections[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    fetch(Peers(SECRET, HELLO), address_of(server), 0, 1).check(0, 1)
    for each in connections[:10]:
        each.settimeout(60)
        assert each.recv(1000) == b"", "closed for a newer one"
    for each in connections:
        each.close()


def test_a_connection_for_which_there_is_no_thread_is_closed(server: PageServer, monkeypatch: pytest.MonkeyPatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with socket.create_connection(server.address, 2.0) as connection:
        assert connection.recv(1) == b""


def test_a_server_that_nothing_refers_to_returns_its_port_and_its_memory():
    host_pool = HostPool(np.zeros(host_pool_bytes(2, SIZE), np.uint8), SIZE, 2)
    server, kept = PageServer("127.0.0.1", 0, SECRET, HELLO, host_pool), weakref.ref(host_pool)
    address = server.address
    del server, host_pool
    assert kept() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 5)


def test_a_failed_peer_is_not_tried_again_for_a_while(server: PageServer):
    peers, address = Peers(SECRET, HELLO), address_of(server)
    fetch(peers, address, 0)
    server.close()
    for connection in list(peers._idle):
        connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerError, match=address):
        fetch(peers, address, 0)
    with pytest.raises(PeerError, match="failed less than 10 s ago"):
        fetch(peers, address, 0)


def test_a_fetch_reconnects_when_an_idle_connection_has_ended(server: PageServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "IDLE_S", 0.05)
    peers = Peers(SECRET, HELLO)
    fetch(peers, address_of(server), 0)
    time.sleep(0.2)
    monkeypatch.setattr(protocol, "IDLE_S", 60.0)  # the client still takes it for open
    fetch(peers, address_of(server), 1).check(1)


def _serve_once(answer: bytes | None) -> str:
    """Serves one handshake and answers the first request with `answer`; None: never. Returns the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with tls_context(credentials_of(SECRET), True).wrap_socket(connection, server_side=True) as tls:
            protocol.receive(tls, PeerHello)
            protocol.send(tls, protocol.HelloAnswer())
            protocol.receive(tls, protocol.FetchPages)
            if answer is None:
                time.sleep(1)
            else:
                tls.sendall(answer)
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return "{}:{}".format(*listener.getsockname())


def _page(i: int, of: int | None = None) -> bytes:
    """A page on the wire, with the header of `of`."""
    return protocol.PAGE_FOLLOWS + make_header(key(i if of is None else of), payload(i)).pack() + payload(i).tobytes()


GOOD = _page(0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_page(1), "not the requested one"),
        (_page(1, of=0)[:-1] + b"\x00", "damaged, or not"),
        (GOOD[:200], "too early"),
        (GOOD + b"\x01", "more pages"),
        (protocol.PAGE_FOLLOWS + bytes(128), "header is damaged"),
        (protocol.PAGE_FOLLOWS + make_header(key(0), payload(0)[:10]).pack(), "a page has 10 bytes"),
        (b"", "too early"),
    ],
    ids=["another-page", "damaged", "cut", "too-many", "no-header", "short", "nothing"],
)
def test_pages_that_do_not_verify_are_not_delivered(answer: bytes, words: str):
    received = Received()
    with pytest.raises(PeerError, match=words):
        Peers(SECRET, HELLO).fetch(_serve_once(answer), [key(0)], 0.0, received)
    received.check(*([0] if answer.startswith(GOOD) else []))


def test_a_silent_peer_times_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "STALL_S", 0.1)
    with pytest.raises(PeerError, match="timed out"):
        Peers(SECRET, HELLO).fetch(_serve_once(None), [key(0)], 0.0, Received())


def test_a_port_in_use_is_an_error(server: PageServer, host_pool: HostPool):
    with pytest.raises(ValueError, match="transfer_address: cannot listen"):
        PageServer("127.0.0.1", server.address[1], SECRET, HELLO, host_pool)


def test_a_client_that_hangs_up_before_the_answer_takes_no_place(host_pool: HostPool, monkeypatch: pytest.MonkeyPatch):
    class HungUp:
        def sendall(self, _: bytes) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(server_module, "_MAX_PEERS", 1)
    server = PageServer("127.0.0.1", 0, SECRET, HELLO, host_pool)
    for _ in range(2):
        with pytest.raises(BrokenPipeError):
            server._serve_peer(HungUp(), HELLO)
    fetch(Peers(SECRET, HELLO), address_of(server), 0).check(0)
    server.close()
