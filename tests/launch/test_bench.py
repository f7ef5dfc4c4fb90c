"""`python -m launch.bench serve`, as a process of its own, against a scripted server."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.tools.bench.fake_openai import fake_server
from tests.tools.bench.test_drafts import vllm


def bench(server, *arguments, command="serve"):
    line = [sys.executable, "-m", "launch.bench", command, f"--url={server.url}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


def test_closed_loop_reports_what_was_sent(tmp_path):
    output = tmp_path / "report.json"
    with fake_server(["plain"]) as server:
        done = bench(
            server, "--concurrency=4", "--num-prompts", "12", "--input-len=9", "--output-len=5", "--prefix-len=3",
            "--num-warmups=2", "--goodput=ttft:60000,itl:60000", f"--output={output}", "--api-key=hidden",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "closed loop, 4 at a time" in done.stdout and "goodput" in done.stdout
    report = json.loads(output.read_text())
    assert report["requests"] == {"sent": 12, "completed": 12, "failed": 0}
    assert report["tokens"] == {"input": 12 * 12, "input_cached": 12, "output": 60, "itl_per": "token"}
    assert report["goodput"]["requests"] == 12
    assert report["options"]["model"] == "plain" and report["options"]["prompt_kind"] == "token_ids"
    assert len(report["per_request"]) == 12
    assert "hidden" not in output.read_text()
    assert len(server.bodies) == 14 and all(body["max_tokens"] == 5 for body in server.bodies)
    prompts = [body["prompt"] for body in server.bodies]
    assert all(len(prompt) == 12 and min(prompt) >= 1000 for prompt in prompts)
    # The measured prompts share their prefix; the warm-up has one of its own.
    assert {tuple(prompt[:3]) for prompt in prompts[2:]} == {tuple(prompts[2][:3])} != {tuple(prompts[0][:3])}


def test_a_sweep_measures_one_concurrency_after_the_other(tmp_path):
    output, plot = tmp_path / "curve.json", tmp_path / "curve.svg"
    with fake_server(["paced"]) as server:
        done = bench(
            server, "--concurrencies=1,3", "--requests-per-user=2", "--devices=4", "--input-len=5", "--output-len=6",
            f"--output={output}", f"--plot={plot}", "--api-key=hidden", command="sweep",
        )  # fmt: skip
        assert server.most_running == 3
    assert done.returncode == 0, done.stderr
    assert "per user" in done.stdout and "paced at" in done.stdout and "4 device(s)" in done.stdout
    assert plot.read_text().lstrip().startswith("<?xml") and "hidden" not in output.read_text()
    points = json.loads(output.read_text())["points"]
    assert [(each["concurrency"], each["requests"]["completed"]) for each in points] == [(1, 2), (3, 6)]
    for each in points:
        assert each["tokens_per_s_per_user"] == pytest.approx(1e3 / each["tpot_ms"]["mean"])
        assert each["tokens_per_s_per_device"] == pytest.approx(each["tokens_per_s"] / 4)
        assert each["tokens_per_s"] * each["duration_s"] == pytest.approx(6 * each["requests"]["completed"])
    # Warm-ups too: as many as run at a time, and no prompt comes twice.
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(prompts) == 1 + 2 + 3 + 6 == len(set(prompts))


def test_an_interrupted_sweep_keeps_the_points_it_has(tmp_path):
    output = tmp_path / "curve.json"
    sizes = ["--concurrencies=1,2,4", "--requests-per-user=20", "--num-warmups=0", "--output-len=4", "--input-len=4"]
    with fake_server(["paced"]) as server:
        out, err, status = interrupted(server, 30, signal.SIGINT, *sizes, f"--output={output}", command="sweep")
    assert status == 0, err
    points = json.loads(output.read_text())["points"]
    assert points[0]["requests"]["completed"] == 20 and len(points) <= 3
    assert "interrupted" in out or len(points) == 3


def test_acceptance_of_drafts_is_that_of_the_load(tmp_path):
    output = tmp_path / "report.json"
    with fake_server(["plain"]) as server:
        server.metrics = [vllm((10, 20, 12, [8, 4])), vllm((110, 220, 152, [98, 54]))]
        done = bench(server, "--concurrency=1", "--num-prompts=2", "--input-len=4", f"--output={output}")
    assert done.returncode == 0, done.stderr
    for figure in ("70.0% of 200", "90.0%, 50.0%", "2.40 tokens per row and step"):
        assert figure in done.stdout
    assert json.loads(output.read_text())["drafts"]["acceptance_length"] == 2.4
    assert not server.metrics


def test_open_loop_over_a_dataset_with_failures(tmp_path):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": f"prompt {i}", "max_tokens": 2 + i}) + "\n" for i in range(6)))
    output = tmp_path / "report.json"
    with fake_server(["error"]) as server:
        done = bench(server, "--request_rate=200", "--num_warmups=0", f"--dataset={dataset}", f"--output={output}")
    report = json.loads(output.read_text())
    assert done.returncode == 1
    assert report["requests"] == {"sent": 6, "completed": 0, "failed": 6}
    assert report["errors"]["error event"]["count"] == 6 and "engine died" in done.stdout
    assert sorted(body["max_tokens"] for body in server.bodies) == [2, 3, 4, 5, 6, 7]


def test_all_at_once_is_a_rate_that_json_can_hold(tmp_path):
    output = tmp_path / "report.json"
    with fake_server(["plain"]) as server:
        done = bench(server, "--request-rate=inf", "--concurrency=3", "--num-prompts=9", f"--output={output}")
    assert done.returncode == 0 and "at most 3 at a time" in done.stdout
    report = json.loads(output.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert report["options"]["request_rate"] == "inf" and report["requests"]["completed"] == 9
    assert server.most_running <= 3


def test_chat_sends_words_and_only_openai_fields():
    with fake_server(["reasoning"]) as server:
        done = bench(server, "--endpoint=chat", "--noextensions", "--concurrency=1", "--num-prompts=2", "--input-len=6")
    assert done.returncode == 0, done.stderr
    assert "per chunk" in done.stdout
    for body in server.bodies:
        assert len(body["messages"][0]["content"].split()) == 6
        assert "ignore_eos" not in body and "return_token_ids" not in body


def test_words_stand_in_where_the_server_has_no_tokenize():
    with fake_server(["plain"], tokenize=False) as server:
        assert bench(server, "--concurrency=1", "--num-prompts=1", "--input-len=4").returncode == 0
        assert isinstance(server.bodies[-1]["prompt"], str)
        refused = bench(server, "--concurrency=1", "--prompt-kind=token_ids")
        assert refused.returncode == 1 and "--vocab_size" in refused.stderr
        assert bench(server, "--concurrency=1", "--num-prompts=1", "--vocab-size=7").returncode == 0
        assert set(server.bodies[-1]["prompt"]) <= set(range(7))


def test_a_refused_warm_up_ends_the_run():
    with fake_server(["busy"]) as server:
        done = bench(server, "--concurrency=2")
    assert done.returncode == 1
    assert "warm-up" in done.stderr and "queue is full" in done.stderr and len(server.bodies) == 1


def interrupted(server, count, number, *arguments, command="serve"):
    """Status and output of a run that gets signal `number` after `count` requests, as a background job of a script.

    A shell starts those with SIGINT ignored.
    """
    line = [sys.executable, "-m", "launch.bench", command, f"--url={server.url}", *arguments]
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while len(server.bodies) < count and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        return *process.communicate(timeout=120), process.returncode
    finally:
        process.kill()


def test_an_interrupt_reports_what_was_measured(tmp_path):
    output = tmp_path / "report.json"
    sizes = ["--concurrency=2", "--num-prompts=100000", "--output-len=4", "--input-len=4"]
    with fake_server(["paced"]) as server:
        out, err, status = interrupted(server, 20, signal.SIGINT, *sizes, f"--output={output}")
    assert status == 0, err
    report = json.loads(output.read_text())
    assert report["interrupted"] and report["requests"]["completed"] >= 17
    assert "interrupted" in out


def test_an_interrupt_before_anything_was_measured_says_so():
    with fake_server(["hangs"]) as server:
        out, err, status = interrupted(server, 1, signal.SIGTERM, "--concurrency=1", "--num-prompts=1")
    assert (status, out) == (1, "") and "interrupted while warming up" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency=2"], "--concurrencies"),
        (["--concurrencies=4,2"], "must rise"),
        (["--concurrencies=0,2"], "none below 1"),
        (["--concurrencies=few"], "integers"),
        (["--requests-per-user=0"], "--requests_per_user 0"),
        (["--plot=curve.pdf"], ".svg"),
        (["--plot=/nowhere/curve.svg"], "no such folder"),
    ],
)
def test_mistakes_of_a_sweep_end_with_status_2(arguments, words):
    with fake_server() as server:
        done = bench(server, *arguments, command="sweep")
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--concurrency"),
        (["--concurrency=0"], "--concurrency 0"),
        (["--request-rate=-1"], "--request_rate"),
        (["--concurrency=1", "--goodput=speed:5"], "--goodput"),
        (["--concurrency=1", "--dataset=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--concurrency=1", "--output=/nowhere/report.json"], "no such folder"),
        (["--concurrency=1", "--endpoint=chat", "--prompt-kind=token_ids"], "takes text"),
        (["--concurrency=1", "--url=localhost:8000"], "http://HOST:PORT"),
        (["--concurrency=1", "--api-key=a\nb"], "printable"),
    ],
)
def test_mistakes_end_with_status_2_and_what_to_change(arguments, words):
    with fake_server() as server:
        done = bench(server, *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_no_server_and_no_command():
    with fake_server() as server:
        pass
    refused = bench(server, "--concurrency=1")
    assert refused.returncode == 1 and "connect" in refused.stderr
    assert bench(server, command="train").returncode == 2
