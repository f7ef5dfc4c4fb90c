"""FP8 and grouped products on a GPU, in one run: roofs, correctness, DeepGEMM's tables, tuning with the time left.

    python -m benchmarks.gpu.fp8_gemm --out DIR                       on a Hopper GPU; under nine minutes
    JAX_PLATFORMS=cpu python -m benchmarks.gpu.fp8_gemm --compile     without one: registers and spills

Writes DIR/fp8_gemm.md (the tables) and DIR/fp8_gemm.json. The last table holds the fastest plan of each product beside
the one that `pallas_kernels/gemm/plan.py` chooses, so that its constants can be mended.
A figure is the best of three loops of calls, each call with another weight of a stack that the L2 cache cannot hold.
Every rate stands next to what the same run measured for a copy and for cuBLAS products through XLA. Products with one
layer of a bfloat16 stack (k_up, v_up, the router) also stand next to XLA's product with a slice of the same stack.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.gpu import fp8_cases
from benchmarks.gpu.fp8_cases import Case
from pallas_kernels import aot
from pallas_kernels.backend import Backend, is_hopper
from pallas_kernels.gemm import plan as planning
from pallas_kernels.gemm import shapes
from pallas_kernels.gemm.plan import TilePlan, plan_contiguous, plan_dense

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

_LOOP_SECONDS = 0.02
_MAX_CALLS = 500


def main() -> int:
    args = _arguments()
    if args.compile:
        return compile_all()
    device = jax.devices()[0]
    if not is_hopper(device):
        print(
            f"This benchmark needs a Hopper GPU (sm_90); the device here is {device.device_kind!r}. Nothing was run.\n"
            "Without a GPU, --compile checks registers and spills at every shape.",
            file=sys.stderr,
        )
        return 2
    run = Run(device, deadline=time.monotonic() + 60 * args.minutes, out=args.out)
    run.roofs()
    run.check_and_measure(list(fp8_cases.all_cases(Backend.MOSAIC)))
    run.write()
    run.compare_plans()
    run.write()
    return 1 if run.failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/fp8_gemm"), help="folder for the tables")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit; later parts are left out, and said so")
    parser.add_argument("--compile", action="store_true", help="compile every shape for an H200 and gate its resources")
    return parser.parse_args()


class Run:
    """What one run has measured."""

    def __init__(self, device: jax.Device, deadline: float, out: Path):
        self.device, self.deadline, self.out = device, deadline, out
        self.copy_rate = self.bf16_rate = self.fp8_rate = math.nan
        self.rows: list[dict] = []
        self.failures: list[str] = []
        self.left_out: list[str] = []
        self.plans: list[dict] = []

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    def roofs(self) -> None:
        """Copy bandwidth in bytes/s, and bfloat16 and FP8 rates of cuBLAS through XLA in flop/s."""
        gigabyte = jnp.zeros(1 << 28, jnp.float32)
        self.copy_rate = 2 * gigabyte.nbytes / seconds_per_call(lambda i, x: x + 1, gigabyte, 20)
        size = 8192
        square = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
        scaled = square / math.sqrt(size)  # keeps a chain of products near unit variance
        flops = 2 * size**3
        self.bf16_rate = flops / seconds_per_call(lambda i, x: x @ scaled, square, 20)
        weight = square.astype(jnp.float8_e4m3fn)

        def fp8(i, x):
            product = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            return (product / math.sqrt(size)).astype(jnp.float8_e4m3fn)

        self.fp8_rate = flops / seconds_per_call(fp8, weight, 20)
        print(self.header(), flush=True)

    def header(self) -> str:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        return (
            f"{now}; {self.device.device_kind}; jax {jax.__version__}; {self.device.client.platform_version!r}\n"
            f"command: python -m benchmarks.gpu.fp8_gemm {shlex.join(sys.argv[1:])}\n\n"
            f"Measured in this run: copy {self.copy_rate / 1e12:.2f} TB/s; cuBLAS through XLA, 8192^3: "
            f"bfloat16 {self.bf16_rate / 1e12:.0f}, FP8 {self.fp8_rate / 1e12:.0f} TFLOP/s."
        )

    def check_and_measure(self, cases: list[Case]) -> None:
        """Correctness of every case first; a case that fails is not timed."""
        for number, case in enumerate(cases):
            if self.time_left() < 20:
                self.left_out += [f"{c.table}: {c.label}" for c in cases[number:]]
                return
            operands = jax.jit(case.operands)(jax.random.key(number))
            diff = difference(case, operands)
            if not diff < case.tolerance:
                self.failures.append(f"{case.table}, {case.label}: calc_diff {diff:.2e}, allowed {case.tolerance:.0e}")
                print("FAILED", self.failures[-1], flush=True)
                continue
            row = self.measure(case, operands) | {"calc_diff": diff}
            self.rows.append(row)
            print(table_line(row), flush=True)

    def measure(self, case: Case, operands) -> dict:
        roof = self.roof_seconds(case)
        seconds = time_case(case, operands, roof)
        sliced = None if case.sliced is None else dataclasses.replace(case, call=case.sliced)
        return {
            "table": case.table,
            "label": case.label,
            "dtype": case.key[0] if isinstance(case.key[0], str) else "",
            "microseconds": seconds * 1e6,
            "tflops": case.flops / seconds / 1e12,
            "gigabytes_per_second": case.bytes / seconds / 1e9,
            "share_of_roof": roof / seconds,
            "xla_sliced_microseconds": None if sliced is None else time_case(sliced, operands, roof) * 1e6,
            "deepgemm_h800_tflops": PUBLISHED.get(case.key),
        }

    def roof_seconds(self, case: Case) -> float:
        """The longer of its flops at cuBLAS's rate and its bytes at the copy's rate, both of this run."""
        rate = self.bf16_rate if "bfloat16" in case.key else self.fp8_rate
        return max(case.flops / rate, case.bytes / self.copy_rate)

    def compare_plans(self) -> None:
        """Measures the likeliest plans of dense and grouped products beside the chosen one, while there is time."""
        for name, chosen, case_of, candidates in planned_products():
            times: dict[TilePlan, float] = {}
            operands = None
            for plan in dict.fromkeys((chosen, *candidates)):
                if self.time_left() < 15:
                    self.left_out.append(f"plans from {name} on")
                    return
                case = case_of(plan)
                operands = jax.jit(case.operands)(jax.random.key(0)) if operands is None else operands
                seconds = self.time_plan(case, plan, operands)
                if seconds is not None:
                    times[plan] = seconds
            if times:
                self.plans.append(plan_row(name, chosen, times))
                print(plan_line(self.plans[-1]), flush=True)

    def time_plan(self, case: Case, plan: TilePlan, operands) -> float | None:
        """Seconds, or None where the plan does not compile or gives a wrong answer."""
        try:
            if not difference(case, operands) < case.tolerance:
                self.failures.append(f"{case.label} with {plan}: wrong answer")
                return None
            return time_case(case, operands, self.roof_seconds(case))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print(f"{case.label} with {plan}: {str(error)[:200]}", flush=True)
            return None

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        lines = [self.header(), ""]
        for table in dict.fromkeys(row["table"] for row in self.rows):
            lines += [f"## {table}", "", *TABLE_HEAD]
            lines += [table_line(row) for row in self.rows if row["table"] == table] + [""]
        lines += sliced_table(self.rows)
        lines += plan_table(self.plans)
        lines += ["Failed: " + failure for failure in self.failures]
        lines += ["Left out for lack of time: " + what for what in self.left_out]
        (self.out / "fp8_gemm.md").write_text("\n".join(lines) + "\n")
        record = {"header": self.header(), "rows": self.rows, "plans": self.plans}
        record |= {"failures": self.failures, "left_out": self.left_out}
        (self.out / "fp8_gemm.json").write_text(json.dumps(record, indent=1))


TABLE_HEAD = (
    "| product (M x N x K) | dtype | us | TFLOP/s | GB/s | of the roof | DeepGEMM, H800 TFLOP/s | calc_diff |",
    "|---|---|---|---|---|---|---|---|",
)


def table_line(row: dict) -> str:
    published = row["deepgemm_h800_tflops"] or ""
    return (
        f"| {row['label']} | {row['dtype']} | {row['microseconds']:.1f} | {row['tflops']:.0f} | "
        f"{row['gigabytes_per_second']:.0f} | {row['share_of_roof']:.0%} | {published} | {row['calc_diff']:.1e} |"
    )


def sliced_table(rows: list[dict]) -> list[str]:
    """Lines of the table of the rows that were also timed as XLA's product with a slice of the stack."""
    compared = [row for row in rows if row["xla_sliced_microseconds"] is not None]
    if not compared:
        return []
    return [
        "## one layer of a stack: ours addresses it, XLA slices it by a traced index",
        "",
        "| product (M x N x K) | ours, us | XLA, us | XLA / ours |",
        "|---|---|---|---|",
        *map(sliced_line, compared),
        "",
    ]


