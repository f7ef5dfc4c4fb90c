"""The leader against followers that tests play: admission, messages, and every way to fail."""

import contextlib
import dataclasses
import errno
import queue
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from dsv3.config.engine import EngineConfig
from dsv3.config.options import ClusterOptions
from dsv3.engine.cluster import follower as follower_module
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.digest import order_digests
from dsv3.engine.cluster.leader import Leader
from dsv3.engine.cluster.messages import (
    Begin,
    Build,
    Checked,
    Compiled,
    Digest,
    Drain,
    FollowerFailed,
    Heartbeat,
    Loaded,
    Operate,
    Operated,
    Ready,
    Step,
    Stop,
    WorkEvent,
)
from dsv3.engine.cluster.wire import connect
from dsv3.engine.errors import ClusterError
from dsv3.engine.job import StepCommand
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.jobs.sample import RowMasks, SampleCommand
from dsv3.engine.kernel_checks import KernelFallback
from tests.dsv3.engine.cluster import local

RESULTS = [np.arange(4, dtype=np.int32)]


@pytest.fixture
def lead(tmp_path) -> Iterator:
    with contextlib.ExitStack() as stack:

        def start(num_processes: int = 2, **changes) -> local.Led:
            led = local.Led(local.options(tmp_path, num_processes, **changes))
            stack.callback(led.close)
            return led

        yield start


def both(lead, **changes) -> tuple[local.Led, local.Follower, Iterator]:
    """A leader with its only follower, started, one rank each."""
    led = lead(**changes)
    follower = led.follower(1)
    received = follower.received()
    assert next(received) == Begin()
    assert led.gathered() is None
    led.leader.send_limits(EngineConfig(max_model_len=64, num_pages=5, num_ranks=2, num_processes=2))
    assert isinstance(next(received), Build)
    follower.send(Ready())
    led.leader.wait_ready()
    assert next(received) == Ready()
    return led, follower, received


def test_programs_that_launch_collectives_in_different_orders_are_refused(lead) -> None:
    """The leader names the program, the processes and its own collective, before any process launches."""
    orders = {"decode-4-0-1": ["all-gather a", "all-to-all b", "all-to-all c"], "read_load-0-0-1": ["all-gather a"]}
    other = orders | {"decode-4-0-1": ["all-gather a", "all-to-all c", "all-to-all b"]}
    led = lead(4)
    followers = [led.follower(i) for i in (1, 2, 3)]
    assert [next(follower.received()) for follower in followers] == [Begin()] * 3
    assert led.gathered() is None
    for follower, each in zip(followers, (orders, other, other), strict=True):
        follower.send(Compiled(order_digests(each)))
    with pytest.raises(
        ClusterError, match=r"processes 2, 3 and process 0 .* of decode-4-0-1 .* number 2, .* all-to-all b;"
    ):
        led.leader.wait_compiled(orders)
    assert "instance-* and programs-* in --compilation_cache_dir" in led.failure()


def command(number: int) -> StepCommand:
    return StepCommand(number, (("decode", DecodeCommand(np.zeros((2, 1, 3), np.int32), 1)),))


def test_processes_agree_on_the_kernels_that_fail_in_any_of_them(lead) -> None:
    led = lead(3)
    followers = [led.follower(i) for i in (1, 2)]
    received = [follower.received() for follower in followers]
    assert [next(r) for r in received] == [Begin(), Begin()]
    assert led.gathered() is None
    followers[0].send(
        Checked({"mla_decode": KernelFallback("triton", "hangs"), "fp8_gemm": KernelFallback("triton", "differs")})
    )
    followers[1].send(Checked({"fp8_gemm": KernelFallback("triton", "differs")}))
    agreed = led.leader.merge_kernel_checks({"fp8_gemm": KernelFallback("triton", "raises")})
    assert agreed == {
        "fp8_gemm": KernelFallback("triton", "process 0: raises; process 1: differs; process 2: differs"),
        "mla_decode": KernelFallback("reference", "process 1: hangs"),
    }
    assert [next(r) for r in received] == [Checked(agreed), Checked(agreed)]


