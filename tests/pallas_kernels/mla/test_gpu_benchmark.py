"""The GPU benchmark's cases at tiny sizes on jax.numpy: a GPU run is too expensive to find typos."""

import pytest

from benchmarks.gpu import mla
from pallas_kernels import checks
from pallas_kernels.backend import Backend
from pallas_kernels.checks.attention import Decode
from pallas_kernels.checks.prefill import Prefill
from tools.doctor import fast, rates

REFERENCE = Backend.REFERENCE
ROOFS = {"copy B/s": 1e9, "bfloat16 flop/s": 1e9, "FP8 flop/s": 1e9}


@pytest.mark.parametrize(
    "case",
    [
        fast.scheduled(Decode(2, 2, 70, variable=True, batch=2), REFERENCE, waves=2),
        mla.tiled_case(Prefill.even(96, 1, heads=2), 64, 2),
        mla.materialized_case(Prefill.even(8, 2, 70, heads=2)),
    ],
    ids=["decode", "tiles of prefill", "materialized"],
)
def test_a_case_is_right_and_timed(case: checks.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_LOOP_SECONDS", 1e-9)
    row = rates.measure_case(case, ROOFS, REFERENCE)
    assert row.passed, row.says
    assert {"us", rates.SHARE, "TFLOP/s", "GB/s", "out.diff"} <= set(row.figures)


def test_every_kernel_the_run_needs_is_compiled() -> None:
    names = list(map(": ".join, mla.compiled()))
    for wanted in ("128 heads, 2 queries", "16 heads, 1 queries", "FP8 pages", "prefill", "context", "materialized"):
        assert any(wanted in name for name in names)
