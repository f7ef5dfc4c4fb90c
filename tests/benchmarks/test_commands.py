"""Runs every command of `benchmarks/` at toy size: a figure in the docs is worth what its command still does.

A command must report a table with a row. Its figures are not looked at, and neither is an exit status that says that a
goal was missed.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import checkpoint, engines, instances
from benchmarks.record import Report
from configs.tiny import TRAINING
from dsv3 import LLM
from dsv3.config.model import ModelConfig
from dsv3.config.server_options import ServerOptions
from dsv3.engine import tuning
from dsv3.engine.engine import Engine
from dsv3.model.params import Params, abstract
from tests.dsv3.server import serving as fake
from tests.dsv3.text import dialects
from training import corpus

ROOT = Path(__file__).parents[2]
COMPILED_TEXT = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[8,4]{1,0} custom-call(%a), custom_call_target="mosaic_gpu_v2", metadata={op_name="f/router/g/mpmd_map"}
  ROOT %c.1 = f32[8,4]{1,0} fusion(%b), kind=kLoop, calls=%d, metadata={op_name="f/attention/add"}
}
"""
SMALL = dataclasses.replace(
    TRAINING, batch_size=2, sequence_length=64,
    model=dataclasses.replace(
        TRAINING.model, num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0,
        n_routed_experts=4, n_group=1, topk_group=1,
    ),
)  # fmt: skip
SMALL_LLM = functools.partial(LLM, max_num_seqs=1, max_model_len=64, max_num_batched_tokens=64)
GREEDY = {"greedy": {"temperature": 0.0}}
ONE_ROW = {"max_num_seqs": 1, "max_model_len": 256, "max_num_batched_tokens": 64}


