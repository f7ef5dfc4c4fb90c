"""FP8 and grouped products on a GPU, in one run: roofs, correctness, DeepGEMM's tables, plans with the time left.

    python -m benchmarks.gpu.fp8_gemm --out DIR                       on a Hopper GPU; under nine minutes
    JAX_PLATFORMS=cpu python -m benchmarks.gpu.fp8_gemm --compile     without one: registers and spills

Writes DIR/fp8_gemm.md (the tables) and DIR/fp8_gemm.json, anew after each child process (`children.py`). The last table
has the likeliest plans of each product beside the one that `pallas_kernels/gemm/plan.py` chooses, so that its constants
can be mended. What is compared, and how far it may be off, is a case of `pallas_kernels.checks`; what is wrong is not
timed. A time is the best of three loops of calls, each call with another weight of a stack that the L2 cache cannot
hold. Every rate stands next to what the same run measured for a copy and for cuBLAS products through XLA. Products with
one layer of a bfloat16 stack (k_up, v_up, the router) also stand next to XLA's product with a slice of the same stack.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import children
from benchmarks.gpu.children import Key
from benchmarks.record import Report, run
from pallas_kernels import checks
from pallas_kernels.backend import Backend
from pallas_kernels.checks import Case, Row, experts, products
from pallas_kernels.gemm import plan as planning
from pallas_kernels.gemm import shapes
from pallas_kernels.gemm.plan import TilePlan, plan_contiguous, plan_dense
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
_PLANS = "plans"


def main(report: Report) -> int:
    title = (__doc__ or "").split("\n")[0]
    return children.main(report, "benchmarks.gpu.fp8_gemm", title, keys(), measure, programs)


def keys() -> list[Key]:
    """Returns the rows; DeepGEMM's other tests and the plans come last."""
    found = [(table, name) for table in _TABLES for name in cases(table)]
    others = {("experts", case.name) for case in experts.other_fp8_cases(Backend.MOSAIC)}
    return [*(k for k in found if k not in others), *(k for k in found if k in others), *((_PLANS, n) for n in plans())]


@functools.cache
def cases(table: str) -> dict[str, Case]:
    """Returns the cases of a table by name."""
    made = checks.OPERATIONS[_TABLES[table]].cases(Backend.MOSAIC, False)
    return {case.name: case for case in made}


def measure(key: Key, roofs: Roofs) -> Row:
    """Returns the row of a case or of a product's plans."""
    table, name = key
    return compare_plans(plans()[name], roofs) if table == _PLANS else compare_case(cases(table)[name], roofs)


def compare_case(case: Case, roofs: Roofs, backend: Backend = Backend.MOSAIC) -> Row:
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


@dataclasses.dataclass(frozen=True)
class Product:
    """A product whose plans are compared."""

    case_of: Callable[[TilePlan], Case]
    chosen: Callable[[], TilePlan]
    candidates: Callable[[], list[TilePlan]]


def compare_plans(product: Product, roofs: Roofs) -> Row:
    """Returns microseconds of the chosen plan and of the likeliest ones; none may be wrong, and all compile."""
    chosen, figures, faults, operands, case = product.chosen(), {}, [], None, None
    for plan in dict.fromkeys((chosen, *product.candidates())):
        case = product.case_of(plan)
        row = checks.check(case, Backend.MOSAIC)
        if not row.passed:
            faults.append(f"{plan_name(plan)}: {row.says}")
            continue
        operands = jax.jit(case.operands)(jax.random.key(0)) if operands is None else operands
        roof = roof_seconds(roofs, case.flops, case.bytes, bfloat16="bfloat16" in case.key)
        name = f"{plan_name(plan)}{' (chosen)' if plan == chosen else ''} us"
        figures[name] = time_call(lambda o, i, case=case: case.call(o, i, Backend.MOSAIC), operands, roof) * 1e6
    return Row("", not faults, "; ".join(faults), figures)


def plan_name(plan: TilePlan) -> str:
    """Returns what a row calls a plan."""
    kind = f"{'wide' if plan.wide else 'narrow'} {plan.tile_m} x {plan.tile_n}"
    return kind + (f", K in {plan.splits}" if plan.splits > 1 else "") + _multicast(plan)


def _multicast(plan: TilePlan) -> str:
    """A grouped plan does not say what its clusters share: that goes by the groups of their rows."""
    return f", clusters of two{' share the weights' if plan.shares_weights else ''}" if plan.cluster > 1 else ""


def plans() -> dict[str, Product]:
    """Returns the products of a decode and a prefill step by name; plans are made when they are asked for."""
    found = {}
    for m in (4096, 64, 128, 1):
        for n, k in shapes.DENSE_NK:
            case_of = functools.partial(products.dense_case, m, n, k)
            found[f"dense {m} x {n} x {k}"] = Product(
                case_of, functools.partial(plan_dense, m, n, k, 1), functools.partial(_likeliest, m, n, k)
            )
    groups, rows = 8, 4096
    for dtype in (jnp.float8_e4m3fn, jnp.bfloat16):
        size = jnp.dtype(dtype).itemsize
        for n, k in shapes.EXPERT_NK:
            found[f"contiguous {groups} x about {rows}, {n} x {k} {jnp.dtype(dtype).name}"] = Product(
                functools.partial(experts.contiguous_case, groups, rows, n, k, dtype),
                functools.partial(plan_contiguous, groups * rows, planning.WIDE_TILE_M, n, k, size),
                lambda size=size: list(planning.wide_plans(size))[-6:],
            )
    return found


def _likeliest(m: int, n: int, k: int) -> list[TilePlan]:
    return sorted(planning.dense_plans(m, 1), key=lambda plan: planning.estimated_cycles(plan, m, n, k, 1))[:4]


def programs() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Yields the program of every case."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    for table in _TABLES:
        for name, case in cases(table).items():
            operands = jax.eval_shape(case.operands, jax.random.key(0))
            yield f"{table}: {name}", functools.partial(case.call, backend=Backend.MOSAIC), (operands, number)


if __name__ == "__main__":
    run(main)
