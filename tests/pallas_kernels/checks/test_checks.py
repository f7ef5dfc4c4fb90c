"""The checks detect a wrong kernel, a read of NaN, a race, an error, a lost device."""

import contextlib
import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot, bodies, checks, gpus, native
from pallas_kernels.backend import Backend
from pallas_kernels.checks import __main__ as command
from pallas_kernels.checks import attention, case, operations, products
from pallas_kernels.triton import call

pytestmark = pytest.mark.skipif(not native.library().targets, reason=native.library().reason)

REFERENCE = Backend.REFERENCE
HOPPER = ("multicast", "combine_splits")
DENSE = products.dense_case(3, 136, 256, quick=True)
DECODE = attention.Decode(2, 1, 70, batch=2, layers=2).case()


def changed(of: checks.Case, change) -> checks.Case:
    """Returns the case with `change(result, operands, i)` applied to the backend under test only."""

    def call(operands, i, backend):
        result = of.call(operands, i, backend)
        return result if backend is REFERENCE else change(result, operands, i)

    return dataclasses.replace(of, call=call)


def test_one_wrong_value_is_caught() -> None:
    wrong = changed(DENSE, lambda out, operands, i: out.at[1, 7].add(3))
    row = checks.check(wrong, Backend.NATIVE)
    assert not row.passed and "out is off by" in row.says and row.figures["out.diff"] < 1e-3


def test_another_weight_of_the_stack_is_caught() -> None:
    """It is NaN, like everything that must not be read."""
    row = checks.check(changed(DENSE, lambda out, operands, i: DENSE.call(operands, i + 1, REFERENCE)), Backend.NATIVE)
    assert not row.passed and "not finite" in row.says


def test_a_read_of_unwritten_rows_is_caught() -> None:
    def reads_a_tail(result, operands, i):
        q, pages, table, _ = operands
        return DECODE.call((q, pages, table, jnp.full(2, 71)), i, REFERENCE)

    row = checks.check(changed(DECODE, reads_a_tail), Backend.NATIVE)
    assert not row.passed and "not finite" in row.says


def test_a_result_that_changes_is_caught() -> None:
    runs = iter(range(2))

    def noise(x):
        return np.float32(2.0**-10 * next(runs))

    def races(out, operands, i):
        return out + jax.pure_callback(noise, jax.ShapeDtypeStruct((), jnp.float32), out[0, 0]).astype(out.dtype)

    row = checks.check(changed(DENSE, races), Backend.NATIVE)
    assert not row.passed and "two runs differ in" in row.says


def fails(result, operands, i):
    raise ValueError("no such\nkernel")


def test_an_error_costs_one_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    cases = [changed(DENSE, fails), DENSE]
    monkeypatch.setitem(operations.OPERATIONS, "fp8_gemm", operations.CheckedOperation(frozenset(), lambda *_: cases))
    assert command.main(["fp8_gemm", "--quick", "--backend", "native"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["passed"] for row in rows] == [False, True]
    assert rows[0]["says"] == "raised ValueError: no such kernel"
    assert set(rows[0]) == {"case", "passed", "says", "figures"}


def test_a_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def lost(*_):
        raise RuntimeError("illegal address")

    cases = [changed(DENSE, fails), DENSE]
    monkeypatch.setitem(operations.OPERATIONS, "fp8_gemm", operations.CheckedOperation(frozenset(), lambda *_: cases))
    monkeypatch.setattr(case.jnp, "zeros", lost)
    assert command.main(["fp8_gemm", "--quick", "--backend", "native"]) == 1
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert not row["passed"] and "context is gone" in row["says"] and "illegal address" in row["says"]


def test_a_backend_that_cannot_run_here_is_rejected(capsys: pytest.CaptureFixture) -> None:
    assert command.main(["mla_decode", "--quick", "--backend", "mosaic"]) == 2
    assert "cannot run on" in capsys.readouterr().err
    assert command.main(["mla_decode"]) == 2
    assert "add --quick" in capsys.readouterr().err


@pytest.mark.parametrize("operation", [name for name in checks.names() if name not in HOPPER])
def test_operations_pass_their_quick_checks(operation: str) -> None:
    """Those without C++ compare the reference in bfloat16 with the reference in float32, in the smallest case."""
    is_native = operation in checks.names(Backend.NATIVE)
    backend = Backend.NATIVE if is_native else REFERENCE
    cases = list(checks.OPERATIONS[operation].cases(backend, True))
    rows = [checks.check(made, backend) for made in (cases if is_native else cases[:1])]
    assert rows and not [row for row in rows if not row.passed]


def test_parts_of_hopper_are_checked_only_there(capsys: pytest.CaptureFixture) -> None:
    for operation in HOPPER:
        assert list(checks.OPERATIONS[operation].cases(Backend.MOSAIC, True))
        assert command.main([operation, "--quick", "--backend", "reference"]) == 2
        assert "the backend reference has no" in capsys.readouterr().err


@pytest.mark.aot
@pytest.mark.parametrize("backend", [Backend.MOSAIC, Backend.TRITON])
def test_quick_checks_reach_the_kernels(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape without a kernel compares the reference with itself, and TMA rejects some shapes only in lowering.

    The first and the last shape of each operation are lowered, Triton's kernels without bodies: the tests of `triton`
    compile these. So are operations whose kernels are `mla_decode`'s. Rows of FP8 pages are written by XLA.
    """
    whole = call.kernel_function
    monkeypatch.setattr(call, "kernel_function", lambda kernel: call._without_body(whole(kernel)))
    lowered, without = [], set()
    with contextlib.ExitStack() as stack:
        if backend is Backend.TRITON:
            stack.enter_context(gpus.compiling_for(gpus.by_number(90)))
        for operation in checks.names(backend):
            cases = list(checks.OPERATIONS[operation].cases(backend, True))
            again = operation in ("attend_topk", "mla_prefill_context")
            for made in [cases[0], *cases[1:][-1:]]:
                operands = jax.eval_shape(made.operands, jax.random.key(0))
                run = functools.partial(made.call, backend=backend)
                with bodies.left_out() if again else contextlib.nullcontext():
                    text = aot.lower_for(run, operands, jax.ShapeDtypeStruct((), jnp.int32)).as_text()
                lowered.append((operation, made.name))
                if not re.search("mosaic_gpu|triton_kernel_call", text):
                    without.add(lowered[-1])
    assert without == {("write_pages", "5 rows, FP8 pages")}
    assert len(set(lowered)) == len(lowered) > 25
