"""The GPU benchmark's tables at tiny sizes on jax.numpy: a run on a GPU is too dear to find a typing error."""

import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import device_time, mla, mla_cases
from benchmarks.gpu.mla_cases import Decode, Prefill, Write
from pallas_kernels.backend import Backend

VARIABLE = Decode(2, 2, 70, variable=True, batch=2)


def drawn(key, shape):
    """Returns what `mla_cases.random` does, by numpy: jax would compile a generator for each shape."""
    seed = np.asarray(jax.random.key_data(key))
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) / 10
    return jax.device_put(np.clip(values, -1, 1).astype(jnp.bfloat16))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(mla_cases, "random", drawn)
    monkeypatch.setattr(device_time, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(device_time, "RUNS", 2)
    monkeypatch.setattr(mla_cases, "SPLITS", mla_cases.SPLITS[:2])
    return mla.Run(jax.devices()[0], math.inf, tmp_path, Backend.REFERENCE)


def test_tables(run, tmp_path):
    run.roofs(1024, 64)
    run.decode_table([VARIABLE])
    run.prefill_table([Prefill(96, 1, heads=2)])
    run.context_table([Prefill(8, 2, 70, heads=2)])
    run.write_table([Write(5, pages=2)])
    run.tune_decode([VARIABLE])
    run.write()
    assert run.failures == []
    record = json.loads((tmp_path / "mla.json").read_text())
    assert [len(rows) for rows in record["tables"].values()] == [1, 1, 1, 1, 1]
    (best,) = record["best"].values()
    assert len(best["all"]) == len(mla_cases.SPLITS)
    assert best["us"] == min(best["all"].values()) * 1e3
    (context,) = record["tables"]["new tokens to cached ones, absorbed, 2 heads"]
    assert int(context["expanded us"]) >= 0 and context["groups of heads"] == "1"
    text = (tmp_path / "mla.md").read_text()
    assert "| 2 | 2 | 70 | variable |" in text
    assert all(line.count("|") > 2 for line in text.splitlines() if line.startswith("|"))


def test_edge_cases_hold_nan_and_are_right(run):
    run.edge_cases([case for case in mla_cases.edge_cases(300) if case.heads == 20 or (case.fp8 and case.queries == 2)])
    assert run.failures == []


def test_a_wrong_answer_is_not_timed_but_reported(run, tmp_path, monkeypatch):
    wrong = {"cosine": 0.0, "out": 1.1, "lse": 0.0, "infinities": 0.0}
    monkeypatch.setattr(run, "decodes", lambda name, *_: run.passed(name, wrong, mla.limits(mla.DECODE_COSINE)))
    run.decode_table([VARIABLE])
    run.write()
    assert run.tables == {}
    assert "Wrong: decode 2 | 2 | 70" in (tmp_path / "mla.md").read_text()


def test_rows_without_time_are_named(run):
    run.deadline = time.monotonic()
    run.decode_table([VARIABLE])
    assert run.left_out == [str(VARIABLE)]


def test_every_kernel_the_run_needs_is_compiled():
    names = [name for name, _, _ in mla.programs()]
    for wanted in (
        "decode 128 | 2",
        "decode 16 | 1",
        "FP8 cache",
        "2 waves",
        "prefill",
        "context",
        "expanded",
        "write, one kernel",
    ):
        assert any(wanted in name for name in names)
