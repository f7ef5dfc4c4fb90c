"""`python -m launch.serve` as a user types it: the bundled model, the real engine, a real socket."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.launch.preloaded import run
from tools.doctor import serve as doctor

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "launch.serve"]
SMALL = ["--max-num-seqs", "4", "--max_model_len=1024", "--max_num_batched_tokens=64", "--max-num-queued-reqs", "20"]
WITH_DRIVER = Path(__file__).parents[1] / "with_driver"
UNREACHED_DRIVER = {
    "PYTHONPATH": os.pathsep.join((str(WITH_DRIVER), os.environ.get("PYTHONPATH", str(ROOT)))),
    "JAX_PLATFORMS": "",
    "CUDA_VISIBLE_DEVICES": "",
}
"""Environment of a process in which jax runs on the CPU although this machine may have a GPU."""
NO_GPU = r"jax runs on the CPU \(.*\)\. This machine has NVIDIA driver 580.82.07\. .*set JAX_PLATFORMS=cpu"
PROMPT = "def read(self, size):\n    "


@contextlib.contextmanager
def serving(*arguments):
    """Starts a server; yields its process and its lines up to the curl command."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("curl "):
                break
        else:
            pytest.fail("\n".join(lines))
        yield process, lines
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def tiers(tmp_path_factory):
    """Flags for pages in host memory and in a directory."""
    return ["--kv_offloading_size=0.02", f"--kv_store={tmp_path_factory.mktemp('pages')}"]


@pytest.fixture(scope="module")
def server(tiers):
    """The process and its lines; the bundled model with small programs."""
    with serving(*SMALL, *tiers) as started:
        yield started
    for path in set(re.findall(r"host memory in (\S+):", "\n".join(started[1]))):
        Path(path).unlink(missing_ok=True)  # another start may have removed what an ended process left


@pytest.fixture(scope="module")
def url(server):
    return re.search(r"ready at (http://\S+)", "\n".join(server[1]))[1]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def complete(client, prompt, **kwargs):
    answer = client.completions.create(
        model="dsv3-tiny", prompt=prompt, **{"max_tokens": 20, "temperature": 0} | kwargs
    )
    return answer.choices[0].text


def metric(url, name, label=""):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0] == name and label in line)


def test_printed_lines(server):
    text = "\n".join(server[1])
    assert "serving dsv3-tiny from" in text
    assert re.search(r"\[\d+/\d+\] compiling ", text)
    assert "ready at http://127.0.0.1:" in text
    assert "1024 tokens per request, 4 requests at once" in text
    assert re.search(r"dsv3-tiny: family deepseek_v3, \S+ million parameters, .* bytes of cache per token \(", text)
    assert re.search(r"host memory in \S+: 0.02 GiB for \d+ pages, 0 found again", text)


def test_the_printed_curl_line(server, url):
    """Sent with httpx, since curl may be missing."""
    words = shlex.split(server[1][-1])
    assert words[0] == "curl" and words[1].startswith(url) and words[2] == "-H" and words[4] == "-d"
    name, _, value = words[3].partition(": ")
    answer = httpx.post(words[1], content=words[5], headers={name: value}, timeout=120)
    assert answer.json()["choices"][0]["message"]["content"]


def test_greedy_text_is_the_same_streamed_batched_and_alone(client):
    alone = complete(client, PROMPT)
    assert len(alone) > 10
    stream = client.completions.create(model="dsv3-tiny", prompt=PROMPT, max_tokens=20, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in stream) == alone
    batch = client.completions.create(
        model="dsv3-tiny", prompt=[PROMPT, "import os", PROMPT, "class A:"] * 2, max_tokens=20, temperature=0
    )
    assert [batch.choices[i].text for i in (0, 2, 4, 6)] == [alone] * 4


def test_seeds(client):
    first = complete(client, PROMPT, temperature=1, seed=7)
    assert complete(client, PROMPT, temperature=1, seed=7) == first
    assert complete(client, PROMPT, temperature=1, seed=8) != first


