"""Processes of past generations: which process refuses them, and with which text; and rejoining processes."""

import dataclasses
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv3.config.engine import EngineConfig
from dsv3.config.options import EngineOptions
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.leader import Leader
from dsv3.engine.cluster.link import Incarnation
from dsv3.engine.cluster.messages import Begin, FollowerFailed, Hello, Stop, Wait
from dsv3.engine.cluster.rejoin import RejoiningProcesses
from dsv3.engine.cluster.start import adapt_to_devices, redundant_experts
from dsv3.engine.errors import ClusterError
from tests.dsv3.engine.cluster import local
from tests.dsv3.engine.cluster.test_follower import Played, played, pytestmark  # noqa: F401
from tests.dsv3.model.golden import DIRECTORY

generations = st.builds(Incarnation, st.integers(0, 5), st.sampled_from(["a", "b"]))


@given(generations, generations)
def test_generations_of_one_api_server_have_an_order_and_a_secret_each(one, other) -> None:
    assert not one.is_over_for(None)
    assert one.is_over_for(one)
    if one != other and one.server == other.server:
        assert one.is_over_for(other) != other.is_over_for(one)
    if one.server != other.server:
        assert not one.is_over_for(other)
    assert (one.secret(b"key") == other.secret(b"key")) == (one == other)
    assert one.secret(b"key") != one.secret(b"other key")


@pytest.mark.parametrize(("last", "is_refused"), [(2, True), (3, True), (1, False)])
def test_a_leader_whose_generation_is_over_ends(tmp_path, last, is_refused) -> None:
    """A follower was in a later one already."""
    cluster = local.options(tmp_path, 2)
    failures: queue.Queue[str] = queue.Queue()
    leader = Leader(cluster, local.FIELDS, failures.put, failures.put, Incarnation(2, "a"))
    follower = threading.Thread(target=follow, args=(cluster, Incarnation(last, "a"), failures))
    follower.start()
    reason = f"process 1 was in generation {last} already: generation 2 is over"
    if is_refused:
        with pytest.raises(ClusterError, match=reason):
            leader.wait_for_followers()
        assert failures.get(timeout=30) == reason
    else:
        leader.wait_for_followers()
    leader.end(reason if is_refused else None)
    follower.join(30)
    assert failures.get(timeout=30) == str(Stop(reason) if is_refused else Begin(Incarnation(2, "a")))


def test_a_group_starts_without_processes_that_do_not_rejoin(tmp_path) -> None:
    """The connected ones are renumbered."""
    cluster = local.options(tmp_path, 4, cluster_return_timeout=0.5)
    leader = Leader(cluster, local.FIELDS, print, print, Incarnation(1, "a"))
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(leader.wait_for_followers)
        followers = [local.Follower(cluster, i, fields=local.FIELDS, last=Incarnation(0, "a")) for i in (1, 3)]
        assert gathered.result(30) == dataclasses.replace(cluster, num_processes=3)
    begun = [next(follower.received()) for follower in followers]
    assert begun == [Begin(Incarnation(1, "a"), 3, 1), Begin(Incarnation(1, "a"), 3, 2)]
    leader.send_limits(EngineConfig(max_model_len=64, num_pages=5, num_ranks=6, num_processes=3))
    assert leader._ranks == {1: range(2, 4), 3: range(4, 6)}
    for follower in followers:
        follower.wire.close()
    leader.end()


def test_a_node_with_a_missing_process_is_left_out(tmp_path) -> None:
    """One of three nodes of two processes has lost a process: the other one may rejoin."""
    cluster = local.options(tmp_path, 6, cluster_return_timeout=0.5, processes_per_node=2)
    leader = Leader(cluster, local.FIELDS, print, print, Incarnation(1, "a"))
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(leader.wait_for_followers)
        here = socket.gethostname()
        followers = [local.Follower(cluster, i, fields=local.FIELDS, host=here) for i in (1, 3, 4, 5)]
        place = gathered.result(30)
    assert (place.num_processes, place.num_nodes) == (4, 2)
    begun = {i: next(follower.received()) for i, follower in zip((1, 3, 4, 5), followers, strict=True)}
    assert begun.pop(3) == Wait()
    assert begun == {i: Begin(Incarnation(1, "a"), 4, place) for i, place in ((1, 1), (4, 2), (5, 3))}
    for follower in followers:
        follower.wire.close()
    leader.end()


def test_a_missing_process_of_the_leaders_node_ends_the_start(tmp_path) -> None:
    cluster = local.options(tmp_path, 4, cluster_return_timeout=0.5, processes_per_node=2)
    leader = Leader(cluster, local.FIELDS, print, print, Incarnation(1, "a"))
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(leader.wait_for_followers)
        followers = [local.Follower(cluster, i, fields=local.FIELDS) for i in (2, 3)]
        with pytest.raises(ClusterError, match=r"process 1 of 4 did not connect within 0\.5 s"):
            gathered.result(30)
    for follower in followers:
        follower.wire.close()
    leader.end()


def test_a_node_rejoins_once_all_its_processes_are_on_one_host(tmp_path) -> None:
    cluster = local.options(tmp_path, 6, cluster_grow_interval=1e-3, processes_per_node=2)
    returning = RejoiningProcesses(cluster, local.FIELDS)
    returning.on_serving()
    ends = []
    for process_id, host in ((2, "a"), (4, "b"), (5, "c"), (3, "a")):
        assert not returning.ready()
        ours, theirs = local.wires(*socket.socketpair())
        returning.admit(process_id, ours)
        theirs.send(messages.encode(Hello(local.FIELDS, host, 1)))
        assert messages.decode_for_follower(theirs.receive() or b"") == Wait()
        ends.append(theirs)
    while not (due := returning.ready()):
        time.sleep(0.01)
    assert due == {2, 3}
    for theirs in ends:
        theirs.close()


