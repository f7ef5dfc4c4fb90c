"""`python -m launch.serve` as several processes: a real model, experts spread over them, and wrong command lines."""

import base64
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import time

import httpx
import jax
import numpy as np
import pytest

from dsv3.checkpoint.writer import save_hf
from dsv3.config.options import EngineOptions
from dsv3.engine.build import bundled_model
from dsv3.engine.cluster.leader import Leader
from dsv3.engine.errors import ClusterError
from dsv3.engine.fingerprint import fields_of
from tests.dsv3.engine.cluster import local
from tests.dsv3.model.golden import DIRECTORY, model
from tests.launch.preloaded import run
from tests.launch.test_serve import COMMAND, NO_GPU, ROOT, UNREACHED_DRIVER, metric

SMALL = ["--model", str(DIRECTORY / "greedy"), "--max_num_seqs", "1", "--max_model_len", "128"]
SMALL += ["--max_num_batched_tokens", "64", "--enable_expert_parallel"]
SETTINGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}  # two devices per process
MOVING = ["--num_redundant_experts=8", "--enable_eplb", "--eplb_interval=8", "--eplb_threshold=1"]
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}


@pytest.fixture
def start(tmp_path):
    """Starts processes with their own key and cache; kills all at the end."""
    with contextlib.ExitStack() as stack:

        def start(coordinator, process_id, *arguments, environment=None):
            own = ["--cluster_key_file", local.write_key(tmp_path), "--compilation_cache_dir"]
            own += [str(tmp_path / f"xla{process_id}"), "--port", "0", "--coordinator", coordinator]
            process = subprocess.Popen(
                [*COMMAND, *own, *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | SETTINGS | (environment or {}),
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


def flags(process_id):
    return ["--num_processes", "2", "--process_id", str(process_id)]


def ready_log(leader, follower):
    """Returns the leader's log up to its last line before serving; fails with both logs if it does not get there."""
    lines = []
    for line in leader.stdout:
        lines.append(line)
        if line.startswith("curl"):
            return "".join(lines)
    follower.kill()
    logs = f"the leader:\n{''.join(lines)}\nthe follower:\n{follower.communicate()[0]}"
    raise AssertionError(f"the leader has ended with status {leader.wait()}\n{logs}")


def check_weights_change_everywhere(url, body, expected, directory):
    """Other weights give other tokens and find no prefix, the first ones the first tokens, also after a sleep."""

    def answer():
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
        return [choice["token_ids"] for choice in found["choices"]], found["choices"][0]["weight_version"]

    def post(path, status=200, **given):
        reply = httpx.post(f"{url}{path}", timeout=120, **given)
        assert reply.status_code == status, reply.text
        return reply

    params, cfg = model("greedy")
    other = jax.tree.map(lambda leaf: np.asarray(leaf) + np.float32(0.05), params)
    save_hf(directory, cfg, other)
    post("/update_weights_from_disk", json={"model_path": str(directory), "weight_version": "other"})
    tokens, version = answer()
    assert version == "other" and tokens != expected
    assert "wrong shapes" in post("/update_weights_from_disk", 400, json={"model_path": str(bundled_model())}).text
    post("/update_weights_from_disk", json={"model_path": str(DIRECTORY / "greedy")})
    assert answer() == (expected, "2")
    post("/sleep", params={"level": 1})
    post("/wake_up")
    assert answer() == (expected, "2")


def check_experts_of_all_processes_are_returned(url, prompt):
    """Each rank chooses the same ones for a prompt and its answer, whichever process has them."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_routed_experts": True}
    found = set()
    for rank in range(8):
        answer = httpx.post(
            f"{url}/v1/completions", json=body, headers={"x-data-parallel-rank": str(rank)}, timeout=120
        )
        found.add(answer.json()["choices"][0]["routed_experts"])
    [text] = found
    ids, cfg = np.load(io.BytesIO(base64.b64decode(text))), model("greedy")[1]
    assert ids.shape == (len(prompt) + 7, cfg.num_moe_layers, cfg.num_experts_per_tok) and len(np.unique(ids)) > 4


def test_two_nodes_of_two_processes_give_transformers_tokens(start, tmp_path):
    """Two devices each, with experts that move between all eight while serving; then their weights change, twice.

    Tokens are sent first to the other node, then to its other devices, half of which another process has. The processes
    compare what they sample. All find their places in Slurm's environment. Pages go to the hosts' memory, of which each
    process has its own. SIGTERM ends all with status 0.
    """
    golden = json.loads((DIRECTORY / "greedy" / "greedy.json").read_text())
    arguments = [*SMALL, *MOVING, "--expert_transport=hierarchical", "--kv_offloading_size=1e-3", "--nocluster_spare"]
    arguments.append("--enable_return_routed_experts")
    coordinator = f"localhost:{local.free_port()}"
    step = SLURM | {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    followers = [start(coordinator, i, *arguments, environment=step | {"SLURM_PROCID": str(i)}) for i in (1, 2, 3)]
    leader = start(coordinator, 0, *arguments, "--enable_weight_updates", environment=step | {"SLURM_PROCID": "0"})
    log = ready_log(leader, followers[0])
    assert "8 devices on 2 nodes, 2 of them in this process" in log and "4 processes are ready after" in log
    url = re.search(r"ready at (http://\S+)", log)[1]
    prompts, count = golden["prompts"][:8], 16
    body = {"prompt": prompts, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    expected = [tokens[:count] for tokens in golden["greedy"][:8]]
    moved = []
    while len(moved) < 50 and not any(moved[:-1]):  # once more after the first move
        answer = httpx.post(f"{url}/v1/completions", json={"model": "greedy"} | body, timeout=120).json()
        assert [c["token_ids"] for c in answer["choices"]] == expected
        moved.append(metric(url, "dsv3:experts_moved_total"))
    assert any(moved)
    sampled = {"prompt": prompts[0], "max_tokens": 4, "logprobs": 2, "seed": 3, "logit_bias": {"5": 1}}
    assert httpx.post(f"{url}/v1/completions", json={"model": "greedy"} | sampled, timeout=120).status_code == 200
    check_experts_of_all_processes_are_returned(url, prompts[0])
    pages = [[i + 1, *range(3, 70)] for i in range(8)]  # one of a rank each
    httpx.post(f"{url}/v1/completions", json=body | {"prompt": pages, "max_tokens": 1}, timeout=120).raise_for_status()
    until = time.monotonic() + 300
    while not metric(url, "dsv3:kv_tier_stored_bytes_total"):
        assert time.monotonic() < until
    check_weights_change_everywhere(url, body, expected, tmp_path / "other")
    assert metric(url, "dsv3:recompilations_total") == 0
    leader.send_signal(signal.SIGTERM)
    logs = [process.communicate(timeout=60)[0] for process in followers]
    assert leader.wait(60) == 0 and all(process.returncode == 0 for process in followers)
    assert all("the leader has ended the instance in order" in text for text in logs)
    memories = [re.search(r"host memory in (\S+):", text)[1] for text in (log, *logs)]
    assert len(set(memories)) == 4


def test_a_leader_without_followers_names_the_missing_ones(start):
    process = start(f"localhost:{local.free_port()}", 0, *SMALL, *flags(0), "--cluster_start_timeout", "1")
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "process 1 of 2 did not connect within 1 s" in text
    assert "Traceback" not in text


def test_a_follower_with_different_settings_names_them(start, tmp_path):
    """The leader is in this process."""
    cluster = local.options(tmp_path, 2)
    options = EngineOptions(max_num_seqs=1, max_model_len=128, max_num_batched_tokens=64, enable_expert_parallel=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", SETTINGS["XLA_FLAGS"])
        fields = fields_of(DIRECTORY / "greedy", options, cluster)
    leader = Leader(cluster, fields, lambda reason: leader.end(reason), print)
    follower = start(cluster.coordinator, 1, *SMALL, *flags(1), "--fp8=dequantize")
    words = "--fp8 ('keep' there, 'dequantize' in process 1)"
    with pytest.raises(ClusterError, match="process 1 is not configured as process 0") as refused:
        leader.wait_for_followers()
    text = follower.communicate(timeout=120)[0]
    assert follower.returncode == 1
    assert str(refused.value).endswith(f": {words}")
    assert words in text and "Traceback" not in text


def test_a_driver_failure_of_one_process_ends_both_with_its_reason(start):
    coordinator = f"localhost:{local.free_port()}"
    follower = start(coordinator, 1, *SMALL, *flags(1), environment=UNREACHED_DRIVER)
    leader = start(coordinator, 0, *SMALL, *flags(0))
    texts = [process.communicate(timeout=120)[0] for process in (leader, follower)]
    assert leader.returncode == follower.returncode == 1
    assert re.search(f"ERROR dsv3.cluster: process 1: ValueError: {NO_GPU}", texts[0])
    assert re.search(f"ERROR dsv3.cluster: ValueError: {NO_GPU}", texts[1])
    assert not any("Traceback" in text or "compiling" in text for text in texts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num_processes", "2"], "--coordinator"),
        (["--coordinator", "a:1", "--process_id", "0"], "--num_processes"),
        (["--coordinator", "a:1", "--num_processes", "2", "--process_id", "0"], "urandom"),
        (["--coordinator", "a", "--num_processes", "2", "--process_id", "0"], "HOST:PORT"),
        (["--coordinator", "a:1", "--num_processes", "2", "--process_id", "2"], "process_id: 2"),
        (["--processes_per_node", "2"], "--coordinator, --num_processes and --process_id"),
        (["--coordinator=a:1", "--num_processes=3", "--process_id=0", "--processes_per_node=2"], "does not divide"),
        (["--coordinator=a:1", "--num_processes=2", "--process_id=0", "--processes_per_node=0"], "at least 1"),
    ],
)
def test_invalid_command_lines(arguments, words, tmp_path):
    key = [] if words == "urandom" else ["--cluster_key_file", local.write_key(tmp_path)]
    done = run(*arguments, *key)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_one_process_needs_neither_key_nor_coordinator():
    done = run("--num_processes", "1", "--process_id", "0", "--model", "/nowhere")
    assert "no config.json" in done.stderr