def sliced_line(row: dict) -> str:
    ours, xla = row["microseconds"], row["xla_sliced_microseconds"]
    return f"| {row['table']}: {row['label']} | {ours:.1f} | {xla:.1f} | {xla / ours:.2f} |"


def plan_row(name: str, chosen: TilePlan, times: dict[TilePlan, float]) -> dict:
    """The measured plans of a product, with the fastest and the chosen one, in microseconds."""
    best = min(times, key=times.__getitem__)
    measured = {str(dataclasses.astuple(plan)): seconds * 1e6 for plan, seconds in times.items()}
    chosen_us = measured.get(str(dataclasses.astuple(chosen)))
    return {
        "product": name,
        "best": best_name(best),
        "best_us": times[best] * 1e6,
        "chosen_us": chosen_us,
        "all": measured,
    }


def best_name(plan: TilePlan) -> str:
    kind = f"{'wide' if plan.wide else 'narrow'} {plan.tile_m} x {plan.tile_n}"
    return kind + (f", K in {plan.splits}" if plan.splits > 1 else "") + _multicast(plan)


def _multicast(plan: TilePlan) -> str:
    """A grouped plan does not say what its clusters share: that goes by the groups of their rows."""
    return f", clusters of two{' share the weights' if plan.shares_weights else ''}" if plan.cluster > 1 else ""