def test_a_rejoining_process_waits_for_the_next_group(tmp_path) -> None:
    """The group serves undisturbed for the interval; then it ends, and the process gets the reason."""
    cluster = local.options(tmp_path, 3, cluster_return_timeout=0.5, cluster_grow_interval=0.2)
    failures: queue.Queue[str] = queue.Queue()
    leader = Leader(cluster, local.FIELDS, failures.put, failures.put, Incarnation(1, "a"))
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(leader.wait_for_followers)
        one = local.Follower(cluster, 1, fields=local.FIELDS)
        gathered.result(30)
    other = local.Follower(cluster, 2, fields={"code": "2"})
    [refused] = other.received()
    assert isinstance(refused, Stop) and refused.failure is not None
    assert "process 2 is not configured as process 0: weights (abc there, none" in refused.failure
    other.wire.close()
    while leader._rejoining is not None and leader._rejoining.channels:
        time.sleep(0.01)
    back = local.Follower(cluster, 2, fields=local.FIELDS)
    assert next(waits := back.received()) == Wait()
    [twice] = local.Follower(cluster, 2, fields=local.FIELDS).received()
    assert twice == Stop("another process has --process_id 2 already")
    time.sleep(0.3)  # longer than the interval, which has not begun
    assert failures.empty()
    one.send(messages.Ready())
    leader.wait_ready()
    assert failures.get(timeout=30) == "process 2 of 3 has rejoined: all restart"
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(leader.end, "the reason")
        assert next(waits) == Stop("the reason")
        for each in (one, back):
            each.wire.close()
        ended.result(30)


def test_a_silent_rejoining_process_is_dropped(tmp_path) -> None:
    cluster = local.options(tmp_path, 2, cluster_silence_timeout=1e-3, cluster_grow_interval=1e-3)
    returning = RejoiningProcesses(cluster, local.FIELDS)
    returning.on_serving()
    ours, theirs = local.wires(*socket.socketpair())
    returning.admit(1, ours)
    theirs.send(messages.encode(Hello(local.FIELDS, "host", 1)))
    while returning.channels:
        assert returning.ready() <= {1}
    assert not returning.ready()
    theirs.close()


def test_the_first_group_needs_all_processes(tmp_path) -> None:
    cluster = local.options(tmp_path, 4, cluster_return_timeout=0.5)
    first = Leader(dataclasses.replace(cluster, cluster_start_timeout=0.7), local.FIELDS, print, print)
    with pytest.raises(ClusterError, match="processes 1, 2, 3 of 4 did not connect"):
        first.wait_for_followers()
    first.end()


@given(st.integers(1, 64), st.integers(0, 64), st.integers(2, 12))
def test_as_many_replicas_as_before_fit_fewer_devices(experts, redundant, before) -> None:
    """Each device stores as many as before, where all experts fit so, and never more than they need."""
    replicas = -(-(experts + redundant) // before) * before
    for devices in range(1, before):
        found = experts + redundant_experts(experts, replicas, before, devices)
        assert found % devices == 0 and found >= experts
        assert found // devices == max(replicas // before, -(-experts // devices))


@pytest.mark.parametrize(("redundant", "shards", "fits"), [(16, 1, (8, 0)), (32, 1, (8, 8)), (0, 2, (4, 0))])
def test_options_for_fewer_processes(tmp_path, redundant, shards, fits) -> None:
    """All eight devices of the one remaining process are used, where there were sixteen."""
    given = local.options(tmp_path, 2)
    options = EngineOptions(enable_expert_parallel=True, num_redundant_experts=redundant, tensor_parallel_size=shards)
    found = adapt_to_devices(options, DIRECTORY / "greedy", given, dataclasses.replace(given, num_processes=1))
    assert (found.data_parallel_size, found.num_redundant_experts) == fits
    assert adapt_to_devices(options, DIRECTORY / "greedy", given, given) is options


def follow(cluster, last: Incarnation, received: queue.Queue[str]) -> None:
    """Sends Hello, records the answer and ends."""
    wire = local.Follower(cluster, 1, fields=local.FIELDS, last=last)
    received.put(str(next(wire.received())))
    wire.wire.close()


def test_a_follower_refuses_a_leader_whose_generation_is_over(played: Played, tmp_path, monkeypatch) -> None:  # noqa: F811
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("dsv3.engine.cluster.follower.fields_of", lambda *_: {})
    played.follower._last = Incarnation(3, "a")
    main = threading.Thread(target=run, args=(played, tmp_path))
    main.start()
    hello = played.received()
    assert isinstance(hello, Hello) and hello.last == Incarnation(3, "a")
    played.leader.send(messages.encode(Begin(Incarnation(2, "a"))))
    failed = played.received()
    assert isinstance(failed, FollowerFailed)
    assert "the leader is of generation 2, which is over: this process was in generation 3" in failed.text
    played.leader.end()
    main.join(30)


def run(played: Played, directory) -> None:  # noqa: F811
    try:
        played.follower.follow(directory, EngineOptions(), lambda *_: pytest.fail("it has begun"))
    except Exception as error:
        played.follower.fail(error)
