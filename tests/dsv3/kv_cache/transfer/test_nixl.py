"""Pages that are read out of another instance's memory, and every way in which that can fail: sockets are left.

An agent inside of this process stands for NIXL's; where nixl is installed, the real one passes the same tests.
"""

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.kv_cache.tiers.counts import TierCounts
from dsv3.kv_cache.tiers.host_pool import HostPool, host_pool_bytes
from dsv3.kv_cache.transfer import nixl, protocol
from dsv3.kv_cache.transfer.client import Peers
from dsv3.kv_cache.transfer.nixl import Agent, MemoryReader, open_agent, open_nixl, share
from dsv3.kv_cache.transfer.protocol import PeerHello
from dsv3.kv_cache.transfer.server import PageServer
from tests.dsv3.kv_cache.transfer.fake_agent import FakeAgent

SIZE = 5_000
SECRET = b"s" * 32
HELLO = PeerHello(protocol.VERSION, '{"weights":"w"}', SIZE)
ALL = range(5)


def key(i: int) -> bytes:
    return i.to_bytes(32, "little")


def payload(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, SIZE, np.uint8)


def make_host_pool(blocks: int, keys: range = ALL) -> HostPool:
    host_pool = HostPool(np.zeros(host_pool_bytes(blocks, SIZE), np.uint8), SIZE, blocks)
    for i in keys:
        host_pool.put(key(i), payload(i))
    return host_pool


class Two(NamedTuple):
    """An instance that gives pages and one that fetches them, with their agents."""

    host_pool: HostPool
    server: PageServer
    theirs: Agent
    reader: MemoryReader
    mine: Agent
    peers: Peers

    @property
    def address(self) -> str:
        return "{}:{}".format(*self.server.address)

    def fetch(self, *numbers: int, patience_s: float = 0.0) -> list[int]:
        """Fetches pages, checks each; returns their numbers."""
        landed: list[int] = []

        def land(key: bytes, value: np.ndarray) -> None:
            i = int.from_bytes(key, "little")
            np.testing.assert_array_equal(value, payload(i))
            landed.append(i)

        assert self.peers.fetch(self.address, [key(i) for i in numbers], patience_s, land) == len(landed)
        assert landed == list(numbers[: len(landed)])
        return landed

    @property
    def carried(self) -> tuple[int, int]:
        """Pages by sockets and by NIXL."""
        by_sockets, by_nixl = self.peers.counted(TierCounts()).carried_bytes
        return by_sockets // SIZE, by_nixl // SIZE

    @property
    def failures(self) -> int:
        return self.peers.counted(TierCounts()).carrier_failures[1]


@pytest.fixture
def make() -> Iterator[Callable[..., Two]]:
    servers: list[PageServer] = []

    def make(agent: Callable[[bool], Agent] = lambda serves: FakeAgent(), blocks: int = 8, keys: range = ALL) -> Two:
        host_pool, theirs, mine = make_host_pool(blocks, keys), agent(True), agent(False)
        server = PageServer("127.0.0.1", 0, SECRET, HELLO, host_pool, agent=share(theirs, host_pool))
        servers.append(server)
        reader = MemoryReader(mine, SIZE)
        return Two(host_pool, server, theirs, reader, mine, Peers(SECRET, HELLO, reader))

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def two(make: Callable[..., Two]) -> Two:
    return make()


@pytest.fixture(params=["fake", "real"])
def either(request: pytest.FixtureRequest, make: Callable[..., Two]) -> Two:
    if request.param == "real":
        pytest.importorskip("nixl._api")
        return make(open_agent)
    return make()


def test_pages_are_read_in_order_up_to_the_first_that_is_not_there(either: Two):
    assert either.fetch(3, 0, 4) == [3, 0, 4]
    assert either.fetch(1, 9, 2) == [1]
    assert either.fetch(9) == []
    assert (either.carried, either.failures) == ((0, 4), 0)
    assert (either.server.pages_sent, either.server.pages_located) == (0, 4)
    assert len(either.peers._idle) == 1, "one connection serves them all"


def test_more_pages_than_a_buffer_has_rows(either: Two, monkeypatch: pytest.MonkeyPatch):
    either.reader._free[:] = [buffer[:2] for buffer in either.reader._free]
    monkeypatch.setattr(protocol, "MAX_KEYS", 4)
    assert either.fetch(*ALL) == [*ALL]
    assert either.carried == (0, 5)