def test_a_whole_life(lead) -> None:
    led = lead(3)
    followers = [led.follower(i) for i in (2, 1)]
    received = [follower.received() for follower in followers]
    assert [next(r) for r in received] == [Begin(), Begin()]
    assert led.gathered() is None
    for pages, follower in zip((7, 5), followers, strict=True):
        follower.send(Loaded({"devices": "1"}, pages))
    assert led.leader.wait_loaded({"devices": "1"}) == 5
    led.leader.send_limits(config := EngineConfig(max_model_len=64, num_pages=5, num_ranks=6, num_processes=3))
    assert [next(r) for r in received] == [Build(config), Build(config)]
    for follower in followers:
        follower.send(Compiled({"decode-1-0-1": b""}))
    led.leader.wait_compiled({})  # no process launches a program while another one compiles
    assert [next(r) for r in received] == [Compiled(), Compiled()]
    assert led.leader._silence_s == 6 * led.cluster.cluster_silence_timeout
    for follower in followers:
        follower.send(Ready())
    led.leader.wait_ready()
    assert led.leader._silence_s == led.cluster.cluster_silence_timeout
    assert [next(r) for r in received] == [Ready(), Ready()]
    led.leader.send(command(1))
    for steps in received:
        step = next(steps)
        assert isinstance(step, Step) and step.number == 1
    closing = threading.Thread(target=led.leader.end)
    closing.start()
    for follower, rest in zip(followers, received, strict=True):
        assert next(rest) == Stop(None)
        follower.wire.close()
    closing.join(30)
    assert led.failures.empty()


def test_processes_of_one_node_on_two_hosts_are_refused_by_name(lead) -> None:
    """Several nodes may share a host."""
    led = lead(6, processes_per_node=2)
    for process_id, host in ((1, socket.gethostname()), (2, "b"), (4, "b"), (5, "b"), (3, "c")):
        led.follower(process_id, host=host)
    reason = led.failure()
    assert "process 3 is on c and process 2 on b" in reason or "process 2 is on b and process 3 on c" in reason
    assert "processes_per_node 2 they are one node" in reason and "start processes 2 to 3 on it" in reason
    assert str(led.gathered()) == reason


def test_a_process_of_the_leaders_node_on_another_host_is_refused(lead) -> None:
    led = lead(2, processes_per_node=2)
    led.follower(1, host="elsewhere")
    assert f"process 1 is on elsewhere and process 0 on {socket.gethostname()}" in led.failure()


def test_missing_processes_are_named(lead) -> None:
    led = lead(5, cluster_start_timeout=0.5)
    follower = led.follower(3)
    assert "processes 1, 2, 4 of 5 did not connect within 0.5 s" in str(led.gathered())
    assert "did not connect" in led.failure()
    [stop] = follower.received()
    assert "did not connect" in stop.failure


def test_other_settings_end_both_with_the_fields(lead) -> None:
    led = lead(3)
    _other = led.follower(2)
    follower = led.follower(1, fields=local.FIELDS | {"weights": "def"})
    reason = "process 1 is not configured as process 0: weights (abc there, def in process 1)"
    assert str(led.gathered()) == led.failure() == reason
    assert list(follower.received()) == [Stop(reason)]


def test_what_is_known_after_loading_must_be_the_same_too(lead) -> None:
    led, follower, _ = both(lead)
    follower.send(Loaded({"devices": "2 x cpu"}, 5))
    with pytest.raises(ClusterError, match=r"devices \(1 x cpu there, 2 x cpu in process 1\)"):
        led.leader.wait_loaded({"devices": "1 x cpu"})


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (["h1:7", "h2:7"], ""),
        (["", "h2:7"], "transfer_address: process 1 has none, but others have"),
        (["h1:7", "h1:7"], "two processes have the same one: h0:7, h1:7, h1:7"),
    ],
)
def test_transfer_addresses_of_all_or_of_none(lead, theirs, words) -> None:
    led = lead(3)
    followers = [led.follower(i) for i in (1, 2)]
    assert led.gathered() is None
    for address, follower in zip(theirs, followers, strict=True):
        follower.send(Loaded({}, 5, address))
    led.leader.wait_loaded({})
    if words:
        with pytest.raises(ClusterError, match=words):
            led.leader.transfer_addresses("h0:7")
        assert words in led.failure()
    else:
        assert led.leader.transfer_addresses("h0:7") == ("h0:7", *theirs)


