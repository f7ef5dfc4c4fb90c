"""What a supervisor does when its process ends: by itself, by force, because it hangs, or after a signal."""

import signal

import psutil
import pytest

from dsv3.config.options import EngineOptions
from dsv3.engine.cluster import supervisor
from dsv3.engine.cluster.link import FollowOrder
from dsv3.processes.child import LinkedChild, RestartPolicy
from tests.dsv3.engine.cluster import local

TWICE = RestartPolicy(max_restarts=2)


@pytest.fixture
def supervise(tmp_path, monkeypatch, capfd):
    """Runs played processes; returns the last one's status, and the number of starts."""
    monkeypatch.setattr(supervisor, "_CHILD", "tests.dsv3.engine.cluster.played_child")

    def run(lives: str, policy: RestartPolicy | None = TWICE, silence: float = 60.0) -> tuple[int, int]:
        cluster = local.options(tmp_path, 2, 1, cluster_silence_timeout=silence)
        order = FollowOrder(cluster, "model", EngineOptions(), lives)
        status = supervisor.Supervisor(order, policy).run()
        return status, capfd.readouterr().out.count("life")

    yield run
    assert not [child for child in psutil.Process().children() if "played_child" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("lives", "policy", "end"),
    [
        ("begin serve 0", TWICE, (0, 1)),
        ("begin serve 1; begin serve 0", TWICE, (0, 2)),
        ("begin serve 1; begin 1; begin serve 0", TWICE, (0, 3)),
        ("begin serve 7", TWICE, (7, 3)),
        ("begin serve 1", None, (1, 1)),
        ("begin 1", TWICE, (1, 1)),
        ("1", TWICE, (1, 1)),
        ("begin serve 1; alone 1", TWICE, (1, 2)),
        ("waits 1", TWICE, (1, 3)),
    ],
    ids=[
        "in order", "after a death", "after a death during a restart", "too many deaths", "without restarts",
        "never up", "before it begins", "without a leader", "others serve without it",
    ],
)  # fmt: skip
def test_which_exits_are_final(supervise, lives, policy, end):
    assert supervise(lives, policy) == end


def test_a_process_that_is_stopped_is_replaced(supervise):
    assert supervise("begin serve hang; begin serve 0", silence=1.0) == (0, 2)


def test_a_process_that_survives_sigkill_is_final(supervise, monkeypatch):
    """It waits for a device or a disk, as one in state D does, and would be waited for without end."""
    killed = []
    monkeypatch.setattr(supervisor, "REAP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(LinkedChild, "_kill_session", lambda process: killed.append(process))
    assert supervise("begin serve hang; begin serve 0", silence=1.0) == (1, 1)
    for process in killed:
        process.signal(signal.SIGKILL)
        process.wait(60)


def test_a_signal_is_forwarded(supervise):
    assert supervise("begin serve ask wait") == (0, 1)


def test_after_a_signal_it_runs_until_the_leader_has_drained(supervise):
    assert supervise("begin serve deaf ask 1; begin serve 0") == (0, 2)
