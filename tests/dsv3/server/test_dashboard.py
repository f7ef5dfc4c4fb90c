"""The dashboard's page and data over HTTP, and profiles of steps, also as a Chrome trace."""

import base64
import gzip
import hashlib
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3.engine.step_log import EngineSnapshot, ExpertLoad, JobRecord, StepPhase, StepRecord
from dsv3.server.http.dashboard import expert_load_json, trace_events, write_trace
from tests.dsv3.server.conftest import KEY

COMPLETIONS = "/v1/completions"
BEARER = {"authorization": f"Bearer {KEY}"}


def data(server, **query):
    answer = server.http.get("/dashboard/data", params=query, headers=BEARER)
    assert answer.status_code == 200, answer.text
    return answer.json()


def work(server, tokens: int = 50) -> None:
    """Sends a request; the fake engine reports a queue time only where it finds a cached page of the prompt."""
    body = {"prompt": list(range(10, 80)), "max_tokens": tokens}
    server.http.post(COMPLETIONS, json=body, headers=BEARER).raise_for_status()


def test_the_page_needs_no_key_and_has_no_data(locked_server) -> None:
    answer = locked_server.http.get("/dashboard")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    for secret in ("tiny", KEY, str(locked_server.profiles)):  # neither model nor key nor path
        assert secret not in answer.text
    assert locked_server.http.get("/dashboard/data").status_code == 401
    assert locked_server.http.post("/dashboard").status_code == 401


def test_the_content_security_policy_allows_only_the_pages_own_code(server) -> None:
    plain = server.http.get("/dashboard", headers={"accept-encoding": "identity"})
    policy = dict(part.strip().split(" ", 1) for part in plain.headers["content-security-policy"].split(";"))
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", plain.text, re.DOTALL)
        assert len(content) > 1000
        assert (
            policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert not re.search(r"(src|href)=|style=|onclick|innerHTML|https?://(?!www\.w3\.org/2000/svg)", plain.text)
    packed = server.http.get("/dashboard", headers={"accept-encoding": "gzip"})
    assert (packed.headers["content-encoding"], packed.text) == ("gzip", plain.text)


def test_time_series_follow_the_work(server) -> None:
    server.wait_for(lambda: len(data(server)["series"]["time"]) >= 2)
    since = data(server)["series"]["time"][-1]
    work(server, 500)
    name = "generation_tokens_per_second"
    server.wait_for(lambda: max(data(server, since=since)["series"][name], default=0) > 0)
    series = data(server, since=since)["series"]
    assert all(time > since for time in series["time"])
    assert {len(row) for row in series.values()} == {len(series["time"])}
    assert series["ttft_p50"][-1] > 0 and "acceptance" not in series


def test_steps_are_recorded_while_a_client_asks(server) -> None:
    data(server)
    server.wait_for(lambda: data(server) is not None)
    work(server)
    server.wait_for(lambda: work(server, 20) or data(server)["steps"])
    step = data(server)["steps"][-1]
    assert step["parts"] and step["jobs"][0][0] == "decode"
    assert len(data(server)["steps"]) <= 120


@pytest.mark.parametrize("query", ["since=x", "since=nan", "experts=1e999", "since=" + "1" * 40, "experts=%00"])
def test_an_invalid_query_is_a_400(server, query) -> None:
    assert server.http.get(f"/dashboard/data?{query}").status_code == 400


def test_the_data_are_small_and_not_cached(server) -> None:
    answer = server.http.get("/dashboard/data?since=-5&experts=-1e9&other=1")
    assert answer.status_code == 200 and len(answer.content) < 400_000
    assert answer.headers["cache-control"] == "no-store"


def test_profiles_are_off_without_a_directory(server) -> None:
    for path in ("/start_profile", "/stop_profile"):
        answer = server.http.post(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "profiles_off")


def test_a_profile_is_a_file_with_the_steps(locked_server) -> None:
    http = locked_server.http
    assert http.post("/stop_profile", headers=BEARER).status_code in (200, 409)  # what another test has begun
    assert http.post("/stop_profile", headers=BEARER).json()["error"]["code"] == "no_profile"
    assert http.post("/start_profile", headers=BEARER).json()["status"] == "ok"
    work(locked_server, 30)
    answer = http.post("/stop_profile", headers=BEARER).json()
    file = locked_server.profiles / answer["file"]
    assert answer["bytes"] == file.stat().st_size and answer["steps"] >= 30
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("step ") for event in events) == answer["steps"]
    assert str(locked_server.profiles) not in str(answer)


def test_an_expert_load_is_sent_once_in_percent_of_the_mean() -> None:
    load = np.array([[1, 3], [0, 0]], "<f4").tobytes()
    seen = EngineSnapshot([], ExpertLoad(7, 2, 2, 2, load, load))
    found = expert_load_json(seen, -1, {"experts_moved": 4})
    assert (found["load"], found["before"], found["experts_moved"]) == ([[50, 150], [0, 0]], [], 4)
    assert "load" not in expert_load_json(seen, 7, {})
    assert expert_load_json(EngineSnapshot([], None), -1, {}) is None and expert_load_json(None, -1, {}) is None


STEPS = [
    StepRecord(
        launched=n,
        collected=n - 1 if n > 1 else 0,
        began=10.0 + n,
        parts=[StepPhase("plan decode", 10.1 + n), StepPhase("launch", 10.2 + n)]
        + ([StepPhase("wait", 10.7 + n)] if n > 1 else []),
        jobs=[JobRecord("decode", 8), JobRecord("sample", 0)],
        running=n,
        waiting=0,
    )
    for n in (1, 2, 3)
]


def test_the_trace_file_is_valid_for_perfetto(tmp_path) -> None:
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
    spans = [event for event in trace_events(STEPS) if event["ph"] == "X" and event["tid"] == 1]
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
    """Perfetto's importer drops a span that begins inside another one and ends after it.

    It keeps a lane's open spans on a stack, and closes those that have ended when the next one begins.
    """
    notes = []
    for number, lengths in enumerate(steps, 1):
        at, parts = began, []
        for what, length in zip(("launch", "wait", "collect", "wait", "launch"), lengths, strict=False):
            parts.append(StepPhase(what, at := at + length))
        notes.append(StepRecord(number, number - 1, began, parts, [], 1, 0))
        began = at
    for lane in (1, 2):
        open_ = []
        for span in sorted(
            (e for e in trace_events(notes) if e["ph"] == "X" and e["tid"] == lane), key=lambda e: e["ts"]
        ):
            end = span["ts"] + span["dur"]
            while open_ and (open_[-1] < span["ts"] or (open_[-1] == span["ts"] and span["dur"])):
                open_.pop()
            assert not open_ or span["ts"] >= open_[-1] or end <= open_[-1]
            open_.append(end)


def test_device_spans_do_not_overlap() -> None:
    """Step n + 1 is launched before the results of step n arrive; its span begins when they do."""
    spans = [event for event in trace_events(STEPS) if event["ph"] == "X" and event["tid"] == 2]
    assert [(span["args"]["step"], span["ts"], span["dur"]) for span in spans] == [
        (1, pytest.approx(0.2e6), pytest.approx(1.5e6)),
        (2, pytest.approx(1.7e6), pytest.approx(1e6)),
    ]
    assert {span["name"] for span in spans} == {"decode + sample"}


def test_no_steps_make_no_spans() -> None:
    assert all(event["ph"] == "M" for event in trace_events([]))
