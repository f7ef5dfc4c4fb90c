"""The section `fast` at toy size: what its rows say, and that a kernel that is wrong or crashes costs its own row."""

import dataclasses
import json

import jax
import pytest

from pallas_kernels.backend import Backend
from pallas_kernels.checks import products
from pallas_kernels.checks.attention import Decode
from pallas_kernels.checks.case import ContextLostError
from pallas_kernels.checks.prefill import Prefill
from tools.doctor import checks, fast, rates
from tools.doctor.fast import Timed

REFERENCE = Backend.REFERENCE
ROOFS = {rates.COPY: 1e9, rates.BFLOAT16: 2e9, rates.FP8: 4e9}
PRODUCT = products.dense_case(3, 136, 128, quick=True)
GOAL = "goal on an H200, TFLOP/s"


@pytest.fixture(autouse=True)
def short_loops(monkeypatch):
    monkeypatch.setattr(rates, "_LOOP_SECONDS", 1e-9)


def rows_of(capsys, monkeypatch, *timed: Timed) -> tuple[int, list[dict]]:
    """Runs a kind that has these cases."""
    monkeypatch.setitem(fast.KINDS, "toy", (lambda backend: iter(timed), rates.FP8))
    status = fast.check_kind("toy", REFERENCE, measure=lambda products: {name: ROOFS[name] for name in ROOFS})
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_roofs_are_measured_and_a_kernel_is_a_share_of_them(monkeypatch):
    found = rates.measure_roofs(floats=1 << 10, side=64)
    assert list(found) == [rates.COPY, rates.BFLOAT16, rates.FP8] and min(found.values()) > 0
    assert list(rates.measure_roofs([rates.FP8], floats=1 << 10, side=64)) == [rates.COPY, rates.FP8]
    figures = rates.measure_case(PRODUCT, found, REFERENCE).figures
    seconds = figures["us"] / 1e6
    assert figures["TFLOP/s"] == pytest.approx(2 * 3 * 136 * 128 / seconds / 1e12)
    assert figures["GB/s"] == pytest.approx(PRODUCT.bytes / seconds / 1e9)
    roof = max(PRODUCT.flops / found[rates.FP8], PRODUCT.bytes / found[rates.COPY])
    assert figures[rates.SHARE] == pytest.approx(roof / seconds)


def test_each_operation_has_the_roof_that_binds_it():
    assert rates.roof_seconds(ROOFS, 8e9, 1e9, bfloat16=False) == 2
    assert rates.roof_seconds(ROOFS, 8e9, 1e9, bfloat16=True) == 4
    assert rates.roof_seconds(ROOFS, 8e9, 5e9, bfloat16=True) == 5


@pytest.mark.parametrize(
    "case",
    [
        fast.scheduled(Decode(2, 1, 70, batch=2, layers=2), REFERENCE),
        fast.scheduled(Decode(2, 1, 70, batch=2, layers=2, fp8=True), REFERENCE),
        fast.in_bfloat16(Prefill.even(96, 2, heads=2).spans_case()),
        fast.in_bfloat16(Prefill.even(8, 1, 70, heads=2).context_case()),
    ],
    ids=lambda case: case.name,
)
def test_attention_at_toy_size(capsys, monkeypatch, case):
    status, (roof, row) = rows_of(capsys, monkeypatch, Timed(case, ("TFLOP/s", 600.0)))
    assert status == 0 and roof["case"] == "roof" and row["passed"], row
    assert list(row["figures"]) == ["us", "TFLOP/s", "GB/s", rates.SHARE, GOAL]
    assert row["figures"][rates.SHARE] > 0 and row["figures"][GOAL] == 600


def test_the_layers_of_a_pool_take_turns(monkeypatch):
    """A loop that reads one layer again and again would time the L2 cache."""
    seen = []
    right = Decode.call
    monkeypatch.setattr(
        Decode,
        "call",
        lambda self, of: lambda *four, layer=0, **how: seen.append(layer) or right(self, of)(*four, layer=layer, **how),
    )
    case = fast.scheduled(Decode(2, 1, 70, batch=2, layers=2), REFERENCE)
    operands = case.operands(jax.random.key(0))
    for i in range(3):
        case.call(operands, i, REFERENCE)
    assert seen == [0, 1, 0]


