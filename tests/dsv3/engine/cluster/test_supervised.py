"""A group that loses a process under its clients: all processes restart, and every stream resumes."""

import re
import signal
import subprocess
import sys

import jax
import numpy as np
import psutil
import pytest

from dsv3.engine.jobs.experts import read_state
from sharding.mesh import rank_mesh
from tests.dsv3.engine import toy, toy_experts
from tests.dsv3.engine.cluster import instances
from tests.dsv3.server.test_resume import COMPLETIONS
from tests.dsv3.server.test_survival import Streams

PROMPTS = [[i + 1, *(5 + j % 60 for j in range(20 * i))] for i in range(4)]
COUNT = 70
TOKENS, RESTARTS = "vllm:generation_tokens_total", "dsv3:engine_restarts_total"
BODY = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("supervised")


@pytest.fixture(scope="module")
def two(directory):
    """Nearly every test restarts it. The last ones remove its follower and bring it back, and its server too."""
    cluster = {"cluster_spare": False, "cluster_return_timeout": 30.0, "cluster_grow_interval": 0.1}
    engine = {"eplb_state": str(directory / "experts")}
    how = {"silence": 5.0, "supervised": True, "relayed": True, "cluster": cluster, "engine": engine}
    with instances.running(directory, 2, directory, **how) as instance:
        instance.server.http.timeout = 120
        yield instance


def answers(server, prompts=PROMPTS):
    """Two of four run, and the others wait for a slot."""
    return Streams(server, [(COMPLETIONS, BODY | {"prompt": prompt}, 1) for prompt in prompts])


def check(streams, prompts=PROMPTS):
    expected = [[toy.expected_tokens(prompt, COUNT, ())] for prompt in prompts]
    assert [state["ids"] for state in streams.wait()] == expected


def cut_the_link(instance):
    """Both live, and neither receives data from the other."""
    lines = {0: "process 1 has been silent for 5 s", 1: "the leader (process 0) has been silent for 5 s"}
    before = {i: instance.log(i).count(line) for i, line in lines.items()}
    instance.relay.cut()
    try:
        for i, line in lines.items():
            instance.server.wait_for(lambda i=i, line=line: instance.log(i).count(line) > before[i])
    finally:
        instance.relay.mend()


STRANGER = """
import sys
from jax._src.lib import _jax
_jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=3).connect()
"""
STALE = """
import sys
from dsv3.engine.cluster import start
from dsv3.engine.cluster.link import Incarnation
from dsv3.config.options import ClusterOptions
start._CONNECT_S = 3
cluster = ClusterOptions(coordinator=sys.argv[1], num_processes=2, process_id=1, cluster_key_file=sys.argv[2])
start.start_jax(cluster, Incarnation(int(sys.argv[3]), sys.argv[4]))
"""


def kept(file):
    """How many copies of each expert the next engine starts with. The saved map is never half a move."""
    if not file.exists():
        return toy_experts.FIRST.logcnt[0].tolist()
    experts = toy_experts.spread_over(rank_mesh(jax.devices()[:2], 2))
    found, loads = read_state(file, experts, toy_experts.FIRST)
    assert (found.phy2log == found.phy2log[0]).all() and np.min(loads, initial=0) >= 0
    return found.logcnt[0].tolist()


@pytest.mark.parametrize(("process_id", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_experts_are_whole_where_a_process_has_ended_while_they_moved(two, directory, process_id, number):
    """Two of three layers have moved, the third one is in progress.

    The leader is killed before its part of that, while the follower waits for it. The follower stops after its own
    part, and its supervisor kills it. Texts would differ where an expert's weights are not where the map says. All
    select one expert, which in the end has two copies.
    """
    chosen = 1 + process_id
    before, server, prompts = kept(directory / "experts"), two.server, [[chosen, *prompt] for prompt in PROMPTS]
    restarts, order = server.metric(RESTARTS), directory / str(process_id) / toy_experts.ENDS
    order.write_text(str(int(number)))
    streams = answers(server, prompts)
    server.wait_for(lambda: not order.exists())
    assert kept(directory / "experts") == before
    check(streams, prompts)
    server.wait_for(lambda: server.metric(RESTARTS) > restarts)
    assert kept(directory / "experts") == [2 if expert == chosen else 1 for expert in range(toy_experts.EXPERTS)]


def test_every_stream_resumes_after_the_link_between_two_processes_is_cut(two):
    server = two.server
    restarts, tokens = (server.metric(name) for name in (RESTARTS, TOKENS))
    streams = answers(server)
    server.wait_for(lambda: server.metric(TOKENS) > tokens + 20)
    cut_the_link(two)
    check(streams)
    server.wait_for(lambda: server.metric(RESTARTS) > restarts)


def ran(script, *arguments):
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, timeout=120, text=True)


def test_unauthenticated_and_outdated_processes_are_kept_out(two):
    """Neither can claim to be process 1, and end both.

    A client at the coordinator's port has no certificates. The other one has the key, and the certificates of a past
    generation.
    """
    number, front = re.findall(r"generation (\d+) of (\w+)", two.log(1))[-1]
    before = two.server.metric(RESTARTS)
    assert ran(STRANGER, two.coordinator).returncode != 0
    stale = ran(STALE, two.coordinator, two.key, str(int(number) - 1), front)
    assert stale.returncode != 0 and "RegisterTask" in stale.stderr, stale.stderr
    body = BODY | {"prompt": PROMPTS[1], "max_tokens": 8}
    answer = two.server.http.post(COMPLETIONS, json=body).json()
    assert answer["choices"][0]["token_ids"] == toy.expected_tokens(PROMPTS[1], 8, ())
    assert two.server.metric(RESTARTS) == before


def test_a_supervisor_that_is_killed_takes_its_follower_with_it_and_may_come_back(two):
    streams = answers(two.server)
    two.server.wait_for(lambda: two.server.metric("vllm:num_requests_running") > 0)
    family = psutil.Process(two.followers[1].pid).children(recursive=True)
    two.followers[1].kill()
    gone, there = psutil.wait_procs(family, 60)
    assert gone and not there
    two.start(1)
    check(streams)


def test_a_degraded_group_serves_until_the_missing_process_rejoins(two):
    """The leader is alone until the other one is back."""
    streams = answers(two.server)
    two.server.wait_for(lambda: two.server.metric("vllm:num_requests_running") > 0)
    two.followers[1].kill()
    check(streams)
    two.server.wait_for(lambda: "starting without process 1 of 2" in two.log(0))  # streams may have ended before that
    two.wait_ready()
    rank = {"headers": {"X-data-parallel-rank": "1"}, "json": BODY | {"prompt": [1], "max_tokens": 3}}
    assert two.server.http.post(COMPLETIONS, **rank).status_code == 400
    two.start(1)
    two.server.wait_for(lambda: "process 1 waits to rejoin (pid" in two.log(0), 120)  # the group ends within 0.25 s
    check(answers(two.server))
    two.server.wait_for(lambda: "process 1 of 2 has rejoined: all restart" in two.log(0))
    two.server.wait_for(lambda: two.server.http.post(COMPLETIONS, **rank).status_code == 200)


def test_followers_join_a_restarted_server(two):
    two.server.process.kill()
    two.serve_again()
    assert "API server 0 of the leader has ended" in two.log(1)
    check(answers(two.server))
    assert two.server.stop(60) == 0
    assert two.followers[1].wait(60) == 0