def test_followers_events_reach_the_planner_in_order(lead) -> None:
    """Also events before there is a planner."""
    led, follower, _ = both(lead)
    received: queue.SimpleQueue = queue.SimpleQueue()
    follower.send(WorkEvent("pages", b"1"))
    follower.send(WorkEvent("others", b"-"))
    follower.send(Loaded({}, 5))
    led.leader.wait_loaded({})
    led.leader.work_events.subscribe("pages", lambda process_id, body: received.put((process_id, body)))
    follower.send(WorkEvent("pages", b"2"))
    assert [received.get(timeout=30) for _ in range(2)] == [(1, b"1"), (1, b"2")]


def test_an_operation_waits_for_every_follower_and_names_the_one_that_failed(lead) -> None:
    led, follower, received = both(lead)
    for error in ("CheckpointError: no such directory", ""):
        led.leader.operate(Operate("plan", "/weights"))
        assert next(message for message in received if isinstance(message, Operate)) == Operate("plan", "/weights")
        follower.send(Operated(error))
        assert led.leader.wait_operated() == (error and f"process 1: {error}")
    led.leader.operate(Operate("replace"))
    follower.wire.close()
    with pytest.raises(ClusterError, match="process 1"):
        led.leader.wait_operated()


def test_unauthenticated_connections_do_not_disturb_the_start(lead, tmp_path, caplog) -> None:
    """Garbage, silence, another key: each is refused alone, and gets no data."""
    led = lead()
    silent = [local.dial(led.cluster) for _ in range(20)]
    for garbage in (b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(4096), b"\x80\x04\x95" * 100):
        # The leader may hang up before each of these: a reset, or for shutdown ENOTCONN, which is no ConnectionError.
        with local.dial(led.cluster) as stranger, contextlib.suppress(OSError):
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            assert not any(stranger.recv(65536)[47:])  # a nonce, and that it is refused
    (tmp_path / "other").write_text("x" * 48)
    (tmp_path / "other").chmod(0o600)
    with pytest.raises(Exception, match="cluster_key_file"):
        local.Follower(dataclasses.replace(led.cluster, cluster_key_file=str(tmp_path / "other")), 1)
    received = led.follower(1).received()
    assert next(received) == Begin()
    assert led.gathered() is None
    assert led.failures.empty()
    assert "it has another key" in caplog.text
    for connection in silent:
        connection.close()


def join(cluster: ClusterOptions, process_id: int, begun: queue.Queue[int]) -> threading.Thread:
    """A process that connects as a real follower does, and puts its id into `begun` when it may begin."""

    def run() -> None:
        wire = follower_module._connect_to_leader(cluster, local.credentials(cluster))
        wire.send(messages.encode(messages.Hello(local.FIELDS, "host", 1)))
        while not isinstance(messages.decode_for_follower(wire.receive() or b""), Begin):
            pass
        begun.put(process_id)
        wire.discard(60)
        wire.close()

    cluster = dataclasses.replace(cluster, process_id=process_id)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_unauthenticated_connections_keep_no_process_out(lead) -> None:
    """More of them than the leader's bound, before and among the real processes."""
    led = lead(5)
    strangers, begun = [local.dial(led.cluster) for _ in range(100)], queue.Queue[int]()
    for process_id in range(1, 4):
        join(led.cluster, process_id, begun)
    strangers += [local.dial(led.cluster) for _ in range(100)]
    join(led.cluster, 4, begun)
    assert sorted(begun.get(timeout=60) for _ in range(4)) == [1, 2, 3, 4]
    assert led.gathered() is None and led.failures.empty()
    for connection in strangers:
        connection.close()