def plan_line(row: dict) -> str:
    chosen = "wrong" if row["chosen_us"] is None else f"{row['chosen_us']:.1f}"
    return f"| {row['product']} | {row['best']} | {row['best_us']:.1f} | {chosen} |"


def plan_table(rows: list[dict]) -> list[str]:
    """Lines of the table of plans; empty where none was measured."""
    head = ["## plans", "", "| product | fastest plan | us | chosen plan, us |", "|---|---|---|---|"]
    return [*head, *map(plan_line, rows), ""] if rows else []


def difference(case: Case, operands) -> float:
    return float(jax.jit(lambda operands, i: fp8_cases.calc_diff(*case.valid_rows(operands, i)))(operands, 1))


def time_case(case: Case, operands, roof_seconds: float) -> float:
    calls = int(min(_MAX_CALLS, max(5, _LOOP_SECONDS / roof_seconds)))
    result = jax.eval_shape(case.call, operands, 0)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)
    return seconds_per_call(lambda i, _, operands: case.call(operands, i), nothing, calls, operands)


def seconds_per_call(step: Callable, init, calls: int, *operands) -> float:
    """Best of three loops of `calls` calls of `step(i, carry, *operands)` in one program."""
    loop = jax.jit(lambda init, *operands: lax.fori_loop(0, calls, lambda i, x: step(i, x, *operands), init))
    jax.block_until_ready(loop(init, *operands))
    best = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(loop(init, *operands))
        best = min(best, time.perf_counter() - begin)
    return best / calls


def planned_products():
    """(name, chosen plan, plan -> case, plans to try), the products of a decode and a prefill step first."""
    for m in (4096, 64, 128, 1):
        for n, k in shapes.DENSE_NK:
            plans = sorted(planning.dense_plans(m, 1), key=lambda plan: planning.estimated_cycles(plan, m, n, k, 1))[:4]
            case_of = functools.partial(fp8_cases.dense_case, m, n, k, Backend.MOSAIC)
            yield f"dense {m} x {n} x {k}", plan_dense(m, n, k, 1), case_of, plans
    groups, rows = 8, 4096
    for dtype in (jnp.float8_e4m3fn, jnp.bfloat16):
        itemsize = jnp.dtype(dtype).itemsize
        for n, k in shapes.EXPERT_NK:
            yield (
                f"contiguous {groups} x about {rows}, {n} x {k} {jnp.dtype(dtype).name}",
                plan_contiguous(groups * rows, planning.WIDE_TILE_M, n, k, itemsize),
                functools.partial(fp8_cases.contiguous_case, groups, rows, n, k, dtype, Backend.MOSAIC),
                list(planning.wide_plans(itemsize))[-6:],
            )


def compile_all() -> int:
    """Compiles every case for an H200 and prints its kernels' registers and spills; 1 if one spills."""
    spilled = 0
    for case in fp8_cases.all_cases(Backend.MOSAIC):
        operands = jax.eval_shape(case.operands, jax.random.key(0))
        kernels = aot.kernel_resources(case.call, operands, jax.ShapeDtypeStruct((), jnp.int32))
        for kernel in kernels:
            spilled += kernel.spill_bytes > 0
            print(f"{case.table}: {case.label}: {kernel.name}: {kernel.registers} registers, "
                  f"{kernel.spill_bytes} bytes spilled", flush=True)  # fmt: skip
    print(f"{spilled} kernels spill")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