def zeros(cfg: ModelConfig, key: jax.Array, dtype: Any) -> Params:
    """Returns parameters that need no compiled generators."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract(cfg, dtype))


def write_tuning(model: Path, options: object, path: Path, budget_seconds: float) -> tuning.Tuning:
    found = tuning.Tuning(tuning.made_for(model), {"prefill_batch_sizes": "32"}, {}, [])
    tuning.write_tuning(path, found)
    return found


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[instances.Instance]:
    """Starts a server as `benchmarks.instances.serving` does, whose engine computes nothing."""
    given: dict[str, Any] = dict(flag.removeprefix("--").split("=") for flag in flags)
    given = {name: json.loads(value) if value[0].isdecimal() else value for name, value in given.items()}
    if "register" in given:
        given["register"] = [given["register"]]
    settings: dict[str, Any] = {"options": {}, "engine": {}, "factory_options": {"step_s": 0.01}}
    for name, value in given.items():
        settings["options" if name in ServerOptions.__dataclass_fields__ else "engine"][name] = value
    with (
        tempfile.TemporaryDirectory() as folder,
        fake.running(dialects.write(Path(folder)), **settings) as server,
    ):
        instance = instances.Instance(server.url)
        instance.process = server.process
        yield instance


def checkpoint_case(case: str, directory: Path) -> dict[str, float]:
    """Measures in this process what would import jax in another; one case has the process that the command gives it."""
    return in_fresh_process(case, directory) if "raw" in case else checkpoint.run_case(case, directory)


in_fresh_process = checkpoint.in_fresh_process
COMMANDS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "checkpoint",
        "--size_gb=0.02 --rounds=1 --directory={tmp}",
        {
            "CASES": dict.fromkeys(("raw bf16", "hf bf16", "update bf16"), "bf16"),
            "in_fresh_process": checkpoint_case,
            "SIZES": checkpoint.SIZES | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256},
        },
    ),
    (
        "cpu_peers",
        "--dtypes float32 --requests 1 --tokens 4 --long 8 --rounds 1 --repeats 1",
        {"LIMITS": ("--max_num_seqs=1", "--max_num_batched_tokens=64")},
    ),
    ("cpu_step", "--rows 1 --dtypes float32 --rounds 1 --seconds 0.01", {}),
    ("engine_host", "--running 2 --steps 2", {"MAX_NUM_BATCHED_TOKENS": 64}),
    ("engine_host", "--drafts 1 --running 4 --steps 2 --rounds 1", {}),
    ("first_start", "--wake", {"LLM": SMALL_LLM, "ROUNDS": 1, "_RESTART": "pass"}),
    ("front", "--streams=8 --rate=9 --seconds=0.3 --traces=1", {}),
    ("attacks", "--seconds 0.3 --only none", {}),
    ("kv_tiers", "--rounds 1 --values 4 --directory {tmp}", {"VALUE_BYTES": 2**16}),
    ("launches", "--save {tmp}/step.hlo", {"compiled_step": lambda: COMPILED_TEXT}),
    ("needle", "--ratio 128 --tokens 300 --chunk 64", {}),
    ("parity", "--only deepseek_v4_plain greedy", {}),
    ("precision", "--tokens 16", {"MODULES": ("bisect",), "SETTINGS": (("float32", "float32"),)}),
    ("routers", "--requests 2 --clients 0", {}),
    (
        "speculative",
        "--drafts 1 --rounds 1 --tokens 4",
        {"SIZES": (1,), "LIMITS": ONE_ROW, "SAMPLING": GREEDY, "PROMPT": 32},
    ),
    (
        "speculative",
        "--synthetic 0.8 --drafts 1 --rounds 1 --tokens 4",
        {"SIZES": (1,), "LIMITS": ONE_ROW, "SAMPLING": GREEDY, "PROMPT": 32, "initialize": zeros},
    ),
    (
        "structured",
        "--rounds 1 --tokens 4",
        {"REQUESTS": 2, "PROMPT": 8, "LIMITS": {"max_num_batched_tokens": 64}},
    ),
    ("survival", "--kills 1 --engines 2", {"CLIENTS": 2, "TOKENS": 64, "serving": serving}),
    (
        "tuning",
        "--rounds 1",
        {"tune": write_tuning, "LIMITS": ONE_ROW, "SIZES": (1,), "PROMPTS": (20,), "ANSWER": 4},
    ),
    ("training", "", {"REPEATS": 1, "TRAINING": SMALL}),
]
ELSEWHERE = {
    "bundled_answers": "answers 20 questions; tests/training holds the model to its loss",
    "clients": "needs packages of others",
    "plan_deepseek_v4": "tests/benchmarks/test_plan_deepseek_v4.py",
    "plan_long_contexts": "tests/benchmarks/test_plan_long_contexts.py",
    "plan_published": "tests/benchmarks/test_plan_published.py",
    "plan_transports": "tests/benchmarks/test_plan_transports.py",
    "pages": "tests/benchmarks/test_pages.py",
    "soak": "tests/dsv3/server/test_soak_benchmark.py",
    "to_gguf": "needs gguf",
    "toolchains": "tests/benchmarks/test_toolchains.py",
}


def _run(name: str, arguments: str, tmp: Path) -> list[str]:
    return [name, *arguments.format(tmp=tmp).split()]


@pytest.mark.parametrize(("name", "arguments", "sizes"), COMMANDS, ids=[f"{c[0]} {c[1]}".strip() for c in COMMANDS])
def test_the_command_runs(
    name: str, arguments: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    for size, value in sizes.items():
        monkeypatch.setattr(f"{module.__name__}.{size}", value)
    monkeypatch.setattr(sys, "argv", _run(name, arguments, tmp_path))
    if name != "first_start":  # that measures a start; elsewhere programs are compiled where one is launched
        monkeypatch.setattr(Engine, "warm_up", lambda engine: None)
    monkeypatch.setattr(corpus, "standard_library", lambda: Path(asyncio.__file__).parent)  # all of it takes 9 s
    monkeypatch.setattr(instances, "LIMITS", [*instances.LIMITS, "--max_num_seqs=1", "--max_num_batched_tokens=64"])
    monkeypatch.chdir(ROOT)
    report = Report()
    assert module.main(report) in (None, 0, 1)
    assert report.tables and all(table.rows for table in report.tables)


def test_a_program_that_a_step_compiles_ends_a_benchmark() -> None:
    """Above no engine is warm, so none counts what it compiles."""
    counted = SimpleNamespace(recompilations=1)
    engine: Any = SimpleNamespace(has_work=False, stats=lambda: counted)
    with pytest.raises(RuntimeError, match="has compiled 1 programs"):
        engines.answer(engine, [])
    counted.recompilations = 0
    assert engines.answer(engine, []).tokens == []


def test_every_command_is_run() -> None:
    """GPU benchmarks have tests of their own, beside the kernels. Each has `--help`, or that would start it."""
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*/__main__.py")]
    sources = {f.stem if f.stem != "__main__" else f.parent.name: f.read_text() for f in files}
    commands = {name: source for name, source in sources.items() if "__name__ ==" in source}
    assert set(commands) == {name for name, _, _ in COMMANDS} | set(ELSEWHERE)
    readers = ("arguments(", "parser_of(__doc__", "ArgumentParser(description=__doc__")
    assert not [name for name, source in commands.items() if not any(reader in source for reader in readers)]