def test_a_page_that_is_still_computed_is_waited_for(either: Two):
    later = threading.Timer(0.05, either.host_pool.put, (key(7), payload(7)))
    later.start()
    assert either.fetch(0, 7, 8, patience_s=0.3) == [0, 7]
    assert either.carried == (0, 2)


def test_sockets_go_on_where_the_other_process_has_ended_its_agent(make: Callable[..., Two]):
    two = make()
    two.theirs.is_dead = True
    assert two.fetch(*ALL) == [*ALL]
    assert (two.carried, two.failures) == ((5, 0), 1)
    assert two.fetch(*ALL) == [*ALL], "and it is not tried again for a while"
    assert (two.carried, two.failures, two.server.pages_located) == ((10, 0), 1, 5)


@pytest.mark.parametrize("who", ["giver", "fetcher"])
def test_a_side_that_says_sockets_gets_sockets(two: Two, who: str):
    server = PageServer("127.0.0.1", 0, SECRET, HELLO, two.host_pool) if who == "giver" else two.server
    peers = Peers(SECRET, HELLO, two.reader if who == "giver" else None)
    two = two._replace(server=server, peers=peers)
    assert two.fetch(*ALL) == [*ALL]
    assert (two.carried, two.server.pages_located) == ((5, 0), 0)
    server.close()


def test_a_page_that_was_damaged_in_memory_is_not_landed(either: Two):
    place = either.host_pool.place_of(key(2))
    assert place is not None
    either.host_pool.memory[place[1] - either.host_pool.memory.ctypes.data + 77] ^= 1
    assert either.fetch(0, 1, 2, 3) == [0, 1]
    assert (either.failures, either.host_pool.damaged) == (1, 1)
    assert either.fetch(0, 1, 3) == [0, 1, 3], "the address is still read"
    assert either.carried == (0, 5)


@settings(max_examples=40, deadline=None)
@given(wanted=st.permutations(range(6)), written=st.lists(st.integers(0, 9), max_size=6), rows=st.integers(1, 4))
def test_cells_that_are_written_again_between_answer_and_read(wanted: list[int], written: list[int], rows: int):
    """What has been landed is what was asked for, in order, whatever lies at the places meanwhile."""
    host_pool, mine, theirs = make_host_pool(4, range(4)), FakeAgent(), FakeAgent()
    shared, reader = share(theirs, host_pool), MemoryReader(mine, SIZE)
    reader._free[:] = [reader._free[0][:rows]]
    reader.meet("there", shared)
    places = [place for i in wanted if (place := host_pool.place_of(key(i))) is not None]
    keys = [key(i) for i in wanted if key(i) in host_pool]
    again = iter(written)
    mine.begins = lambda: [host_pool.put(key(i), payload(i)) for i in again][:0] and None
    landed: list[bytes] = []

    def land(key: bytes, value: np.ndarray) -> None:
        np.testing.assert_array_equal(value, payload(int.from_bytes(key, "little")))
        landed.append(key)

    assert reader.read("there", keys, places, land) == len(landed)
    assert landed == keys[: len(landed)]
    new = sum(i not in range(4) for i in set(written))
    assert len(landed) == len(keys) or new, "nothing else makes a page fail"
    assert len(reader._free) == 1


def _failing(error: BaseException) -> Callable[..., object]:
    def fail(*_: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("add_remote_agent", _failing(RuntimeError("NIXL_ERR_MISMATCH"))),
        ("get_xfer_descs", _failing(TypeError("no descriptors"))),
        ("initialize_xfer", _failing(RuntimeError("NIXL_ERR_NOT_FOUND"))),
        ("transfer", _failing(RuntimeError("NIXL_ERR_BACKEND"))),
        ("transfer", lambda handle: "ERR"),
        ("check_xfer_state", _failing(RuntimeError("NIXL_ERR_REMOTE_DISCONNECT"))),
    ],
)
def test_whatever_nixl_says_sockets_are_left(two: Two, monkeypatch: pytest.MonkeyPatch, method: str, answer, caplog):
    monkeypatch.setattr(nixl, "_HOLD_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(two.mine, method, answer)
        assert two.fetch(*ALL) == [*ALL]
    assert (two.carried, two.failures) == ((5, 0), 1)
    assert "come by sockets for 60 s, as NIXL says: " in caplog.text
    monkeypatch.setattr(nixl, "_REST_S", 0.0)
    two.reader._rest(two.address, OSError("its rest is over now"))
    assert two.fetch(*ALL) == [*ALL], "it is asked anew"
    assert two.carried == (5, 5)


def test_a_transfer_that_does_not_end_keeps_its_buffer(two: Two, monkeypatch: pytest.MonkeyPatch):
    """It may still write, so nobody else gets the memory; the wait is bounded, and pages come by sockets."""
    del two.reader._free[1:]
    two.mine.hangs = True
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "STALL_S", 0.05)
        patch.setattr(nixl, "_REST_S", 0.0)
        patch.setattr(nixl, "_HOLD_S", 0.0)
        assert two.fetch(0, 1) == [0, 1]
        assert (two.carried, two.failures, len(two.reader._held)) == ((2, 0), 1, 1)
        assert two.fetch(2, 3) == [2, 3]
        assert (two.carried, two.failures) == ((4, 0), 1), "no buffer, no read"
        two.mine.hangs = False
        two.reader._rest(two.address, OSError("its rest is over now"))
        assert two.fetch(2, 3) == [2, 3]
    assert two.carried == (4, 2)
    assert len(two.reader._free) == 1 and not two.reader._held


