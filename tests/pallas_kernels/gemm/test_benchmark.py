"""The GPU benchmark on a CPU: cases are right, a wrong product is caught and not timed, tables are written."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import fp8_cases, fp8_gemm
from pallas_kernels.backend import Backend
from pallas_kernels.gemm.plan import TilePlan

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
        fp8_cases.decode_case(2, 6, 64, 128, jnp.float8_e4m3fn, REFERENCE),
        fp8_cases.decode_case(2, 6, 64, 256, jnp.int32, REFERENCE),
        fp8_cases.quantize_case(4, 128, True, REFERENCE),
        fp8_cases.head_case(3, 2, 8, 16, False, REFERENCE),
        *compared_cases(),
    ]


def compared_cases():
    """Those that are also timed as XLA's product with a slice."""
    return [fp8_cases.head_case(64, 2, 8, 16, True, REFERENCE), fp8_cases.router_case(64, 16, 128, REFERENCE)]


def test_cases_pass_and_tables_are_written(run, tmp_path):
    run.check_and_measure(small_cases())
    run.write()
    assert not run.failures and not run.left_out and len(run.rows) == 8
    assert len(json.loads((tmp_path / "fp8_gemm.json").read_text())["rows"]) == 8
    text = (tmp_path / "fp8_gemm.md").read_text()
    assert "| 3 x 136 x 128 |" in text and "## decode" in text
    compared = [line.split(" | ")[0] for line in text[text.index("XLA slices it") :].splitlines() if ": " in line]
    assert compared == ["| heads: k_up, 2 heads, 64 x 16 x 8", "| router: 64 x 16 x 128"]


def test_a_wrong_product_fails_and_is_not_timed(run):
    case = fp8_cases.dense_case(3, 136, 128, REFERENCE)

    def wrong(operands, i):
        out, expected = case.valid_rows(operands, i)
        return out.at[1, 7].add(30), expected

    run.check_and_measure([dataclasses.replace(case, valid_rows=wrong)])
    assert len(run.failures) == 1 and not run.rows


@pytest.mark.parametrize("number", [0, 1])
def test_xla_computes_the_product_it_is_timed_for(run, number):
    case = compared_cases()[number]

    def sliced(operands, i):
        return case.sliced(operands, i).astype(jnp.float32), case.valid_rows(operands, i)[1]

    operands = case.operands(jax.random.key(0))
    assert fp8_gemm.difference(dataclasses.replace(case, valid_rows=sliced), operands) < case.tolerance


@pytest.mark.parametrize("number", [0, 1])
def test_another_layer_of_the_stack_fails(run, number):
    case = compared_cases()[number]

    def next_layer(operands, i):
        return case.call(operands, i + 1).astype(jnp.float32), case.valid_rows(operands, i)[1]

    run.check_and_measure([dataclasses.replace(case, valid_rows=next_layer)])
    assert len(run.failures) == 1 and not run.rows


def test_logits_rounded_to_bfloat16_fail(run):
    case = fp8_cases.router_case(3, 16, 128, REFERENCE)

    def rounded(operands, i):
        return case.call(operands, i).astype(jnp.bfloat16).astype(jnp.float32), case.valid_rows(operands, i)[1]

    run.check_and_measure([dataclasses.replace(case, valid_rows=rounded)])
    assert len(run.failures) == 1 and not run.rows


def test_products_with_a_layer_at_their_sizes():
    """Both forms give arrays of one type; stacks outgrow the L2 cache; decode batches are compared with XLA."""
    compared = []
    for case in fp8_cases.layer_cases(REFERENCE):
        operands = jax.eval_shape(case.operands, jax.random.key(0))
        result = jax.eval_shape(case.call, operands, 0)
        x, w, out = (v.size * v.dtype.itemsize for v in (operands["x"], operands["w"], result))
        assert w >= 256 << 20
        assert case.bytes == x + w / operands["w"].shape[0] + out
        if case.sliced is not None:
            assert jax.eval_shape(case.sliced, operands, 0) == result
            compared.append((case.table, result.shape))
    heads = [("heads", (m, 128, n)) for m in (64, 128) for n in (512, 128)]
    assert compared == [*heads, *(("router", (m, 256)) for m in (64, 128))]


def test_without_time_cases_are_named_as_left_out(run):
    run.deadline = time.monotonic()
    run.check_and_measure(small_cases()[:2])
    assert len(run.left_out) == 2 and not run.rows


def test_the_fastest_plan_stands_beside_the_chosen_one():
    slow, fast = TilePlan(False, 64, 128), TilePlan(False, 64, 128, splits=4)
    row = fp8_gemm.plan_row("dense 64 x 4096 x 7168", slow, {slow: 3e-5, fast: 2e-5})
    assert fp8_gemm.plan_line(row) == "| dense 64 x 4096 x 7168 | narrow 64 x 128, K in 4 | 20.0 | 30.0 |"
    assert fp8_gemm.plan_line(fp8_gemm.plan_row("dense", slow, {fast: 2e-5})).endswith("| wrong |")


def test_plans_are_measured_while_there_is_time(run, monkeypatch):
    chosen, other = TilePlan(False, 8, 128), TilePlan(False, 8, 128, splits=2)
    case = fp8_cases.dense_case(3, 136, 128, REFERENCE)
    products = [("small", chosen, lambda plan: case, [chosen, other])] * 2
    monkeypatch.setattr(fp8_gemm, "planned_products", lambda: products)
    run.compare_plans()
    assert [len(row["all"]) for row in run.plans] == [2, 2]
    run.deadline = time.monotonic()
    run.compare_plans()
    assert len(run.plans) == 2 and run.left_out == ["plans from small on"]


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fp8_gemm"])
    assert fp8_gemm.main() == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
