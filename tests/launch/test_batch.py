"""`python -m launch.batch`, as a process of its own, with the bundled model: text in, text out, kills in between."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dsv3
from dsv3.batch.journal import Journal, RequestLine, answer_line, model_identity, summarize_input

BUNDLED = Path(dsv3.__file__).parent / "bundled"
# Few and small programs, which test_serve compiles too.
SMALL = ["--max-num-seqs=4", "--max-model-len=256", "--max-num-batched-tokens=64"]
# One process for command lines that start no engine: their imports take much longer than their work.
SEVERAL = """
import contextlib, io, json, sys
from absl.flags import FLAGS
from launch import batch, flags

results = []
for line in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            flags.run(batch.main, "INPUT OUTPUT", ["launch.batch", *line])
        except SystemExit as end:
            results.append([end.code, out.getvalue(), errors.getvalue()])
    FLAGS.unparse_flags()
print(json.dumps(results))
"""


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def command(*arguments):
    return [sys.executable, "-m", "launch.batch", *map(str, arguments), *SMALL]


def batch(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300)


def several(*lines):
    """Status, output and errors of command lines, one after the other."""
    given = json.dumps([[*map(str, line)] for line in lines])
    done = subprocess.run([sys.executable, "-c", SEVERAL, given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


def test_kills_and_signals_lose_and_repeat_no_line(files):
    """A batch of both endpoints with invalid lines is killed, then interrupted, then finished."""
    source, output = files
    others = [completion(40, n=2), chat(1), "{bad", chat(2, temperature=9e9), chat(1)]
    write(source, [*(completion(i, max_tokens=40) for i in range(40)), *others])
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(command(*files), stderr=subprocess.PIPE, text=True)
        before = output.read_bytes().count(b"\n") if output.exists() else 0
        while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < before + 5):
            time.sleep(0.005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        if number == signal.SIGTERM:
            assert process.returncode == 128 + signal.SIGTERM, errors
            assert "interrupted by SIGTERM" in errors and "run the same command to continue" in errors
    num_before = len(answers(output))
    assert 10 <= num_before < 40
    done = batch(*files)
    assert done.returncode == 0 and "resuming" in done.stderr, done.stderr
    assert f"answered {45 - num_before} lines" in done.stderr and "3 of 45 lines have errors:" in done.stderr
    assert "line 43: the line is not a JSON object" in done.stderr and "status 400: temperature" in done.stderr
    rows = {row["id"]: row for row in answers(output)}
    assert len(rows) == len(answers(output)) == 45
    bodies = {row["custom_id"]: row["response"]["body"] for row in rows.values() if row["response"]}
    for i in range(40):
        answer = bodies[f"text-{i}"]
        assert answer["choices"][0]["text"] and answer["usage"]["completion_tokens"] == 40
    assert len(bodies["text-40"]["choices"]) == 2
    assert bodies["chat-1"]["object"] == "chat.completion"
    assert bodies["chat-2"]["error"]["param"] == "temperature"
    assert rows["batch_req_43"]["error"]["code"] == "invalid_json"
    assert rows["batch_req_45"]["error"]["code"] == "duplicate_custom_id"
    again = batch(*files)
    assert again.returncode == 0 and "all 45 lines are answered already" in again.stderr
    assert "3 of 45 lines have errors:" in again.stderr
    assert len(answers(output)) == 45


def test_commands_that_need_no_model(files):
    """An empty file, the help, and errors that say what to change."""

    source, output = files
    write(source, [completion(0)])
    table, refused_all = source.with_name("rows.csv"), source.with_name("refused.jsonl")
    table.write_text("q\nx\n")
    write(refused_all, [chat(i) for i in range(5)])
    journal = Journal.open(refused_all.with_name("r"), summarize_input(refused_all), model_identity(BUNDLED))
    for i in range(1, 6):
        journal.append(i, answer_line(RequestLine(i, f"{i}", "", b""), 400, "", {"error": {"message": "no\nway"}}))
    journal.close()
    empty, foreign = source.with_name("empty"), source.with_name("foreign")
    empty.write_text("")
    foreign.write_text("something else\n")
    same, alone, missing, refused, nothing, no_model, helped, no_body, all_refused = several(
        (source, source),
        (source,),
        (source.with_name("nowhere"), output),
        (source, foreign),
        (empty, output),
        (source, source.with_name("other"), f"--model={source.parent}"),
        ("--help",),
        (table, source.with_name("t.csv"), "--prompt_column=q", '--body={"max_tokens": "x"}'),
        (refused_all, refused_all.with_name("r")),
    )
    assert (same[0], alone[0]) == (2, 2)
    assert missing[0] == 1 and "nowhere: no such file" in missing[2]
    assert no_body[0] == 1 and "--body: max_tokens" in no_body[2] and not table.with_name("t.csv.work").exists()
    assert all_refused[0] == 1 and "5 of 5 lines have errors:\n  line 1: status 400: no way\n" in all_refused[2]
    assert "and 2 more" in all_refused[2]
    assert refused[0] == 1 and "name another output" in refused[2]
    assert foreign.read_text() == "something else\n"
    assert nothing[0] == 0 and output.read_text() == ""
    assert no_model[0] == 2 and "config.json" in no_model[2]
    assert helped[0] == 0 and os.path.sep not in helped[2]
    assert "INPUT OUTPUT" in helped[1] and "--max_model_len" in helped[1]