def test_a_wrong_kernel_and_one_that_raises_are_rows_without_a_time(capsys, monkeypatch):
    wrong = dataclasses.replace(
        PRODUCT,
        name="wrong",
        call=lambda o, i, of: PRODUCT.call(o, i, of) + 1,
        reference=lambda o, i: PRODUCT.call(o, i, REFERENCE),
    )
    raises = dataclasses.replace(PRODUCT, name="raises", call=lambda o, i, of: 1 // 0)
    status, rows = rows_of(capsys, monkeypatch, Timed(wrong, ("TFLOP/s", 1.0)), Timed(raises), Timed(PRODUCT))
    assert status == 1
    assert [(row["case"], row["passed"]) for row in rows] == [
        ("roof", True), ("wrong", False), ("raises", False), (PRODUCT.name, True)
    ]  # fmt: skip
    assert "is off by" in rows[1]["says"] and rows[1]["figures"] == {GOAL: 1.0}
    assert "ZeroDivisionError" in rows[2]["says"]


def test_a_lost_device_is_the_last_row(capsys, monkeypatch):
    def lost(case, roofs, backend):
        raise ContextLostError("illegal address")

    monkeypatch.setattr(fast, "measure_case", lost)
    status, rows = rows_of(capsys, monkeypatch, Timed(PRODUCT), Timed(PRODUCT))
    assert status == 1 and [row["case"] for row in rows] == ["roof", PRODUCT.name]
    assert "illegal address" in rows[1]["says"]


def test_without_a_roof_nothing_is_timed(capsys):
    assert fast.check_kind("decode", REFERENCE, measure=lambda products: 1 / 0) == 1
    [row] = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["case"] == "roof" and "ZeroDivisionError" in row["says"]


def test_the_roof_stands_beside_the_data_sheet():
    roofs = {rates.COPY: 4.2e12, rates.FP8: 1.4e15}
    row = fast.roof_row(roofs, "NVIDIA H200")
    expected = {
        "copy GB/s": 4200,
        "copy, share of the data sheet": 4.2 / 4.8,
        "FP8 TFLOP/s": 1400,
        "FP8, share of the data sheet": 1400 / 1979,
    }
    assert row.says == "NVIDIA H200" and row.figures == pytest.approx(expected)
    assert list(fast.roof_row(roofs, "some other card").figures) == ["copy GB/s", "FP8 TFLOP/s"]


def test_what_is_timed_has_the_goals_of_the_design():
    goals = {}
    for kind, (made, _) in fast.KINDS.items():
        found = list(made(Backend.MOSAIC))
        assert len({timed.case.name for timed in found}) == len(found)
        assert all(timed.case.flops > 0 and timed.case.bytes > 0 for timed in found)
        goals[kind] = {timed.goal for timed in found if timed.goal}
    assert goals == {
        "decode": {("TFLOP/s", 600), ("GB/s", 3700)},
        "prefill": set(),
        "compressed": set(),
        "fp8_dense": {("TFLOP/s", 1300), ("GB/s", 3800)},
        "grouped": {("GB/s", 3800)},
        "moe_layer": set(),
    }


@pytest.mark.parametrize("arguments", [["--list"], ["decode"]])
def test_on_a_cpu_nothing_is_timed(capsys, arguments):
    assert fast.main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and "kernels are timed only on a GPU" in error


def test_on_a_gpu_the_kinds_are_checks_of_their_own(capsys, monkeypatch):
    monkeypatch.setattr(fast, "resolve_backend", lambda device: Backend.MOSAIC)
    assert fast.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(fast.KINDS)
    [check] = [
        check
        for check in checks.table(checks.Path("model"), quick=False)
        if (check.section, check.name) == ("fast", "kernels")
    ]
    assert check.each and check.command[-1] == "tools.doctor.fast"
    assert not [check for check in checks.table(checks.Path("model"), quick=True) if check.section == "fast"]
