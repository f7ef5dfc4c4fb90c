"""The GPU benchmark's rows at tiny sizes on jax.numpy: a GPU run is too expensive to find typos."""

import dataclasses

import pytest

from benchmarks.gpu import device_time, mla, mla_cases
from pallas_kernels.backend import Backend
from pallas_kernels.checks.attention import Decode
from pallas_kernels.checks.prefill import Prefill
from tools.doctor.rates import SHARE

REFERENCE = Backend.REFERENCE
ROOFS = {"copy B/s": 1e9, "bfloat16 flop/s": 1e9, "FP8 flop/s": 1e9}
VARIABLE = Decode(2, 2, 70, variable=True, batch=2)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(device_time, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(device_time, "RUNS", 2)
    monkeypatch.setattr(mla_cases, "SPLITS", mla_cases.SPLITS[:2])
    monkeypatch.setattr(mla_cases, "PREFILL_TILES", mla_cases.PREFILL_TILES[:2])


@pytest.mark.usefixtures("small")
def test_decode_and_its_splits():
    figures = mla.decode(VARIABLE, REFERENCE, ROOFS).figures
    assert {"us", SHARE, "TFLOP/s", "GB/s", "plain XLA us", "out.diff"} < set(figures)
    tuned = mla.tune_decode(VARIABLE, REFERENCE, ROOFS)
    assert tuned.passed and list(tuned.figures) == ["1 waves, overhead 1, us", "1 waves, overhead 3, us"]


@pytest.mark.usefixtures("small")
def test_prefill_and_its_tiles():
    shape = Prefill.even(96, 1, heads=2)
    assert mla.prefill(shape, REFERENCE, ROOFS).figures["plain XLA us"] > 0
    assert len(mla.tune_prefill(shape, REFERENCE, ROOFS).figures) == 2


@pytest.mark.usefixtures("small")
def test_context_in_both_forms():
    row = mla.context(Prefill.even(8, 2, 70, heads=2), REFERENCE, ROOFS)
    assert row.passed and row.figures["expanded us"] > 0 and row.figures["groups of heads"] == 1


@pytest.mark.usefixtures("small")
def test_writes():
    row = mla.write(mla_cases.Write(5, pages=2), REFERENCE, ROOFS)
    assert row.passed and list(row.figures) == ["XLA's norm, then a kernel, us", "XLA, us"]


@pytest.mark.usefixtures("small")
def test_a_wrong_answer_is_not_timed(monkeypatch):
    right = VARIABLE.case()
    shifted = dataclasses.replace(
        right,
        call=lambda o, i, of: {k: v + 1 for k, v in right.call(o, i, of).items()},
        reference=lambda o, i: right.call(o, i, REFERENCE),
    )
    monkeypatch.setattr(Decode, "case", lambda self: shifted)
    row = mla.decode(VARIABLE, REFERENCE, ROOFS)
    assert not row.passed and "us" not in row.figures


def test_every_kernel_the_run_needs_is_compiled():
    names = [name for name, _, _ in mla.programs()]
    for wanted in (
        "decode 128 heads, 2 queries",
        "decode 16 heads, 1 queries",
        "FP8 pages",
        "2 waves",
        "prefill",
        "context",
        "expanded",
        "write, XLA's norm, then a kernel",
    ):
        assert any(wanted in name for name in names)