def test_a_follower_retries_a_slow_leader(tmp_path, monkeypatch) -> None:
    """A busy host is no refusal: the follower closes a connection, and connects again."""
    monkeypatch.setattr("dsv3.engine.cluster.wire.PATIENCE_S", 0.1)
    asked, connect = threading.Semaphore(0), follower_module.connect
    monkeypatch.setattr(follower_module, "connect", lambda *args: (asked.release(), connect(*args))[1])
    cluster, begun = local.options(tmp_path, 2), queue.Queue[int]()
    leader = Leader(cluster, local.FIELDS, print, print)
    join(cluster, 1, begun)
    assert all(asked.acquire(timeout=30) for _ in range(3))
    monkeypatch.setattr("dsv3.engine.cluster.wire.PATIENCE_S", 30.0)
    leader.wait_for_followers()
    assert begun.get(timeout=30) == 1
    leader.end()


def test_errors_of_accept_are_survived(lead, monkeypatch, caplog) -> None:
    """Such as no free descriptor, because of unauthenticated connections."""
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 3

    def failing(self: socket.socket) -> tuple[socket.socket, object]:
        accepted = accept(self)
        if errors:
            accepted[0].close()
            raise errors.pop()
        return accepted

    monkeypatch.setattr(socket.socket, "accept", failing)
    led, begun = lead(), queue.Queue[int]()
    join(led.cluster, 1, begun)
    assert begun.get(timeout=60) == 1
    assert not errors and "Too many open files" in caplog.text


def test_a_process_that_disconnects_before_its_first_message_may_reconnect(lead, caplog) -> None:
    led = lead()
    connect(local.dial(led.cluster), local.credentials(led.cluster), 1).close()
    while "before its first message" not in caplog.text:  # the leader may admit it after it has disconnected
        time.sleep(0.01)
    received = led.follower(1).received()
    assert next(received) == Begin()
    assert led.failures.empty()


def test_the_port_closes_once_all_have_connected(lead) -> None:
    led, _, _ = both(lead)
    with pytest.raises(ConnectionRefusedError):
        local.dial(led.cluster)


def test_a_process_id_is_given_once(lead) -> None:
    led = lead(3)
    first = led.follower(1)
    with contextlib.suppress(OSError):
        second = led.follower(1)
        assert [type(m) for m in second.received()] == [Stop]
    other = led.follower(2)
    assert next(first.received()) == next(other.received()) == Begin()
    assert led.gathered() is None


def test_an_address_of_another_host_is_refused(tmp_path) -> None:
    with pytest.raises(ClusterError, match=r"cannot listen at 192\.0\.2\.1.*--coordinator"):
        Leader(local.options(tmp_path, 2, coordinator="192.0.2.1:5000"), {}, print, print)


def test_the_death_of_a_follower_names_it(lead) -> None:
    led, follower, _ = both(lead)
    follower.wire.close()
    assert led.failure() == "process 1 has ended, or the connection to it is broken"
    with pytest.raises(ClusterError, match="process 1"):
        led.leader.send(command(1))
    broken = RuntimeError("a collective")
    assert "process 1" in str(led.leader.explain(broken))


def test_a_silent_follower_is_noticed(lead) -> None:
    led, _, _ = both(lead, cluster_silence_timeout=0.4)
    assert led.failure() == "process 1 has been silent for 0.4 s: it hangs, or its host is gone"


def test_more_silence_is_allowed_while_the_instance_starts(lead) -> None:
    """Its processes trace and load: on a busy machine their heartbeats may come late."""
    led = lead(cluster_silence_timeout=0.4)
    follower = led.follower(1)
    received = follower.received()
    assert next(received) == Begin()
    assert led.failure() == "process 1 has been silent for 2.4 s: it hangs, or its host is gone"


def beating(follower: local.Follower, launched: int, *record) -> threading.Event:
    """Heartbeats from a thread, as from a process whose main thread is stuck, until the event is set."""
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(OSError):
            while not done.wait(0.05):
                follower.send(Heartbeat(launched, *record))

    threading.Thread(target=run, daemon=True).start()
    return done


