"""Times the kernels that serving uses, as shares of what the same process measures of this device: its roof.

    python -m tools.doctor.fast --list       the kinds of kernels
    python -m tools.doctor.fast NAME         one of them

Each process measures the roof first, so that a kernel and its roof run at the same clock. A kernel is compared with its
reference before it is timed. A slow one fails nothing: its row has the share of the roof, and the goal for an H200
where there is one.
"""

import dataclasses
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from dsv3.config.device_rates import PEAKS
from dsv3.logs import configure_logging
from pallas_kernels.backend import Backend, prepare, resolve_backend
from pallas_kernels.checks import Case
from pallas_kernels.checks.attention import Decode, named
from pallas_kernels.checks.case import ContextLostError
from pallas_kernels.checks.compressed import attend_case
from pallas_kernels.checks.experts import about, contiguous_case, decode_case
from pallas_kernels.checks.prefill import Prefill
from pallas_kernels.checks.products import dense_case
from pallas_kernels.float8 import E4M3
from tools.doctor.install import query
from tools.doctor.moe_layer import all_cases
from tools.doctor.rates import BFLOAT16, COPY, FP8, Roofs, measure_case, measure_roofs
from tools.doctor.rows import CaseResult, parse_name, run_cases

FLOPS, BYTES = "TFLOP/s", "GB/s"


class Timed(NamedTuple):
    """A case to time, and its goal on an H200: a figure's name and the least that it should be."""

    case: Case
    goal: tuple[str, float] | None = None


def decode(backend: Backend) -> Iterable[Timed]:
    """Yields attention of 128 requests to their pages, with the heads of DeepSeek-V3 and with an eighth of them."""
    for heads, goal in ((128, (FLOPS, 600.0)), (16, (BYTES, 3700.0))):
        yield Timed(scheduled(Decode(heads, 1, 8192, layers=2), backend), goal)
        yield Timed(scheduled(Decode(heads, 1, 8192, fp8=True, layers=2), backend))


def prefill(_: Backend) -> Iterable[Timed]:
    """Yields attention of new tokens to each other, and to cached ones.

    It is `mla_prefill_spans`: `mla_prefill` has the same kernel, but writes into its values, which a loop would copy.
    """
    yield Timed(in_bfloat16(Prefill.even(8192, 8).spans_case()))
    yield Timed(in_bfloat16(Prefill.even(8192, 1).spans_case()))
    yield Timed(in_bfloat16(Prefill.even(128, 1, 32768).context_case()))


def compressed(_: Backend) -> Iterable[Timed]:
    """Yields attention of 128 requests to a window and the entries that DeepSeek-V4-Flash and V4-Pro choose."""
    for heads, chosen in ((64, 512), (128, 1024)):
        for fp8 in (False, True):
            yield Timed(attend_case((0, *(chosen,) * 127), heads=heads, fp8=fp8))


def fp8_dense(_: Backend) -> Iterable[Timed]:
    """Yields FP8 products of prefill and of decode."""
    for rows, goal in ((4096, (FLOPS, 1300.0)), (64, (BYTES, 3800.0))):
        for n, k in ((7168, 16384), (4096, 7168)):
            yield Timed(dense_case(rows, n, k), goal)


def grouped(backend: Backend) -> Iterable[Timed]:
    """Yields FP8 products of experts: many rows of each in prefill, few of each in decode (masked, for DeepGEMM)."""
    for n, k in ((4096, 7168), (7168, 2048)):
        yield Timed(contiguous_case(8, 4096, n, k, E4M3))
        yield Timed(decode_case(about(12, 32), 12, n, k, E4M3, backend), (BYTES, 3800.0))
        yield Timed(decode_case(about(256, 2), 256, n, k, E4M3, backend))


def moe_layer(_: Backend) -> Iterable[Timed]:
    """Yields the MoE layer of a decode step."""
    return map(Timed, all_cases())


KINDS: dict[str, tuple[Callable[[Backend], Iterable[Timed]], str]] = {
    "decode": (decode, BFLOAT16),
    "prefill": (prefill, BFLOAT16),
    "compressed": (compressed, BFLOAT16),
    "fp8_dense": (fp8_dense, FP8),
    "grouped": (grouped, FP8),
    "moe_layer": (moe_layer, FP8),
}
"""By name: what is timed, and the product that its roof is measured with."""


