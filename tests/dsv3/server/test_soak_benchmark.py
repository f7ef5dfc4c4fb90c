"""`benchmarks.soak --hostile`, short: streams during attacks, and what its report counts as a miss."""

import sys

import pytest

from benchmarks.attacks import Felt
from benchmarks.attacks import problems as problems_of
from benchmarks.record import Report
from benchmarks.soak import descriptor_problems, main
from tests.dsv3.server import serving

ATTACKS = ["60 KiB chats, hung up", "NaN", "two lengths", "1-byte chunks"]


def test_honest_streams_survive_attacks(model_dir, monkeypatch):
    """Asserts nothing about the server's times, which depend on the machine."""
    report = Report()
    with serving.running(model_dir) as server:
        command = ["soak", "--hostile", "--url", server.url, "--server_pid", str(server.process.pid), "--clients=4"]
        command += ["--max_tokens=8", "--max_growth_mib=1000", "--seconds=4", "--attack_seconds=1"]
        monkeypatch.setattr(sys, "argv", [*command, "--attack", *ATTACKS])
        status = main(report)
        assert server.process.poll() is None
    counts, _, _, attacks, problems = (table.rows for table in report.tables)
    counted = dict(counts)
    assert counted["failed"] == counted["refused, the queue being full"] == 0, counts
    assert counted["streams finished"] and all(dict(attacks)[name] for name in ATTACKS), counts
    assert [text for (text,) in problems if "took" not in text and "stood still" not in text] == []
    assert status == bool(problems)


FELT = {"health": [0.01] * 1000, "failures": []}


@pytest.mark.parametrize(
    ("felt", "gaps", "growth", "word"),
    [
        ({}, [0.9], 499, None),
        ({"health": [0.01] * 990 + [0.6] * 10}, [], 0, None),
        ({"health": [0.01] * 989 + [0.6] * 11}, [], 0, "/health took 0.60 s"),
        ({"failures": ["/health: reset"]}, [], 0, "1 honest requests failed"),
        ({}, [0.1, 1.5], 0, "1 of 2 streams stood still, the longest for 1.50 s"),
        ({}, [], 501, "resident memory rose by 501 MiB"),
    ],
)
def test_the_goal_is_what_the_report_judges(felt, gaps, growth, word):
    found = problems_of(Felt(**FELT | felt), gaps, growth)
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