def test_stop_string_and_logprobs(client):
    whole = complete(client, PROMPT)
    stop = whole[5:9]
    assert complete(client, PROMPT, stop=stop) == whole[: whole.index(stop)]
    answer = client.completions.create(model="dsv3-tiny", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == pytest.approx(max(top.values()))
        assert chosen < 0


def test_a_repeated_prompt_hits_the_prefix_cache(client):
    prompt = list(range(10, 110))
    for expected in (0, 64):
        answer = client.completions.create(model="dsv3-tiny", prompt=prompt, max_tokens=2, temperature=0)
        assert answer.usage.prompt_tokens_details.cached_tokens == expected
    salted = client.completions.create(
        model="dsv3-tiny", prompt=prompt, max_tokens=2, extra_body={"cache_salt": "another tenant"}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_in_the_form_of_the_template(client):
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    answer = client.chat.completions.create(model="dsv3-tiny", messages=messages, max_tokens=30, temperature=0)
    assert answer.choices[0].message.content


SWITCH = {
    "name": "switch_light",
    "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "switch_light"}}])
def test_an_agent_calls_a_tool_and_continues_with_its_result(client, choice):
    """No option is needed; messages are sent back as the client has them, also with null content."""
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Switch the light on."}]
    settings = {"model": "dsv3-tiny", "tools": [{"type": "function", "function": SWITCH}], "temperature": 0}
    answer = client.chat.completions.create(
        **settings, messages=messages, tool_choice=choice, parallel_tool_calls=False
    ).choices[0]
    [call] = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content, call.function.name) == ("tool_calls", None, "switch_light")
    assert set(json.loads(call.function.arguments)) == {"on"}
    messages += [answer.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    answer = client.chat.completions.create(**settings, messages=messages, max_tokens=5).choices[0]
    assert answer.message.tool_calls is None and answer.message.content
    refused = [*messages, {"role": "user", "content": None}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[4\]: .* role user needs content"):
        client.chat.completions.create(**settings, messages=refused)


def test_limits_are_those_of_the_engine(client):
    with pytest.raises(openai.BadRequestError, match="1024 tokens"):
        complete(client, [11] * 1018, max_tokens=7)
    with pytest.raises(openai.BadRequestError, match="token id"):
        complete(client, [10**6])
    assert complete(client, [11] * 1018, max_tokens=6, extra_body={"ignore_eos": True}) is not None


def test_nothing_is_compiled_or_leaked_after_the_start(client, url):
    client.chat.completions.create(
        model="dsv3-tiny",
        messages=[{"role": "user", "content": "x"}],
        n=3,
        max_tokens=5,
        logprobs=True,
        top_logprobs=5,
        presence_penalty=1,
        logit_bias={"5": -1},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2},
    )
    assert metric(url, "dsv3:recompilations_total") == 0
    assert metric(url, "dsv3:pages_in_use") == 0
    assert metric(url, "vllm:prefix_cache_hits_total") > 0
    for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency"):
        assert metric(url, f"vllm:{name}_seconds_count") == metric(url, "vllm:time_to_first_token_seconds_count")
    assert metric(url, "vllm:request_queue_time_seconds_sum") < metric(url, "vllm:time_to_first_token_seconds_sum")


KINDS = [
    {},
    {"temperature": 1, "seed": 3, "top_p": 0.9},
    {"temperature": 1, "seed": 4, "presence_penalty": 1, "frequency_penalty": 0.5, "n": 2},
    {"repetition_penalty": 1.2, "logit_bias": {"40": 2}, "logprobs": 2},
    {"temperature": 1.2, "seed": 5, "min_tokens": 80, "stop": ["e"]},
    {"structured_outputs": {"regex": "[a-z ]{90,100}"}},
]


def streamed(url, body, on_event=lambda count: None):
    """Returns text, log-probabilities and end of each choice of a stream, and the number of its tokens."""
    asked = {"model": "dsv3-tiny", "prompt": PROMPT, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    asked |= {"stream": True, "stream_options": {"include_usage": True}} | body
    choices, usage, count = {}, None, 0
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {"choices": []}
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                found = choices.setdefault(choice["index"], ["", [], None])
                found[0] += choice["text"]
                found[1] += (choice["logprobs"] or {"tokens": []})["tokens"]
                found[2] = choice["finish_reason"] or found[2]
                count += 1
                on_event(count)
    return choices, usage["completion_tokens"]


def test_streams_resume_when_the_engine_is_killed(server, url):
    """They continue after their tokens, with any kind of sampling; some wait in the queue."""
    undisturbed = [streamed(url, body) for body in KINDS]
    assert all(end for choices, _ in undisturbed for *_, end in choices.values())
    [engine] = [p for p in psutil.Process(server[0].pid).children() if "dsv3.server.engine.process" in p.cmdline()]

    def kill(count):
        if count == 1:
            engine.kill()

    with concurrent.futures.ThreadPoolExecutor(len(KINDS)) as pool:
        others = [pool.submit(streamed, url, body) for body in KINDS[1:]]
        assert [streamed(url, KINDS[0], kill), *(each.result() for each in others)] == undisturbed
    assert metric(url, "dsv3:engine_restarts_total") == 1
    assert metric(url, "dsv3:continued_total") > 0
    assert metric(url, "dsv3:recompilations_total") == 0


def test_a_restarted_engine_finds_its_pages(url):
    """Pages of the previous engine are in host memory, and after a flush in the directory.

    While no engine ran, the start of another test's engine may have removed what the killed one left in host memory.
    """

    def hits(*tiers):
        return sum(metric(url, "dsv3:kv_tier_hits_total", f'tier="{tier}"') for tier in tiers)

    for tiers in (("host", "store"), ("store",)):
        before = hits(*tiers)
        prompt = {"model": "dsv3-tiny", "prompt": list(range(10, 110)), "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=prompt, timeout=60).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        until = time.monotonic() + 30  # the engine reports its counts from time to time
        while hits(*tiers) < before + 64 and time.monotonic() < until:
            time.sleep(0.05)
        assert hits(*tiers) == before + 64
        httpx.post(f"{url}/flush_cache").raise_for_status()


def test_the_doctor_times_its_start_and_loads_it(server, url, monkeypatch):
    """The printed lines end the phases that the doctor's check `serve` waits for, in order."""
    lines = iter(server[1])
    assert [next(line for line in lines if line.startswith(begins)) for begins in doctor._PHASES.values()]
    monkeypatch.setattr(doctor, "_LOAD_S", 3.0)
    row = doctor._load_row(asyncio.run(doctor._load(url)))
    assert row.passed and row.figures["requests"] and row.figures["ttft_ms p50"]


def test_sigterm_exits_with_status_0(server, url, client):
    """The last test of the shared server."""
    server[0].send_signal(signal.SIGTERM)
    assert server[0].wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_port_in_use_is_an_error_before_the_model_loads():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "cannot listen" in done.stderr and "--port" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere"], "no config.json"),
        (["--model", "deepseek-ai/DeepSeek-V3"], "hf download deepseek-ai/DeepSeek-V3 --local-dir DeepSeek-V3"),
        (["--api_key", "a b"], "printable"),
        (["--api_key", "a", "--api-key-file", "b"], "one of"),
        (["--api_key_file", "/nowhere"], "api_key_file"),
        (["--max_num_seqs", "0"], "max_num_seqs"),
        (["--dtype", "int4"], "dtype"),
        (["--no-such-flag"], "unknown flag"),
    ],
)
def test_invalid_command_lines(arguments, words):
    done = run("--port", "0", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_file_that_others_can_read_is_rejected(tmp_path):
    path = tmp_path / "key"
    path.write_text("secret-key\n")
    path.chmod(0o640)
    done = run("--port", "0", "--api_key_file", str(path))
    assert done.returncode == 2
    assert "--api_key_file: " in done.stderr and "chmod go-rwx" in done.stderr and "secret" not in done.stderr


def test_a_broken_model_exits_with_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    process = subprocess.run(
        [*COMMAND, "--port", "0", "--model", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 1
    assert "config.json: model_type is 'llama', but must be " in process.stderr
    assert "'glm4_moe_lite'" in process.stderr and "'kimi_k25'" in process.stderr
    assert "Traceback" not in process.stderr


def test_an_unreachable_gpu_exits_with_one_line():
    """It exits before it loads or compiles anything, and leaves no process."""
    environment = {**os.environ, **UNREACHED_DRIVER}
    done = subprocess.run(
        [*COMMAND, "--port", "0", *SMALL], cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 1
    assert len(re.findall(f"ERROR dsv3.engine: ValueError: {NO_GPU}", done.stderr)) == 1
    assert "Traceback" not in done.stderr and "kernels:" not in done.stderr
    assert "compiling" not in done.stdout and "ready at" not in done.stdout
    assert not psutil.pid_exists(int(re.search(r"engine process (\d+), exit status 1", done.stderr)[1]))


def test_help():
    done = run("--help")
    assert done.returncode == 0
    for flag in ("model", "served_model_name", "host", "port", "api_key_file", "max_model_len"):
        assert f"  --{flag}=" in done.stdout
    assert "--shutdown_timeout" in done.stdout
    assert "  --shutdown_timeout=FLOAT\n" in run("--help=http").stdout