def scheduled(shape: Decode, backend: Backend, **split: int) -> Case:
    """Returns the case of a layer's attention in a decode step, whose schedule is made once for all layers.

    `split` says how `Decode.schedule` cuts the step into parts.
    """

    def operands(key: jax.Array) -> tuple[Any, ...]:
        arrays = shape.arrays(key)
        return (*arrays, shape.schedule(arrays[3], **split) if backend is Backend.MOSAIC else None)

    def call(operands: tuple[Any, ...], i: Any, backend: Backend) -> dict[str, jax.Array]:
        *arrays, schedule = operands
        how = {"schedule": schedule} if backend is Backend.MOSAIC else {}
        return named(shape.call(backend)(*arrays, layer=i % shape.layers, **how))

    return dataclasses.replace(in_bfloat16(shape.case()), operands=operands, call=call)


def in_bfloat16(case: Case) -> Case:
    """Returns a case whose products are bfloat16, whatever its cache is, for the choice of its roof."""
    return dataclasses.replace(case, key=("bfloat16",))


def roof_row(roofs: Roofs, device_kind: str) -> CaseResult:
    """Returns what was measured of the device, and where its data sheet is known the share of that."""
    words = re.split(r"[\s-]+", device_kind)
    peaks = next((peaks for name, peaks in PEAKS.items() if name in words), None)
    units = {COPY: ("copy GB/s", 1e9, "hbm"), BFLOAT16: ("bfloat16 TFLOP/s", 1e12, "bf16")}
    units[FP8] = ("FP8 TFLOP/s", 1e12, "fp8")
    figures = {}
    for name, value in roofs.items():
        title, unit, peak = units[name]
        figures[title] = value / unit
        if peaks is not None:
            figures[f"{title.split()[0]}, share of the data sheet"] = value / getattr(peaks, peak)
    return CaseResult("roof", True, device_kind, figures)


def kernel_row(timed: Timed, roofs: Roofs, backend: Backend) -> CaseResult:
    """Returns the row of a kernel: its time and rates, the share of the roof, and the goal."""
    row = measure_case(timed.case, roofs, backend)
    figures = {name: value for name, value in row.figures.items() if not name.endswith((".diff", ".largest"))}
    if timed.goal is not None:
        unit, value = timed.goal
        figures[f"goal on an H200, {unit}"] = value
    return CaseResult(timed.case.name, row.passed, row.says, figures)


def check_kind(kind: str, backend: Backend, measure: Callable[[Iterable[str]], Roofs] = measure_roofs) -> int:
    """Prints the rows of the roof and of a kind's kernels; returns the exit status of a check."""
    made, product = KINDS[kind]
    roofs: dict[str, float] = {}
    lost = failed = False

    def roof() -> CaseResult:
        roofs.update(measure((product,)))
        _log_clocks()
        return roof_row(roofs, jax.devices()[0].device_kind)

    def kernel(timed: Timed) -> CaseResult:
        nonlocal lost
        try:
            return kernel_row(timed, roofs, backend)
        except ContextLostError:
            lost = True
            raise

    if run_cases({"roof": roof}):
        return 1
    for timed in made(backend):
        failed |= bool(run_cases({timed.case.name: functools.partial(kernel, timed)}))
        if lost:
            break
    return int(failed)


def _log_clocks() -> None:
    """Logs clocks, power and what limits them, right after the device has computed."""
    try:
        print(query("-q", "-d", "CLOCK,POWER,PERFORMANCE"), file=sys.stderr)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Lists the kinds, or times one; returns the exit status of a check."""
    args = parse_name(argv, "fast", KINDS)
    backend = resolve_backend(jax.devices()[0])
    if backend not in (Backend.MOSAIC, Backend.TRITON):
        print("kernels are timed only on a GPU that has kernels of its own", file=sys.stderr)
        return 2
    if args.list:
        print(*KINDS, sep="\n")
        return 0
    configure_logging()
    prepare(backend)
    return check_kind(args.name, backend)


if __name__ == "__main__":
    sys.exit(main())
