"""`python -m launch.batch`, as a process of its own, with the bundled model: text in, text out, kills in between."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

# Few and small programs, those that test_serve compiles too: this is about lines, not about speed.
SMALL = ["--max-num-seqs=4", "--max-model-len=256", "--max-num-batched-tokens=64"]


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def command(*arguments):
    return [sys.executable, "-m", "launch.batch", *map(str, arguments), *SMALL]


def batch(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300)


def chat(i, **fields):
    body = {"messages": [{"role": "user", "content": f"What is os.path number {i}?"}], "max_tokens": 12} | fields
    return {"custom_id": f"chat-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(i, **fields):
    body = {"prompt": f"def function_{i}(", "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
    return {"custom_id": f"text-{i}", "method": "POST", "url": "/v1/completions", "body": body}


def write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_batch_of_both_kinds_with_bad_lines(files):
    source, output = files
    write(source, [completion(0), chat(1), "{bad", chat(2, temperature=9e9), completion(3, n=2), chat(1)])
    done = batch(*files)
    assert done.returncode == 0, done.stderr
    assert "answered 6 lines" in done.stderr and "3 with an error" in done.stderr
    rows = {row["id"]: row for row in answers(output)}
    assert len(rows) == 6
    bodies = {row["custom_id"]: row["response"]["body"] for row in rows.values() if row["response"]}
    assert bodies["text-0"]["choices"][0]["text"] and bodies["text-0"]["usage"]["completion_tokens"] == 12
    assert bodies["chat-1"]["object"] == "chat.completion"
    assert bodies["chat-2"]["error"]["param"] == "temperature"
    assert len(bodies["text-3"]["choices"]) == 2
    assert rows["batch_req_3"]["error"]["code"] == "invalid_json"
    assert rows["batch_req_6"]["error"]["code"] == "duplicate_custom_id"
    again = batch(*files)
    assert again.returncode == 0 and "answered already" in again.stderr
    assert len(answers(output)) == 6


def test_kills_and_signals_lose_nothing_and_double_nothing(files):
    source, output = files
    write(source, [completion(i, max_tokens=40) for i in range(40)])
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(command(*files), stderr=subprocess.PIPE, text=True)
        before = output.read_bytes().count(b"\n") if output.exists() else 0
        while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < before + 5):
            time.sleep(0.005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        if number == signal.SIGTERM:
            assert process.returncode == 128 + signal.SIGTERM, errors
            assert "interrupted by SIGTERM" in errors and "the same command goes on" in errors
    assert 10 <= len(answers(output)) < 40
    done = batch(*files)
    assert done.returncode == 0 and "resuming" in done.stderr, done.stderr
    rows = answers(output)
    assert sorted(row["custom_id"] for row in rows) == sorted(f"text-{i}" for i in range(40))
    assert all(row["response"]["body"]["usage"]["completion_tokens"] == 40 for row in rows)


def test_an_empty_file_needs_no_model(files):
    source, output = files
    source.write_text("")
    done = batch(*files)
    assert done.returncode == 0 and output.read_text() == ""


def test_mistakes_say_what_to_do(files):
    source, output = files
    write(source, [completion(0)])
    assert batch(source, source).returncode == 2
    assert batch(source).returncode == 2
    missing = batch(source.with_name("nowhere"), output)
    assert missing.returncode == 1 and "nowhere" in missing.stderr
    output.write_text("something else\n")
    refused = batch(source, output)
    assert refused.returncode == 1 and "name another output" in refused.stderr
    assert output.read_text() == "something else\n"
    nothing = batch(source, output, f"--model={source.parent}")
    assert nothing.returncode == 2 and "config.json" in nothing.stderr


def test_help_reads_well():
    done = batch("--help")
    assert done.returncode == 0
    assert "INPUT OUTPUT" in done.stdout and "--max_model_len" in done.stdout and os.path.sep not in done.stderr
