"""Batches with a completer that needs no model: complete and without duplicates, also across kill -9."""

import collections
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from dsv3.batch.journal import BadLine, BatchError, LineParser
from tests.dsv3.batch.fake_completer import FakeCompleter, run_batch


def request(custom_id, prompt="abc", **fields):
    body = {"prompt": prompt}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | fields)


def write_input(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_every_line_is_answered_once(files):
    source, output = files
    write_input(source, [request(f"r{i}", "x" * (i % 5 + 1)) for i in range(50)])
    completer = FakeCompleter()
    progress = run_batch(source, output, completer, concurrency=4)
    assert (progress.succeeded, progress.failed, progress.total) == (50, 0, 50)
    assert progress.output_tokens == sum(i % 5 + 1 for i in range(50))
    assert completer.most_running == 4
    found = {row["custom_id"]: row for row in answers(output)}
    assert len(found) == len(answers(output)) == 50
    for i in range(50):
        assert found[f"r{i}"]["response"]["body"] == {"text": "x" * (i % 5 + 1)}
        assert found[f"r{i}"]["id"] == f"batch_req_{i + 1}"


def test_bad_lines_do_not_stop_the_rest(files):
    source, output = files
    lines = [
        request("good"), "{broken", request("good", "again"), "", request("wrong", url="/v1/audio"),
        request("refused", prompt=5), request("dies", prompt="explodes"), "   ", request("last"),
    ]  # fmt: skip
    write_input(source, lines)
    progress = run_batch(source, output)
    assert (progress.total, progress.succeeded, progress.failed) == (7, 2, 5)
    rows = {row["id"]: row for row in answers(output)}
    assert {i: row["error"]["code"] for i, row in rows.items() if row["error"]} == {
        "batch_req_2": "invalid_json",
        "batch_req_3": "duplicate_custom_id",
        "batch_req_5": "invalid_url",
    }
    statuses = {row["custom_id"]: row["response"]["status_code"] for row in rows.values() if row["response"]}
    assert statuses == {"good": 200, "refused": 400, "dies": 500, "last": 200}


def test_an_empty_input_makes_an_empty_output(files):
    source, output = files
    source.write_text("")
    assert run_batch(source, output).answered == 0
    assert output.read_text() == ""


def test_a_finished_batch_sends_no_requests(files):
    source, output = files
    write_input(source, [request(f"r{i}") for i in range(5)] + ["{broken"])
    run_batch(source, output)
    before, completer = output.read_bytes(), FakeCompleter()
    progress = run_batch(source, output, completer)
    assert progress.resumed == progress.total == 6
    assert completer.completed == 0 and output.read_bytes() == before


def test_a_cancelled_run_aborts_its_requests_and_the_next_one_answers_them(files):
    source, output = files
    write_input(source, [request(f"r{i}", "x" * 10) for i in range(30)])
    completer = FakeCompleter(char_s=0.0005)
    progress = run_batch(source, output, completer, stop_when=lambda p: p.succeeded >= 8)
    assert 8 <= progress.succeeded < 30
    assert completer.cancelled and completer.running == 0
    assert len(answers(output)) == progress.succeeded
    again = run_batch(source, output)
    assert again.resumed == progress.succeeded and again.answered == 30
    assert len({row["custom_id"] for row in answers(output)}) == len(answers(output)) == 30


def test_answers_survive_the_engines_death(files):
    source, output = files
    write_input(source, [request(f"r{i}") for i in range(20)])
    with pytest.raises(RuntimeError, match="the engine died"):
        run_batch(source, output, FakeCompleter(die_after=8))
    assert len(answers(output)) == 8
    run_batch(source, output)
    assert sorted(row["custom_id"] for row in answers(output)) == sorted(f"r{i}" for i in range(20))


def test_a_duplicate_is_found_after_a_resume(files):
    source, output = files
    write_input(source, [request("a"), request("b"), request("a", "second")])
    run_batch(source, output, concurrency=1, stop_when=lambda p: p.succeeded)
    assert [row["custom_id"] for row in answers(output)] == ["a"]
    run_batch(source, output)
    codes = {row["id"]: (row["error"] or {}).get("code") for row in answers(output)}
    assert codes == {"batch_req_1": None, "batch_req_2": None, "batch_req_3": "duplicate_custom_id"}


def test_memory_does_not_grow_with_the_input(files, monkeypatch):
    """Lines are read when they are needed, not ahead."""
    source, output = files
    write_input(source, [request(f"r{i}") for i in range(1000)])
    parsed = []
    monkeypatch.setattr(
        LineParser, "parse", lambda self, number, raw: parsed.append(number) or BadLine(number, "x", "", "")
    )
    run_batch(source, output, concurrency=3, stop_when=lambda p: p.failed >= 5)
    assert len(parsed) <= 5 + 3


@pytest.mark.parametrize("change", ["append", "touch"])
def test_a_change_of_the_input_during_a_run_is_an_error(files, change):
    source, output = files
    write_input(source, [request(f"r{i}") for i in range(30)])

    def change_input(progress):
        if progress.succeeded == 1 and change == "append":
            with source.open("a") as file:
                file.write(request("late") + "\n")
        elif progress.succeeded == 1:
            os.utime(source, (1, 1))

    with pytest.raises(BatchError, match="changed"):
        run_batch(source, output, concurrency=1, stop_when=change_input)
    assert all(row["custom_id"] != "late" for row in answers(output))


def test_kills_lose_and_repeat_no_line(files):
    source, output = files
    count = 400
    write_input(source, [request(f"r{i}", "x" * (i % 7 + 1)) for i in range(count)] + ["{broken", request("r3")])
    command = [sys.executable, "-m", "tests.dsv3.batch.fake_completer", str(source), str(output)]
    rng, kills = random.Random(5), 0
    while kills < 6:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        before = output.stat().st_size if output.exists() else 0
        while process.poll() is None and (output.stat().st_size if output.exists() else 0) <= before:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break
        kills += 1
        with output.open("ab") as file:
            file.write(b'{"id": "batch_req_' * (kills % 2))
    assert kills >= 3
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == count + 2
    ids = collections.Counter(row["id"] for row in answers(output))
    assert ids == {f"batch_req_{i}": 1 for i in range(1, count + 3)}
    texts = {row["custom_id"]: row["response"]["body"]["text"] for row in answers(output) if row["response"]}
    assert texts == {f"r{i}": "x" * (i % 7 + 1) for i in range(count)}
