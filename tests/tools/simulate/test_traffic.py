"""Traces and drawn requests, and errors with file and line."""

import dataclasses
import itertools
import json

import pytest

from tests.tools.simulate.tables import prefill_s, table
from tools.simulate.options import SimulateOptions
from tools.simulate.simulation import day_rate
from tools.simulate.times import TimesError, read_times, write_times
from tools.simulate.traffic import TokenRun, TrafficError, draw_requests, open_loop, read_trace

DRAWN = SimulateOptions(instances="x", request_rate=1.0, seconds=60.0)
MOONCAKE = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 9]}
TALK = {"conversations": [{"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y" * 80}] * 2}


def test_a_mooncake_request_is_blocks_and_a_rest(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(MOONCAKE | change) for change in ({}, {"timestamp": 20, "hash_ids": []})))
    sessions, has_times = read_trace(path)
    assert has_times and [session.at for session in sessions] == [0.02, 1.5]
    assert sessions[1].requests[0].content == (TokenRun(4, 512), TokenRun(5, 512), TokenRun(9, 76))
    assert [each.requests[0].prompt for each in sessions] == [1100, 1100]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_conversation_is_a_request_per_answer(tmp_path, suffix) -> None:
    path = tmp_path / f"talks{suffix}"
    path.write_text(json.dumps([TALK, TALK] if suffix == ".json" else TALK))
    sessions, has_times = read_trace(path)
    assert not has_times and len(sessions) == (2 if suffix == ".json" else 1)
    assert [(a.prompt, a.answer) for a in sessions[0].requests] == [(100, 20), (220, 20)]
    assert sessions[0].requests[1].content[:1] == sessions[0].requests[0].content


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "a.jsonl: has no requests"),
        ("a.jsonl", "{}\n", "line 1: Object missing required field `timestamp`"),
        ("a.jsonl", json.dumps(MOONCAKE) + "\nrubbish", "line 2: JSON is malformed"),
        ("a.jsonl", json.dumps(MOONCAKE | {"input_length": 0}), "line 1: input_length 0 must be above 0"),
        ("a.jsonl", json.dumps(MOONCAKE | {"output_length": -3}), "line 1: output_length -3 must be above 0"),
        ("a.jsonl", json.dumps(MOONCAKE | {"timestamp": -5}), "line 1: timestamp -5"),
        ("a.jsonl", json.dumps(MOONCAKE | {"timestamp": 1e18}), "must be from 0 to a year"),
        ("a.jsonl", "[" * 9999, "line 1: "),
        ("a.jsonl", '{"timestamp": 1, "x": ' + "[" * 99999, "line 1: "),
        ("a.jsonl", '{"conversations": 3}', "line 1: conversations is 3, but must be a list"),
        ("a.json", '[{"conversations": [{"from": "gpt"}]}]', "conversation 1: turn 1 is {'from': 'gpt'}"),
        ("a.json", "{", "cannot be read"),
        ("a.json", "{}", "contains a dict; must be a list"),
        ("a.json", "[" * 100_000, "cannot be read"),
        ("a.txt", "", "the file's name must end in .jsonl"),
        ("none.json", None, "cannot be read"),
    ],
)
def test_invalid_traces_are_refused(tmp_path, name, text, message) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(TrafficError, match=message):
        read_trace(tmp_path / name)


def test_drawn_requests_have_the_given_means() -> None:
    options = dataclasses.replace(DRAWN, prompt=2000.0, answer=300.0, shared=0.5, num_prefixes=64)
    requests = list(itertools.islice(draw_requests(options), 4000))
    assert sum(each.prompt for each in requests) / 4000 == pytest.approx(2000, rel=0.05)
    assert sum(each.answer for each in requests) / 4000 == pytest.approx(300, rel=0.05)
    shared = sum(each.content[0].tokens for each in requests if len(each.content) == 2)
    assert shared / sum(each.prompt for each in requests) == pytest.approx(0.5, rel=0.05)
    assert requests == list(itertools.islice(draw_requests(options), 4000))


def test_an_open_loop_follows_the_day() -> None:
    """The published day has 278 nodes at its peak and 68 at its lowest: traffic is in proportion."""
    rate = day_rate(240.0)
    assert rate(10.0) / rate(180.0) == pytest.approx(278 / 68, rel=0.01)
    times = [session.at for session in itertools.islice(open_loop(draw_requests(DRAWN), rate, 2.0, 0), 200)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": "x"}, "instances: give this deployment"),
        ({"request_rate": None}, "trace: give requests to replay"),
        ({"seconds": None}, "seconds: drawn requests never end"),
        ({"warm_up": 60.0}, "warm_up: 60.0 leaves nothing"),
        ({"concurrency": 3}, "concurrency: 3 is for drawn requests"),
        ({"goodput": ("itl:3",)}, "goodput: itl is not recorded"),
        ({"goodput": ("speed",)}, "goodput 'speed': expected METRIC"),
        ({"request_rate": 0.0}, "request_rate: 0.0 is not above 0"),
        ({"request_rate": float("nan")}, "request_rate: nan is not above 0"),
        ({"trace": "x", "day": True}, "day: a trace has its own times"),
    ],
)
def test_invalid_options_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DRAWN, **change)


def test_a_table_is_read_back(tmp_path) -> None:
    path = tmp_path / "times.json"
    write_times(path, {"x": table("decode")})
    assert read_times(path) == {"x": table("decode")}
    assert table().seconds("prefill", 64, 700) == pytest.approx(prefill_s(64, 700))
    assert table().seconds("prefill", 64, 10**6) == pytest.approx(prefill_s(64, 10**6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ('{"x": {}}', "missing required field"),
        ({"num_ranks": 0}, "x: num_ranks 0 must be above 0"),
        ({"num_pages": 3}, "x: num_pages: 3 pages"),
        ({"prefill": {}}, "x: prefill has no 10 times above 0 for the bucket 64"),
        ({"decode": {"1": [0] * 10}}, "x: decode has no 10 times above 0 for the bucket 1"),
    ],
)
def test_invalid_tables_are_refused(tmp_path, text, message) -> None:
    path = tmp_path / "times.json"
    if isinstance(text, dict):
        write_times(path, {"x": table()})
        text = json.dumps({"x": json.loads(path.read_text())["x"] | text})
    path.write_text(text)
    with pytest.raises(TimesError, match=message):
        read_times(path)