def test_an_agent_is_forgotten_when_nobody_reads_from_it(two: Two):
    assert two.fetch(0) == [0]
    first = dict(two.mine.remotes)
    lent = two.reader._lend(two.address)
    assert lent is not None
    other = FakeAgent()
    two.reader.meet(two.address, other.get_agent_metadata())
    assert set(two.mine.remotes) == {*first, other.name}
    two.reader._give_back(*lent)
    assert set(two.mine.remotes) == {other.name}
    two.reader.meet("its other name:1", other.get_agent_metadata())
    two.reader.meet(two.address, b"")
    assert set(two.mine.remotes) == {other.name} and not two.reader.knows(two.address)
    two.reader.meet("its other name:1", b"")
    assert not two.mine.remotes


def test_many_addresses_are_not_kept_for_ever(two: Two, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl, "_MOST_REMOTES", 3)
    for i in range(9):
        two.reader.meet(f"host{i}:1", FakeAgent().get_agent_metadata())
        two.reader._rest(f"other{i}:1", OSError("no"))
    assert len(two.mine.remotes) == len(two.reader._remotes) == len(two.reader._resting) == 3


def test_threads_share_the_buffers(make: Callable[..., Two]):
    """Twelve at once: those without a buffer take sockets, and every page is right."""
    two, came = make(), []
    threads = [threading.Thread(target=lambda: came.extend(two.fetch(*ALL))) for _ in range(12)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(came) == sorted([*ALL] * 12)
    assert sum(two.carried) == 60 and two.failures == 0
    assert len(two.reader._free) == 8


def test_without_nixl_auto_takes_sockets_and_nixl_does_not_start(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setitem(sys.modules, "nixl", None)
    host_pool = make_host_pool(2, range(0))
    assert open_nixl("sockets", host_pool, True) == (b"", None)
    assert not caplog.text
    assert open_nixl("auto", host_pool, True) == (b"", None)
    assert "pages travel by sockets: NIXL cannot be opened: " in caplog.text
    with pytest.raises(ValueError, match=r"transfer_carrier: 'nixl': NIXL cannot be opened: .*dsv3\[nixl\]"):
        open_nixl("nixl", host_pool, True)


def test_memory_that_cannot_be_registered_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl, "open_agent", lambda progresses: FakeAgent())
    monkeypatch.setattr(FakeAgent, "register_memory", _failing(RuntimeError("NIXL_ERR_BACKEND")))
    with pytest.raises(ValueError, match="NIXL_ERR_BACKEND"):
        open_nixl("nixl", make_host_pool(2, range(0)), False)


def test_the_log_names_the_carrier_and_its_rate(two: Two, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    two.fetch(*ALL)
    two.fetch(*ALL)
    Two.fetch(two._replace(peers=Peers(SECRET, HELLO)), *ALL)
    told = [line for line in caplog.messages if line.startswith(f"pages of {two.address} come by ")]
    assert [line.split(" by ")[1].split(":")[0] for line in told] == ["nixl", "sockets"], "once per minute each"
    assert all(line.endswith(" MB/s") for line in told)


def test_the_real_agent_has_what_is_used_of_it(capfd: pytest.CaptureFixture[str]):
    real = pytest.importorskip("nixl._api").nixl_agent
    for name, method in inspect.getmembers(Agent, inspect.isfunction):
        if not name.startswith("_"):
            taken, ours = (inspect.signature(each).parameters for each in (getattr(real, name), method))
            needed = [p for p in taken.values() if p.default is p.empty]
            assert len(needed) <= len(ours) <= len(taken), name
    assert callable(getattr(open_agent(False), "transfer", None))
    assert not capfd.readouterr().out, "standard output is not NIXL's"
