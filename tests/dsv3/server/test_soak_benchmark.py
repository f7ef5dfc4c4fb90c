"""`benchmarks.soak --hostile`, short: streams during attacks, and what its report counts as a miss."""

import json
import subprocess
import sys

import pytest

from benchmarks.soak import descriptor_problems
from benchmarks.soak_hostile import Felt, problems
from tests.dsv3.server import serving

ATTACKS = ["60 KiB chats, hung up", "NaN", "two lengths", "1-byte chunks"]


def test_honest_streams_survive_attacks(model_dir):
    """Asserts nothing about times, which depend on the machine."""
    with serving.running(model_dir) as server:
        command = [sys.executable, "-m", "benchmarks.soak", "--hostile", "--url", server.url]
        command += ["--server_pid", str(server.process.pid), "--clients=4", "--max_tokens=8", "--max_growth_mib=1000"]
        command += ["--seconds=4", "--attack_seconds=1", *(f"--attack={name}" for name in ATTACKS)]
        run = subprocess.run(command, cwd=serving.ROOT, capture_output=True, text=True, timeout=240)
        assert server.process.poll() is None
    report = json.loads(run.stdout[run.stdout.index("\n{") :])
    assert report["failed"] == report["refused_busy"] == 0, report
    assert report["finished"] and all(report["attacks"][name] for name in ATTACKS), report
    assert [text for text in report["problems"] if "took" not in text and "stood still" not in text] == []
    assert run.returncode == bool(report["problems"])


FELT = {"health": [0.01] * 1000, "stalls": [0.0], "failures": []}


@pytest.mark.parametrize(
    ("felt", "gaps", "growth", "word"),
    [
        ({}, [0.9], 499, None),
        ({"health": [0.01] * 990 + [0.6] * 10}, [], 0, None),
        ({"health": [0.01] * 989 + [0.6] * 11}, [], 0, "/health took 0.60 s"),
        ({"failures": ["health: reset"]}, [], 0, "1 of /health failed"),
        ({}, [0.1, 1.5], 0, "1 of 2 streams stood still, the longest for 1.50 s"),
        ({}, [], 501, "resident memory rose by 501 MiB"),
    ],
)
def test_the_goal_is_what_the_report_judges(felt, gaps, growth, word):
    found = problems(Felt(**FELT | felt), gaps, growth)
    assert [word in text for text in found] == ([] if word is None else [True])


@pytest.mark.parametrize(
    ("after", "word"),
    [
        ({1: 20, 2: 15}, None),
        ({1: 20, 2: 15, 3: 11}, None),  # a worker that has started
        ({1: 20, 2: 24}, "35 descriptors at the start, 44"),
        ({1: 20, 2: 24, 3: 11}, "35 descriptors at the start, 44"),
    ],
)
def test_descriptors_may_not_grow_in_the_processes_of_the_start(after, word):
    found = descriptor_problems({1: 20, 2: 15}, after)
    assert [word in text for text in found] == ([] if word is None else [True])