def test_a_follower_that_launches_nothing_is_noticed_despite_heartbeats_and_named_in_the_log(lead, caplog) -> None:
    """Nobody else can go on: process 1 waits in a collective of step 7 for process 2, which has not launched it."""
    led = lead(3, cluster_silence_timeout=0.4)
    followers = [led.follower(i) for i in (1, 2)]
    assert [next(follower.received()) for follower in followers] == [Begin()] * 2
    assert led.gathered() is None
    for follower in followers:
        follower.send(Ready())
    led.leader.wait_ready()
    done = [beating(followers[0], 7, 7, 6, "decode 64"), beating(followers[1], 6, 7, 6, "sample 64")]
    led.leader.recorder.launching, led.leader.recorder.fetched = 7, 6
    led.leader.on_launched(7)
    assert led.failure() == "process 2 has not launched step 7 for 0.4 s: it hangs"
    for event in done:
        event.set()
    for line in (
        "process 0: waits for the results of step 7, has launched step 7, unchanged",
        "process 1: waits for the results of step 7, has launched step 7 (last program: decode 64), unchanged",
        "process 2: launches step 7 (last program: sample 64), unchanged",
        "behind the others in launching: process 2",
    ):
        assert line in caplog.text


def test_a_step_that_hangs_on_the_devices_is_logged_before_the_engine_is_ended(lead, caplog, monkeypatch) -> None:
    led, follower, _ = both(lead)
    monkeypatch.setattr(ClusterOptions, "starting_silence_s", 0.2)
    done = beating(follower, 7, 7, 6, "decode 64")
    led.leader.recorder.fetched = 6
    led.leader.on_launched(7)
    for _ in range(600):
        if "step 7 has no results after 0.2 s" in caplog.text:
            break
        time.sleep(0.01)
    assert "no process is behind the others" in caplog.text and led.failures.empty()
    done.set()


def test_a_follower_that_reports_nothing_is_noticed_despite_heartbeats(lead) -> None:
    led, follower, _ = both(lead, cluster_silence_timeout=2.0)
    done = beating(follower, 7)
    led.leader.on_launched(7)
    led.leader.on_results(7, RESULTS)
    assert led.failure() == "process 1 has not reported step 7 for 2 s: it hangs"
    done.set()


def test_other_results_end_the_instance(lead) -> None:
    led, follower, _ = both(lead)
    follower.send(Digest(3, b"something else"))
    with contextlib.suppress(ClusterError):
        led.leader.on_results(3, RESULTS)
    assert led.failure() == "process 1 has other results than process 0 in step 3"


def test_a_followers_error_reaches_the_clients_by_its_kind_alone(lead, caplog) -> None:
    led, follower, _ = both(lead)
    follower.send(FollowerFailed("OSError", "OSError: /secret/path"))
    assert led.failure() == "process 1 has failed (OSError)"
    assert "/secret/path" in caplog.text


def test_garbage_from_a_follower_ends_the_instance(lead) -> None:
    led, follower, _ = both(lead)
    follower.wire.send(b"\xc1")
    assert "process 1 sent an invalid message" in led.failure()


def test_a_follower_asked_to_end_makes_the_leader_drain(lead) -> None:
    led, follower, _ = both(lead)
    follower.send(Drain("process 1 has received SIGTERM"))
    assert led.drains.get(timeout=30) == "process 1 has received SIGTERM"
    assert led.failures.empty()


def test_a_follower_that_does_not_read_ends_the_instance_instead_of_memory(lead, monkeypatch) -> None:
    monkeypatch.setattr("dsv3.engine.cluster.channel._MAX_BUFFERED_BYTES", 2**16)
    led, _, _ = both(lead)
    big = StepCommand(1, (("decode", DecodeCommand(np.zeros((2, 2**20, 3), np.int32), 1)),))
    with pytest.raises(ClusterError, match="process 1 does not read"):
        led.leader.send(big)
    assert "does not read" in led.failure()


