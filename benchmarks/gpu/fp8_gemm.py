"""FP8 and grouped products on a GPU, in one run: roofs, correctness, DeepGEMM's tables.

    python -m benchmarks.gpu.fp8_gemm                                 on a Hopper GPU; under nine minutes
    JAX_PLATFORMS=cpu python -m benchmarks.gpu.fp8_gemm --compile     without one: registers and spills

What is compared, and how far it may be off, is a case of `pallas_kernels.checks`; what is wrong is not timed. A time is
the best of three loops of calls, each call with another weight of a stack that the L2 cache cannot hold. Every rate
stands next to what the same run measured for a copy and for cuBLAS products through XLA. Products with one layer of a
bfloat16 stack (k_up, v_up, the router) also stand next to XLA's product with a slice of the same stack. `launch.tune`
compares the plans of a model's products.
"""

import dataclasses

import jax

from benchmarks.gpu import children
from benchmarks.gpu.children import Key
from benchmarks.record import Report, run
from pallas_kernels import checks
from pallas_kernels.backend import Backend
from pallas_kernels.checks import Case, Row, experts
from tools.doctor.rates import Roofs, measure_case, roof_seconds, time_call

PUBLISHED = {
    (64, 2112, 7168): 206, (64, 24576, 1536): 289, (64, 32768, 512): 219, (64, 7168, 16384): 336,
    (64, 4096, 7168): 287, (64, 7168, 2048): 295,
    (128, 2112, 7168): 352, (128, 24576, 1536): 535, (128, 32768, 512): 358, (128, 7168, 16384): 645,
    (128, 4096, 7168): 533, (128, 7168, 2048): 510,
    (4096, 2112, 7168): 1127, (4096, 24576, 1536): 1212, (4096, 32768, 512): 775, (4096, 7168, 16384): 1520,
    (4096, 4096, 7168): 1410, (4096, 7168, 2048): 1168,
    ("float8_e4m3fn", 4, 8192, 4096, 7168): 1346, ("float8_e4m3fn", 4, 8192, 7168, 2048): 1214,
    ("float8_e4m3fn", 8, 4096, 4096, 7168): 1346, ("float8_e4m3fn", 8, 4096, 7168, 2048): 1214,
    ("float8_e4m3fn", 1, 1024, 4096, 7168): 1233, ("float8_e4m3fn", 1, 1024, 7168, 2048): 925,
    ("float8_e4m3fn", 2, 512, 4096, 7168): 1040, ("float8_e4m3fn", 2, 512, 7168, 2048): 916,
    ("float8_e4m3fn", 4, 256, 4096, 7168): 932, ("float8_e4m3fn", 4, 256, 7168, 2048): 815,
}  # fmt: skip
"""TFLOP/s of DeepGEMM on an H800, from its README of 2025-04-09."""

_TABLES = {
    "dense": "fp8_gemm",
    "experts": "fp8_grouped_gemm_contiguous",
    "quantize": "quantize_1x128",
    "SwiGLU and quantize": "swiglu_quantize",
    "heads": "head_gemm",
    "router and linear": "layer_gemm",
    "bfloat16 experts": "grouped_gemm_contiguous",
    "INT4 experts": "int4_grouped_gemm_contiguous",
    "FP4 experts": "fp4_grouped_gemm_contiguous",
}
"""Tables and their operations, most important first."""


def main(report: Report) -> int:
    return children.main(report, "benchmarks.gpu.fp8_gemm", __doc__, entries(), entries(), compare_case)


def entries() -> dict[Key, Case]:
    """Returns the case of each row; DeepGEMM's other tests come last."""
    found = {
        (table, case.name): case
        for table, operation in _TABLES.items()
        for case in checks.OPERATIONS[operation].cases(Backend.MOSAIC, False)
    }
    others = {("experts", case.name) for case in experts.other_fp8_cases(Backend.MOSAIC)}
    return dict(sorted(found.items(), key=lambda entry: entry[0] in others))


def compare_case(case: Case, roofs: Roofs, backend: Backend) -> Row:
    """Returns the row of a case beside its roof, XLA's product with a slice, and what is published."""
    row = measure_case(case, roofs, backend)
    if not row.passed:
        return row
    figures = dict(row.figures)
    if case.sliced is not None:
        roof = roof_seconds(roofs, case.flops, case.bytes, bfloat16="bfloat16" in case.key)
        operands = jax.jit(case.operands)(jax.random.key(0))
        figures["XLA of a slice us"] = time_call(case.sliced, operands, roof) * 1e6
    if case.key in PUBLISHED:
        figures["DeepGEMM H800 TFLOP/s"] = PUBLISHED[case.key]
    return dataclasses.replace(row, figures=figures)


if __name__ == "__main__":
    run(main)
