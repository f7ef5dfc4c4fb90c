"""A profile as a Chrome trace."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.engine.look import JobNote, Part, StepNote
from dsv3.server.answers.dashboard import events_of, write_trace

STEPS = [
    StepNote(
        launched=n,
        collected=n - 1 if n > 1 else 0,
        began=10.0 + n,
        parts=[Part("plan decode", 10.1 + n), Part("launch", 10.2 + n)] + ([Part("wait", 10.7 + n)] if n > 1 else []),
        jobs=[JobNote("decode", 8), JobNote("sample", 0)],
        running=n,
        waiting=0,
    )
    for n in (1, 2, 3)
]


def test_the_file_is_what_perfetto_reads(tmp_path) -> None:
    path = tmp_path / "steps.json.gz"
    size = write_trace(STEPS, path)
    assert size == path.stat().st_size
    trace = json.loads(gzip.decompress(path.read_bytes()))
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXC" and event["pid"] == 1 and event["name"]
        assert event["ph"] == "M" or (isinstance(event["ts"], int) and event["ts"] >= 0)
        assert event["ph"] != "X" or (isinstance(event["dur"], int) and event["dur"] >= 0)
        assert event["ph"] != "C" or all(isinstance(value, int) for value in event["args"].values())
    with pytest.raises(FileExistsError):
        write_trace(STEPS, path)


def test_parts_lie_inside_their_step_without_gaps() -> None:
    spans = [event for event in events_of(STEPS) if event["ph"] == "X" and event["tid"] == 1]
    steps = [span for span in spans if span["name"].startswith("step ")]
    assert [span["args"]["decode"] for span in steps] == [8, 8, 8]
    for step in steps:
        end = step["ts"]
        for part in (s for s in spans if s is not step and step["ts"] <= s["ts"] < step["ts"] + step["dur"]):
            assert part["ts"] == pytest.approx(end)
            end = part["ts"] + part["dur"]
        assert end == pytest.approx(step["ts"] + step["dur"])


TIMES = st.lists(st.floats(0, 1e-3), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=8), st.floats(0, 1e5))
def test_spans_of_a_lane_nest(steps, began) -> None:
    """Perfetto's importer drops a span that begins inside of another one and ends behind it.

    It keeps a lane's open spans on a stack, and closes those that have ended when the next one begins.
    """
    notes = []
    for number, lengths in enumerate(steps, 1):
        at, parts = began, []
        for what, length in zip(("launch", "wait", "collect", "wait", "launch"), lengths, strict=False):
            parts.append(Part(what, at := at + length))
        notes.append(StepNote(number, number - 1, began, parts, [], 1, 0))
        began = at
    for lane in (1, 2):
        open_ = []
        for span in sorted((e for e in events_of(notes) if e["ph"] == "X" and e["tid"] == lane), key=lambda e: e["ts"]):
            end = span["ts"] + span["dur"]
            while open_ and (open_[-1] < span["ts"] or (open_[-1] == span["ts"] and span["dur"])):
                open_.pop()
            assert not open_ or span["ts"] >= open_[-1] or end <= open_[-1]
            open_.append(end)


def test_the_devices_do_one_step_after_the_other() -> None:
    """Step n + 1 is launched before the results of step n are there: the devices begin it when they have these."""
    spans = [event for event in events_of(STEPS) if event["ph"] == "X" and event["tid"] == 2]
    assert [(span["args"]["step"], span["ts"], span["dur"]) for span in spans] == [
        (1, pytest.approx(0.2e6), pytest.approx(1.5e6)),
        (2, pytest.approx(1.7e6), pytest.approx(1e6)),
    ]
    assert {span["name"] for span in spans} == {"decode + sample"}


def test_no_steps_make_no_spans() -> None:
    assert all(event["ph"] == "M" for event in events_of([]))