def test_only_the_first_failure_counts(lead) -> None:
    led = lead(3)
    followers = [led.follower(i) for i in (1, 2)]
    assert led.gathered() is None
    followers[0].send(FollowerFailed("ValueError", "first"))
    assert led.failure() == "process 1 has failed (ValueError)"
    followers[1].wire.close()
    assert led.failures.empty()
    with pytest.raises(ClusterError, match="process 1 has failed"):
        led.leader.on_results(1, RESULTS)


def test_the_reason_has_been_read_before_the_leader_ends(lead) -> None:
    """The leader waits for all followers, also for the one whose message is the cause."""
    led = lead(3)
    followers = [led.follower(1), led.follower(2, fields=local.FIELDS | {"weights": "def"})]
    reason = led.failure()
    ended = threading.Event()
    threading.Thread(target=lambda: (led.leader.end(reason), ended.set())).start()
    for follower in followers:
        assert not ended.wait(0.1)
        assert list(follower.received()) == [Stop(reason)]
        follower.wire.close()
    assert ended.wait(30)


def test_a_process_that_connects_during_shutdown_gets_the_reason(lead) -> None:
    led = lead(3)
    late = local.dial(led.cluster)
    led.follower(1, fields={})
    reason = led.failure()
    while led.leader._shutdown_message is None:
        time.sleep(0.01)
    follower = local.Follower(led.cluster, 2, connection=late)
    assert list(follower.received()) == [Stop(reason)]
    follower.wire.close()


def test_the_shutdown_does_not_wait_for_a_silent_follower(lead, monkeypatch) -> None:
    monkeypatch.setattr("dsv3.engine.cluster.leader._FAILURE_SHUTDOWN_S", 3600.0)
    led, _, _ = both(lead, cluster_silence_timeout=0.4)
    reason = led.failure()
    led.leader.end(reason)


def test_a_command_too_long_for_a_message_ends_the_instance_with_its_size(lead, monkeypatch) -> None:
    monkeypatch.setattr("dsv3.engine.cluster.channel.MAX_MESSAGE_BYTES", 2**10)
    led, _, received = both(lead)
    big = StepCommand(1, (("decode", DecodeCommand(np.zeros((2, 2**8, 3), np.int32), 1)),))
    with pytest.raises(ClusterError, match=r"process 1 cannot be sent a message of \d+ bytes, at most 1024"):
        led.leader.send(big)
    reason = led.failure()
    assert list(received) == [Stop(reason)]


def test_bitmasks_of_many_requests_reach_the_follower(lead) -> None:
    """Legal load: it was once too long for a message, which ended the instance, and again after each restart."""
    led, _, received = both(lead, cluster_silence_timeout=60.0)
    places = np.array([[1, i] for i in range(1100)], np.int32)
    masks = np.full((len(places), 4, 4040), 7, np.uint32)
    led.leader.send(StepCommand(1, (("decode", SampleCommand(2, masks=RowMasks(places, masks))),)))
    [(_, command)] = messages.command_of(next(received), JOB_KINDS).jobs
    np.testing.assert_array_equal(command.masks.masks, masks)
    assert led.failures.empty()


class Clock:
    """Stands for the `time` module: sleeps briefly, and can jump as for a suspended process."""

    def __init__(self) -> None:
        self.leap_s, self.sleeps = 0.0, 0

    def monotonic(self) -> float:
        return time.monotonic() + self.leap_s

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01))
        self.sleeps += 1


def test_a_suspended_leader_resets_all_deadlines(lead, monkeypatch) -> None:
    """The deadlines of launches and reports count from the end of the suspension."""
    clock = Clock()
    for module in ("leader", "digest", "channel"):
        monkeypatch.setattr(f"dsv3.engine.cluster.{module}.time", clock)
    led, _, _ = both(lead, cluster_silence_timeout=3600.0)
    led.leader.on_launched(7)
    led.leader.on_results(7, RESULTS)
    clock.leap_s = 7200.0
    seen = clock.sleeps
    while clock.sleeps < seen + 5:
        time.sleep(0.01)
    led.leader.on_results(8, RESULTS)
    assert led.failures.empty()
