"""The GPU benchmark of products on a CPU: no timing of wrong products, XLA's equal product, rows without a device."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import fp8_gemm
from pallas_kernels import checks
from pallas_kernels.backend import Backend
from pallas_kernels.checks import products
from tools.doctor import rates

REFERENCE = Backend.REFERENCE
ROOFS = {"copy B/s": 1e9, "bfloat16 flop/s": 1e9, "FP8 flop/s": 1e9}


@pytest.fixture(autouse=True)
def short_loops(monkeypatch):
    monkeypatch.setattr(rates, "_LOOP_SECONDS", 1e-9)


def compared_cases():
    """Those that are also timed as XLA's product with a slice."""
    return [
        products.head_case(64, 2, 8, 16, transposed=True, quick=True),
        products.router_case(64, 16, 128, quick=True),
    ]


def test_a_right_product_is_timed_beside_the_roof_and_xla():
    (head, _) = compared_cases()
    row = fp8_gemm.compare_case(head, ROOFS, REFERENCE)
    assert row.passed and row.figures["us"] > 0 and row.figures["XLA of a slice us"] > 0
    assert row.figures[rates.SHARE] > 0 and row.figures["out.diff"] < 1e-5
    published = dataclasses.replace(products.dense_case(3, 136, 128, quick=True), key=(64, 2112, 7168))
    figures = fp8_gemm.compare_case(published, ROOFS, REFERENCE).figures
    assert figures["DeepGEMM H800 TFLOP/s"] == 206 and "XLA of a slice us" not in figures


@pytest.mark.parametrize("number", [0, 1])
def test_xla_computes_the_product_it_is_timed_for(number):
    case = compared_cases()[number]
    assert checks.check(dataclasses.replace(case, call=lambda o, i, of: case.sliced(o, i)), REFERENCE).passed


@pytest.mark.parametrize("number", [0, 1])
def test_another_layer_of_the_stack_fails_and_is_not_timed(number):
    case = compared_cases()[number]
    moved = dataclasses.replace(
        case, call=lambda o, i, of: case.call(o, i + 1, of), reference=lambda o, i: case.call(o, i, REFERENCE)
    )
    row = fp8_gemm.compare_case(moved, ROOFS, REFERENCE)
    assert not row.passed and "us" not in row.figures


def test_logits_rounded_to_bfloat16_fail():
    case = products.router_case(3, 16, 128, quick=True)

    def rounded(operands, i, of):
        return case.call(operands, i, of).astype(jnp.bfloat16).astype(jnp.float32)

    wrong = dataclasses.replace(case, call=rounded, reference=lambda o, i: case.call(o, i, REFERENCE))
    assert not checks.check(wrong, REFERENCE).passed


def test_products_with_a_layer_at_their_sizes():
    """Both forms give arrays of one type; stacks outgrow the L2 cache; decode batches are compared with XLA."""
    compared = []
    for table in ("heads", "router and linear"):
        for case in (case for key, case in fp8_gemm.entries().items() if key[0] == table):
            operands = jax.eval_shape(case.operands, jax.random.key(0))
            result = jax.eval_shape(lambda o, case=case: case.call(o, 0, REFERENCE), operands)
            x, w, out = (v.size * v.dtype.itemsize for v in (operands["x"], operands["w"], result))
            assert w >= 256 << 20
            assert case.bytes == x + w / operands["w"].shape[0] + out
            if case.sliced is not None:
                assert jax.eval_shape(case.sliced, operands, 0) == result
                compared.append((table, result.shape))
    heads = [("heads", (m, 128, n)) for m in (64, 128) for n in (512, 128)]
    router = [("router and linear", shape) for shape in ((64, 256), (128, 256), (64, 2112))]
    assert compared == [*heads, *router]


def test_rows_are_listed_without_a_device():
    """The parent leaves the GPU to its children: with an unknown platform any use of a device fails."""
    listed = "from benchmarks.gpu import fp8_gemm as m; assert len(m.entries()) > 130; "
    listed += "from benchmarks.gpu import mla; assert len(mla.entries()) == 70; "
    listed += (
        "import jax; jax.config.update('jax_platforms', 'none')\ntry: jax.devices()\nexcept RuntimeError: print('ok')"
    )
    command = [sys.executable, "-c", "import jax; jax.config.update('jax_platforms', 'none')\n" + listed]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.stdout == "ok\n", ran.stderr
