"""The ends that a follower can come to, with a leader that the test plays."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dsv3.engine.cluster import channel, follower, messages
from dsv3.engine.cluster.messages import Drain, FollowerFailed, Stop
from dsv3.engine.cluster.wire import Wire, WireError
from tests.dsv3.engine.cluster import local

# A played end of the process leaves its thread by SystemExit, which pytest reports.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Played:
    """A follower in this process, whose end is recorded, and the leader's wire to it."""

    def __init__(self, cluster, ours: Wire, theirs: Wire) -> None:
        self.leader = ours
        self.ends: list[tuple[int, str]] = []
        self.ended = threading.Event()
        self.follower = follower._Follower(cluster, theirs)

    def end(self, status: int, text: str) -> None:
        """Stands for the end of the process: this thread does nothing more."""
        self.ends.append((status, text))
        self.ended.set()
        sys.exit()

    def fail(self, error: Exception) -> None:
        """Makes the main thread of the follower fail."""
        threading.Thread(target=self.follower.fail, args=(error,)).start()

    def received(self) -> messages.ToLeader:
        """The next message, without heartbeats."""
        while True:
            message = messages.decode_for_leader(self.leader.receive())
            if not isinstance(message, messages.Heartbeat):
                return message


@pytest.fixture
def played(tmp_path, monkeypatch) -> Iterator[Played]:
    monkeypatch.setattr(follower, "_EXPLANATION_S", 0.0)
    monkeypatch.setattr(channel, "_LOOP", channel._Loop())  # its thread ends with the process that is played
    before = set(threading.enumerate())
    ours, theirs = socket.socketpair()
    cluster = local.options(tmp_path, 2, 1, cluster_silence_timeout=1e9)
    made = Played(cluster, *local.wires(ours, theirs))
    monkeypatch.setattr(follower, "_end", made.end)
    yield made
    made.leader.close()
    # A thread that ended the process later would end that of the tests. That of a channel which is over does nothing.
    for thread in set(threading.enumerate()) - before:
        deadline = time.monotonic() + 30
        while thread.name != "watch" and thread.is_alive() and time.monotonic() < deadline:
            if thread.name == "channels" and made.ended.is_set() and made.follower._channel.is_over:
                break
            time.sleep(0.01)


def test_its_error_is_sent_and_the_answer_ends_it(played, monkeypatch) -> None:
    logged: list[tuple] = []
    monkeypatch.setattr(follower._log, "error", lambda *args: logged.append(args))
    monkeypatch.setattr(follower, "_SHUTDOWN_S", 0.5)
    played.fail(ValueError("no such file"))
    assert played.received() == FollowerFailed("ValueError", "ValueError: no such file")
    played.leader.send(messages.encode(Stop("process 1 has failed (ValueError)")))
    assert played.ended.wait(30)
    assert played.ends[0] == (1, "the leader ends the instance: process 1 has failed (ValueError)")
    assert ("%s", "ValueError: no such file") in logged


def test_a_leader_that_does_not_answer_is_not_waited_for_without_bound(played, monkeypatch) -> None:
    monkeypatch.setattr(follower, "_SHUTDOWN_S", 0.1)
    played.fail(ValueError("x"))
    assert played.ended.wait(30)
    assert played.ends == [(1, "the leader (process 0) has not confirmed this error")]


def test_the_leaders_reason_comes_first_although_the_leader_is_gone(played) -> None:
    played.leader.send(messages.encode(Stop("process 2 has ended")))
    played.leader.close()
    assert played.ended.wait(30)
    assert played.ends == [(1, "the leader ends the instance: process 2 has ended")]


def test_a_leader_is_allowed_more_silence_until_all_are_ready(played) -> None:
    starting = played.follower._silence_s
    played.leader.send(messages.encode(messages.Ready()))
    while played.follower._silence_s == starting:
        time.sleep(0.01)
    assert starting == 6 * played.follower._silence_s


def test_the_end_of_the_leader_ends_it(played) -> None:
    played.leader.close()
    assert played.ended.wait(30)
    assert played.ends == [(1, "the leader (process 0) has ended, or the connection to it is broken")]


def test_without_a_leader_it_ends_and_names_the_address(tmp_path) -> None:
    cluster = local.options(tmp_path, 2, 1, cluster_start_timeout=0.1)
    with pytest.raises(WireError, match=r"cannot reach the leader at 127\.0\.0\.1:\d+ within 0\.1 s"):
        follower._connect_to_leader(cluster, local.credentials(cluster))


def test_an_invalid_host_name_is_not_tried_again(tmp_path) -> None:
    cluster = local.options(tmp_path, 2, 1, coordinator="a..b:7000")
    with pytest.raises(WireError, match=r"a\.\.b:7001: 'a\.\.b' is not a host name"):
        follower._connect_to_leader(cluster, local.credentials(cluster))


def test_an_invalid_message_is_reported_to_the_leader(played) -> None:
    played.leader.send(b"\xc1")
    message = played.received()
    assert isinstance(message, FollowerFailed) and "an invalid message" in message.text
    played.leader.end()
    assert played.ended.wait(30)
    assert played.ends == [(1, "the leader (process 0) has received this error")]


def test_the_first_signal_asks_the_leader_to_drain_and_the_second_ends_the_process(played) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = signal.set_wakeup_fd(-1)
    try:
        follower._Signals().attach(played.follower)
        signal.raise_signal(signal.SIGTERM)
        assert played.received() == Drain("process 1 has received SIGTERM") and not played.ends
        signal.raise_signal(signal.SIGINT)
        assert played.ended.wait(30)
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert played.ends == [(1, "ended by SIGINT")]
