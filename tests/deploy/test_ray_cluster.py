"""The driver of deploy/ray_cluster.py, over actors that a script stands for; `deploy.ray_cluster` itself needs Ray."""

import os
import signal

import pytest

ray = pytest.importorskip("ray", reason="the extra 'batch' brings Ray")

from deploy import node, ray_cluster  # noqa: E402
from dsv3.files import read_key  # noqa: E402
from launch.node import places  # noqa: E402
from tests.deploy.files import parsed  # noqa: E402


class FakeHost:
    """An actor whose process has these exit statuses, one after the other; the last one stays."""

    def __init__(self, *statuses):
        self.statuses, self.calls = list(statuses), []

    def __getattr__(self, name):
        return FakeMethod(self, name)


class FakeMethod:
    def __init__(self, host, name):
        self._host, self._name = host, name

    def remote(self, *arguments):
        self._host.calls.append((self._name, *arguments))
        statuses = self._host.statuses
        if self._name == "address":
            return "10.0.0.1:4000"
        return (statuses.pop(0) if len(statuses) > 1 else statuses[0]) if self._name == "poll" else None


@pytest.fixture(autouse=True)
def local(monkeypatch):
    """Results are there at once; an exception as a status is raised, as `ray.get` does."""

    def get(found, timeout):
        assert timeout > 0
        for each in found if isinstance(found, list) else [found]:
            if isinstance(each, Exception):
                raise each
        return found

    monkeypatch.setattr(ray_cluster.ray, "get", get)
    monkeypatch.setattr(ray_cluster, "_POLL_S", 0.001)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def names(host):
    return [name for name, *_ in host.calls]


def started(hosts, *flags):
    """Starts on these hosts; returns the flags of each process, and the keys that the hosts got."""
    options = ray_cluster._parse(["--num_hosts", str(len(hosts)), *flags])
    ray_cluster._start(hosts, options)
    starts = [call for host in hosts for call in host.calls if call[0] == "start"]
    nodes = [node.parse([*place, "--", *arguments]) for _, place, arguments, _ in starts]
    lines = [places(n.arguments, n.num_nodes, n.node_rank, n.processes_per_node) for n in nodes]
    return [line for each in lines for line in each], [key for *_, key in starts]


def test_every_gpu_gets_a_process_and_all_get_one_key():
    lines, keys = started([FakeHost(0) for _ in range(3)], "--gpus_per_host=8", "--", "--enable_expert_parallel")
    places = [parsed(line)[2] for line in lines]
    assert [place["process_id"] for place in places] == list(range(24))
    shared = {(place["coordinator"], place["num_processes"], place["processes_per_node"]) for place in places}
    assert shared == {("10.0.0.1:4000", 24, 8)}
    [key] = set(keys)
    assert read_key(ray_cluster._in_memory(key)) == key.encode()


@pytest.mark.parametrize(
    ("num_hosts", "flags", "processes"),
    [
        (2, [], 1),
        (2, ["--gpus_per_host=8"], 8),
        (2, ["--gpus_per_host=8", "--processes_per_host=1"], 1),
        (1, ["--gpus_per_host=8"], 1),
        (1, ["--gpus_per_host=8", "--processes_per_host=8"], 8),
    ],
)
def test_hosts_of_several_have_a_process_per_gpu_and_others_as_many_as_they_are_asked_for(num_hosts, flags, processes):
    lines, _ = started([FakeHost(0) for _ in range(num_hosts)], *flags)
    assert len(lines) == num_hosts * processes


@pytest.mark.parametrize("flag", ["--cluster_key_file=f", "--cluster-key-file"])
def test_a_key_that_was_given_is_taken(flag):
    assert not ray_cluster.needs_key(2, [flag, "f"]) and ray_cluster.needs_key(2, [])


def test_a_single_process_needs_neither_place_nor_key():
    assert started([FakeHost(0)], "--", "--port", "0") == ([["--port", "0"]], [None])


def test_the_first_end_ends_all_with_a_failure():
    hosts = [FakeHost(None), FakeHost(None, None, 1)]
    hosts[0].statuses = [None, None, None, 1]
    assert ray_cluster._watch(hosts, 60) == 1
    assert all("terminate" in names(host) for host in hosts)


def test_an_end_that_nobody_asked_for_is_a_failure():
    """Whoever stops one process by hand drains the instance; the job that should serve has then failed."""
    assert ray_cluster._watch([FakeHost(None, 0), FakeHost(0)], 60) == 1


def test_an_actor_that_is_lost_ends_all():
    hosts = [FakeHost(0), FakeHost(ray.exceptions.RayActorError())]
    hosts[0].statuses = [None, 0]
    assert ray_cluster._watch(hosts, 60) == 1 and "terminate" in names(hosts[0])


def test_a_signal_drains_and_is_no_failure():
    class Signalled(FakeHost):
        def __getattr__(self, name):
            if name == "poll" and len(self.calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__getattr__(name)

    host = Signalled(None, None, None, None, 0)
    assert ray_cluster._watch([host], 60) == 0
    assert names(host).count("terminate") == 1


def test_a_process_that_does_not_end_is_not_waited_for_forever():
    assert ray_cluster._end([FakeHost(None)], 0.01, failed=False) == 1


def test_flags_of_the_server_come_behind_two_dashes():
    options = ray_cluster._parse(["--num_hosts", "2", "--", "--model", "d", "--", "x"])
    assert (options.num_hosts, options.arguments) == (2, ["--model", "d", "--", "x"])
