"""Runs every command of `benchmarks/` at toy size: a figure in the docs is worth what its command still does.

What a command prints is not looked at, and neither is an exit status that says that a goal was missed.
"""

import dataclasses
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training_fp8 import RUNS
from configs.tiny import TRAINING
from dsv3 import LLM

ROOT = Path(__file__).parents[2]
COMMANDS: list[tuple[str, str, dict[str, Any]]] = [
    ("admission", "--waiting 16 --rounds 1", {"PAGES": 4, "STEPS": 2}),
    ("balance", "prefill --ranks 2 --steps 40", {}),
    ("balance", "decode --ranks 2 --steps 4", {"RUNNING": 8}),
    ("bodies", "--only [1,1", {}),
    ("buckets", "", {}),
    ("cache_dtypes", "--tokens 16", {"MODULES": ("bisect",), "SETTINGS": (("float32", "float32"),)}),
    ("chat_prompts", "--seconds 0.05", {}),
    ("cluster_link", "--followers 2 --steps 2 --rounds 1 --players 1", {}),
    ("cluster_link", "--faults", {"_FAULT_S": 0.5}),
    ("cluster_send", "--ranks 4 --rows 4 --followers 1 --steps 2", {}),
    ("cpu_dtypes", "--models bundled --rows 1 --prompt 64 --rounds 1 --seconds 0.01", {}),
    ("cpu_peers", "--dtypes float32 --requests 1 --tokens 4 --long 8 --rounds 1 --repeats 1", {}),
    (
        "cpu_products",
        "--rows 1 --dtypes float32 --rounds 1 --seconds 0.001",
        {"DENSE": {"linear": (256, 128)}, "EXPERT": (128, 128)},
    ),
    ("cpu_step", "--rows 1 --dtypes float32 --rounds 1 --seconds 0.01", {}),
    ("draft_bound", "", {}),
    ("engine_host", "--running 8 --steps 5", {}),
    ("eplb", "", {"ROUNDS": 1, "STEPS": 1, "LAYERS": 2}),
    ("eplb_live", "", {"INTERVAL": 16, "WINDOW_STEPS": 16}),
    ("expert_parallel", "--tokens 16", {}),
    ("first_start", "", {"LLM": functools.partial(LLM, max_num_seqs=1, max_model_len=64, max_num_batched_tokens=64)}),
    ("gpu.rotation", "", {}),
    ("hostile", "--seconds 0.3 --only none", {}),
    ("http_servers", "--servers own --only hung", {}),
    ("int4_error", "--rows 4 --rounds 1", {"HIDDEN": 256, "INNER": 256}),
    ("kv_tiers", "rates --rounds 1 --values 4 --directory {tmp}", {"VALUE_BYTES": 2**16}),
    ("load_client", "", {"STREAMS": 4, "EVENTS": 4, "ROUNDS": 1}),
    ("overlap_orders", "", {}),
    ("pipeline", "", {"MICRO_BATCHES": 8, "ALGORITHMS": ("1F1B",)}),
    ("pipeline_overlap", "", {}),
    ("prompt_logprobs", "--rounds 1 --prompts 1 --length 8", {}),
    ("room", "--layers 1", {"UNEVEN": (1.0,)}),
    ("router", "--requests 4 --clients 2", {}),
    ("sampler", "--rounds 1", {"SHAPES": ((4, 256, 1),)}),
    ("sampler_programs", "--rounds 1", {"_VOCAB_SIZE": 256, "ROWS": (1,)}),
    ("small_passes", "--rounds 1", {"CALLS_S": 0.001}),
    ("sparse_plan", "", {}),
    ("speculative", "--drafts 1 --rounds 1 --tokens 4", {"SIZES": (1,)}),
    ("structured", "--rounds 1 --tokens 4 --only speed", {"REQUESTS": 2}),
    ("suspects", "--schedules 2", {}),
    ("survival", "--kills 1", {"CLIENTS": 2, "TOKENS": 64}),
    ("training_checkpoints", "", {"REPEATS": 1, "TRAINING": dataclasses.replace(TRAINING, batch_size=2)}),
    ("training_fp8", "--steps 1 --rows 2 --directory {tmp}", {"RUNS": {"bfloat16": RUNS["FP8"]}, "PAIRS": ()}),
    ("training_step", "--steps 1", {}),
    ("wire", "", {"_NUM_HEADS": 10, "_NUM_TURNS": 1}),
]
IN_A_PROCESS = {  # absl's flags are one set per process, and what these change stays with theirs
    "checkpoint": "--size_gb=0.02 --rounds=1 --only=hf --directory={tmp}",
    "checkpoint_host": "--rounds=1",
    "combine_error": "",
    "disaggregation": "--prefill 1 --decode 1 --requests 2 --clients 0",
    "front": "--streams=8 --rate=5 --seconds=1",
    "front_send": "--rows=64 --steps=2",
    "jax_transfer": "--pages 2 --rounds 1 --patience 3",
}
ELSEWHERE = {
    "bodies_server": "a part of bodies",
    "bodies_small": "a part of bodies",
    "bundled_answers": "reads 84,680 tokens; tests/training holds the model to its loss",
    "clients": "needs nine packages of others",
    "cpu_greedy": "needs a llama-server",
    "encode_memory": "is its own arguments: a kind and a size",
    "front_client": "a part of front",
    "front_server": "a part of front",
    "honest": "compares two checkouts",
    "nixl_transfer": "needs NIXL",
    "other_routers": "needs a router of others",
    "soak": "tests/dsv3/server/test_soak_benchmark.py",
    "step_bytes": "compiles a published unit, for minutes",
    "to_gguf": "needs gguf",
}


def _run(name: str, arguments: str, tmp: Path) -> list[str]:
    return [name, *arguments.format(tmp=tmp).split()]


@pytest.mark.parametrize(("name", "arguments", "sizes"), COMMANDS, ids=[f"{c[0]} {c[1]}".strip() for c in COMMANDS])
def test_the_command_runs(
    name: str, arguments: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    for size, value in sizes.items():
        monkeypatch.setattr(module, size, value)
    monkeypatch.setattr(sys, "argv", _run(name, arguments, tmp_path))
    monkeypatch.chdir(ROOT)
    assert module.main() in (None, 0, 1)


@pytest.mark.parametrize(("name", "arguments"), IN_A_PROCESS.items())
def test_the_command_runs_in_a_process_of_its_own(name: str, arguments: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", *_run(f"benchmarks.{name}", arguments, tmp_path)]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ended.returncode in (0, 1) and "Traceback" not in ended.stderr, ended.stderr[-2000:]


def test_every_command_is_run() -> None:
    """GPU benchmarks have tests of their own, beside the kernels."""
    files = [*(ROOT / "benchmarks").glob("*.py"), ROOT / "benchmarks" / "clients" / "__main__.py"]
    commands = {f.stem if f.stem != "__main__" else f.parent.name for f in files if "__name__ ==" in f.read_text()}
    assert commands == ({name for name, _, _ in COMMANDS} - {"gpu.rotation"}) | set(IN_A_PROCESS) | set(ELSEWHERE)
