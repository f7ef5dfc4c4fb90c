"""The GPU benchmark on a CPU: cases are right, a wrong product is caught and not timed, tables are written."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import fp8_cases, fp8_gemm
from pallas_kernels.backend import Backend
from pallas_kernels.gemm.plan import Plan

REFERENCE = Backend.REFERENCE


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(fp8_cases, "_STACK_BYTES", 1)
    monkeypatch.setattr(fp8_gemm, "_LOOP_SECONDS", 1e-9)
    run = fp8_gemm.Run(jax.devices()[0], deadline=time.monotonic() + 100, out=tmp_path)
    run.copy_rate, run.bf16_rate, run.fp8_rate = 1e9, 1e9, 1e9
    return run


def small_cases():
    return [
        fp8_cases.dense_case(3, 136, 128, REFERENCE),
        fp8_cases.contiguous_case(2, 128, 64, 128, jnp.bfloat16, REFERENCE),
        fp8_cases.masked_case(2, 6, 64, 128, jnp.float8_e4m3fn, REFERENCE),
        fp8_cases.quantise_case(4, 128, True, REFERENCE),
    ]


def test_cases_pass_and_tables_are_written(run, tmp_path):
    run.check_and_measure(small_cases())
    run.write()
    assert not run.failures and not run.left_out and len(run.rows) == 4
    assert len(json.loads((tmp_path / "fp8_gemm.json").read_text())["rows"]) == 4
    text = (tmp_path / "fp8_gemm.md").read_text()
    assert "| 3 x 136 x 128 |" in text and "## masked" in text


def test_a_wrong_product_fails_and_is_not_timed(run):
    case = fp8_cases.dense_case(3, 136, 128, REFERENCE)

    def wrong(operands, i):
        out, expected = case.valid_rows(operands, i)
        return out.at[1, 7].add(30), expected

    run.check_and_measure([dataclasses.replace(case, valid_rows=wrong)])
    assert len(run.failures) == 1 and not run.rows


def test_without_time_cases_are_named_as_left_out(run):
    run.deadline = time.monotonic()
    run.check_and_measure(small_cases()[:2])
    assert len(run.left_out) == 2 and not run.rows


def test_tuned_plans_are_written_as_a_module():
    key, fields = ("dense", 64, 4096, 7168, 1), (False, 64, 128, 4, 1, None)
    module: dict = {}
    exec(fp8_gemm.tuned_module("device, date", {key: fields}), module)
    assert Plan(*module["TUNED"][key]).splits == 4


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fp8_gemm"])
    assert fp8_gemm.main() == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
