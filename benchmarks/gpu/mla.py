"""MLA attention on a GPU, in one run: correctness, FlashMLA's table, prefill, cache write, and the tunables.

    python -m benchmarks.gpu.mla --out DIR                       on a Hopper GPU; under nine minutes
    JAX_PLATFORMS=cpu python -m benchmarks.gpu.mla --compile     without one: registers and spills

Writes DIR/mla.md (the tables) and DIR/mla.json (the same, and the best setting of each tuned shape). A figure is the
median of many runs with the L2 cache flushed before each; times are CUPTI's, summed over the operation's kernels.
Accounting is FlashMLA's: flop = b * h * s_q * 2 * length * (576 + 512), bytes = queries + cached rows + output. Every
rate stands next to what the same run measured for a copy, for a bfloat16 product of 8192^3, and for the best plain XLA
formulation. What is wrong is not timed.
"""

import argparse
import datetime
import functools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import mla_cases as cases
from benchmarks.gpu.device_time import Flushed, median_ms
from benchmarks.gpu.mla_cases import Decode, Prefill, Write
from pallas_kernels import aot
from pallas_kernels.backend import Backend, is_hopper

DECODE_COSINE, PREFILL_COSINE = 5e-6, 1e-5  # FlashMLA's; of two bfloat16 results
WRITE_ERROR = 2**-7  # a bfloat16 that is rounded twice


def main() -> int:
    args = _arguments()
    if args.compile:
        return compile_all()
    device = jax.devices()[0]
    if not is_hopper(device):
        print(
            f"This benchmark needs a Hopper GPU (sm_90); the device here is {device.device_kind!r}. Nothing was run.\n"
            "Without a GPU, --compile checks registers and spills.",
            file=sys.stderr,
        )
        return 2
    run = Run(device, time.monotonic() + 60 * args.minutes, args.out)
    run.roofs()
    for part in (  # what matters most comes first, should time run out
        functools.partial(run.edge_cases, cases.edge_cases()),
        functools.partial(run.decode_table, cases.first_decode_cases()),
        functools.partial(run.prefill_table, cases.PREFILLS),
        functools.partial(run.write_table, cases.WRITES),
        functools.partial(run.tune_decode, cases.tuned_decode_cases()),
        functools.partial(run.tune_prefill, cases.PREFILLS[1:3]),
        functools.partial(run.context_table, cases.CONTEXTS),
        functools.partial(run.decode_table, cases.other_decode_cases()),
    ):
        part()
        run.write()
    return 1 if run.failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/mla"), help="folder for the tables")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit; later rows are left out, and said so")
    parser.add_argument(
        "--compile", action="store_true", help="compile the kernels for an H200 and gate their resources"
    )
    return parser.parse_args()


class Run:
    """What one run has measured."""

    def __init__(self, device: jax.Device, deadline: float, out: Path, backend: Backend = Backend.MOSAIC):
        self.device, self.deadline, self.out, self.backend = device, deadline, out, backend
        self.copy_rate = self.matrix_rate = math.nan
        self.tables: dict[str, list[dict]] = {}
        self.best: dict[str, dict] = {}
        self.failures: list[str] = []
        self.left_out: list[str] = []

    def roofs(self, floats: int = 1 << 28, side: int = 8192) -> None:
        """Copy bandwidth in bytes/s and the bfloat16 rate of XLA's own product in flop/s."""
        x = jnp.zeros(floats, jnp.float32)
        self.copy_rate = 2 * x.nbytes / (median_ms(lambda x: x + 1, x) / 1e3)
        square = cases.random(jax.random.key(0), (side, side))
        self.matrix_rate = 2 * side**3 / (median_ms(lambda x: x @ x, square) / 1e3)
        print(self.header(), flush=True)

    def header(self) -> str:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        return (
            f"{now}; {self.device.device_kind}; jax {jax.__version__}; {self.device.client.platform_version!r}\n"
            f"command: python -m benchmarks.gpu.mla {shlex.join(sys.argv[1:])}\n\n"
            f"Measured in this run: copy {self.copy_rate / 1e12:.2f} TB/s; bfloat16 8192^3 "
            f"{self.matrix_rate / 1e12:.0f} TFLOP/s."
        )

    def edge_cases(self, rows: Iterable[Decode]) -> None:
        """Lengths around a page, empty requests, odd head counts, split requests; NaN wherever nothing was written."""
        for case in self.in_time(rows):
            q, pages, table, _ = case.arrays()
            lengths = jnp.asarray([0, 1, 63, 64, 65, case.length], jnp.int32)
            pages = cases.poison_tails(pages, table, lengths, 0xFF if case.fp8 else jnp.nan)
            self.decodes(f"edge cases, {case.label()}", case, (q, pages, table, lengths))

    def decode_table(self, rows: Iterable[Decode]) -> None:
        for case in self.in_time(rows):
            arrays = case.arrays()
            if not self.decodes(f"decode {case.label()}", case, arrays):
                continue
            schedule = jax.jit(case.schedule)(arrays[3])
            kernel = median_ms(case.call(self.backend), *arrays, schedule)
            plain = min(median_ms(f, *arrays, runs=5) for f in cases.plain_formulations(case))
            row = {"heads | s_q | length | kind": case.label(), **self.rates(kernel, case.flops())}
            row |= {
                "GB/s": f"{case.bytes() / kernel / 1e6:.0f}",
                "of the copy's": f"{case.bytes() / kernel * 1e3 / self.copy_rate:.0%}",
                "schedule us (once a step)": f"{median_ms(case.schedule, arrays[3]) * 1e3:.1f}",
                "plain XLA us": f"{plain * 1e3:.0f}",
            }
            self.add("decode", row)

    def prefill_table(self, rows: Iterable[Prefill]) -> None:
        for case in self.in_time(rows):
            arrays, kernel = case.arrays(), case.call(self.backend)
            if not self.agrees(f"prefill {case.label()}", kernel, case.call(Backend.REFERENCE), arrays):
                continue
            plain = min(median_ms(f, *arrays, runs=5) for f in cases.plain_prefills(case))
            kernel_ms = median_ms(kernel, *arrays)
            row = {"batch": case.label(), **self.rates(kernel_ms, case.flops())}
            self.add(f"prefill, {case.heads} heads", row | {"plain XLA us": f"{plain * 1e3:.0f}"})

    def context_table(self, rows: Iterable[Prefill]) -> None:
        """The absorbed form, next to the expanded one: new tokens' own pairs are in the latter alone."""
        for case in self.in_time(rows):
            arrays, kernel = case.context_arrays(), case.call_context(self.backend)
            if not self.agrees(f"context {case.label()}", kernel, case.call_context(Backend.REFERENCE), arrays):
                continue
            row = {"batch": case.label(), **self.rates(median_ms(kernel, *arrays, runs=5), case.context_flops())}
            del arrays
            groups, arrays, kernel = case.heads // case.heads_at_once, case.expanded_arrays(), case.call_expanded
            reference, kernel = kernel(Backend.REFERENCE), kernel(self.backend)
            good = self.agrees(f"expanded {case.label()}", kernel, reference, arrays)
            row["expanded us"] = f"{groups * median_ms(kernel, *arrays, runs=5) * 1e3:.0f}" if good else "wrong"
            row["groups of heads"] = str(groups)
            self.add(f"new tokens to cached ones, absorbed, {case.heads} heads", row)

    def write_table(self, rows: Iterable[Write]) -> None:
        for case in self.in_time(rows):
            arrays, calls = case.arrays(), case.calls(self.backend)
            expected = np.asarray(jax.jit(calls["XLA"])(*arrays), np.float32)
            row = {"tokens": str(case.tokens)}
            for name, call in calls.items():
                error = np.abs(np.asarray(jax.jit(call)(*arrays), np.float32) - expected)
                worst = {"relative": float((error / np.maximum(np.abs(expected), 1e-6)).max())}
                good = self.passed(f"write {case.tokens}, {name}", worst, {"relative": WRITE_ERROR})
                row[f"{name}, us"] = f"{median_ms(call, *arrays, donate=True) * 1e3:.1f}" if good else "wrong"
            self.add("norm, rotate and write the cache", row)

    def tune_decode(self, shapes: Iterable[Decode]) -> None:
        """Splits of the work over thread blocks. The number of parts is compiled in, the overhead of a request not."""
        for case in self.in_time(shapes):
            arrays, times = case.arrays(), {}
            expected = jax.jit(functools.partial(cases.oracle, case.fp8))(*arrays)
            call = case.call(self.backend)
            check, timer = jax.jit(call), Flushed(call)
            for split in cases.SPLITS:
                schedule = jax.jit(functools.partial(case.schedule, split=split))(arrays[3])
                difference = cases.largest_difference(check(*arrays, schedule), expected)
                if self.passed(f"decode {case.label()}, {split}", difference, limits(DECODE_COSINE)):
                    setting = f"{split.waves} waves, overhead {split.request_overhead}"
                    times[setting] = timer.median_ms(*arrays, schedule)
            self.choose(f"decode {case.label()}", times)

    def tune_prefill(self, shapes: Iterable[Prefill]) -> None:
        for case in self.in_time(shapes):
            arrays, times = case.arrays(), {}
            for tile in cases.PREFILL_TILES:
                name, call = f"{tile[0]} keys, {tile[1]} stages", case.call(self.backend, tile)
                if self.agrees(f"prefill {case.label()}, {name}", call, case.call(Backend.REFERENCE), arrays):
                    times[name] = median_ms(call, *arrays)
            self.choose(f"prefill {case.label()}", times)

    def choose(self, shape: str, times: dict[str, float]) -> None:
        """Notes every setting's time and the best."""
        if times:
            best = min(times, key=times.__getitem__)
            self.best[shape] = {"setting": best, "us": times[best] * 1e3, "all": times}
            measured = ", ".join(f"{name}: {ms * 1e3:.1f}" for name, ms in times.items())
            self.add("tuning", {"shape": shape.replace(" | ", ", "), "best": best, "us": measured})

    def rates(self, ms: float, flops: float) -> dict[str, str]:
        share = f"{flops / ms * 1e3 / self.matrix_rate:.0%}"
        return {"us": f"{ms * 1e3:.1f}", "TFLOP/s": f"{flops / ms / 1e9:.0f}", "of the product's": share}

    def decodes(self, name: str, case: Decode, arrays: tuple[jax.Array, ...]) -> bool:
        """Whether the kernel agrees with float32 attention."""
        got = jax.jit(case.call(self.backend))(*arrays, jax.jit(case.schedule)(arrays[3]))
        expected = jax.jit(functools.partial(cases.oracle, case.fp8))(*arrays)
        return self.passed(name, cases.largest_difference(got, expected), limits(DECODE_COSINE))

    def agrees(self, name: str, call: Callable, reference: Callable, arrays: tuple[jax.Array, ...]) -> bool:
        difference = cases.largest_difference(jax.jit(call)(*arrays), jax.jit(reference)(*arrays))
        return self.passed(name, difference, limits(PREFILL_COSINE))

    def passed(self, name: str, difference: dict[str, float], limits: dict[str, float]) -> bool:
        good = all(difference[key] <= limit for key, limit in limits.items())
        if not good:
            self.failures.append(f"{name}: {difference}")
        print("correct" if good else "WRONG", name, difference, flush=True)
        return good

    def in_time(self, rows: Iterable) -> Iterator:
        """The rows there is time for; the others are noted."""
        for row in rows:
            if self.deadline - time.monotonic() < 30:
                self.left_out.append(str(row))
            else:
                yield row

    def add(self, table: str, row: dict[str, str]) -> None:
        self.tables.setdefault(table, []).append(row)
        print(table, row, flush=True)

    def write(self) -> None:
        lines = [self.header(), ""]
        for table, rows in self.tables.items():
            columns = " | ".join(rows[0])
            lines += [f"## {table}", "", f"| {columns} |", "|" + "---|" * (columns.count("|") + 1)]
            lines += [f"| {' | '.join(row.values())} |" for row in rows] + [""]
        lines += ["Wrong: " + failure for failure in self.failures]
        lines += ["Left out for lack of time: " + what for what in self.left_out]
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "mla.md").write_text("\n".join(lines) + "\n")
        record = {"header": self.header(), "tables": self.tables, "best": self.best, "wrong": self.failures}
        (self.out / "mla.json").write_text(json.dumps(record | {"left_out": self.left_out}, indent=1))


def limits(cosine: float) -> dict[str, float]:
    """FlashMLA's limits, as `largest_difference` measures."""
    return {"cosine": cosine, "out": 1.0, "lse": 1.0, "infinities": 0.0}


def programs() -> Iterator[tuple[str, Callable, tuple]]:
    """Name, function and argument shapes of one program for each kernel and setting a run needs."""
    narrow = [case for case in cases.edge_cases() if case.latent != cases.LATENT]
    decodes = [*cases.first_decode_cases(), *cases.other_decode_cases(), *narrow]
    for case in {(c.heads, c.queries, c.fp8, c.latent): c for c in decodes}.values():
        for split in cases.SPLITS[:: len(cases.SPLITS) // 2]:
            schedule = jax.eval_shape(functools.partial(case.schedule, split=split), case.shapes()[3])
            yield f"decode {case.label()}, {split.waves} waves", case.call(Backend.MOSAIC), (*case.shapes(), schedule)
    for tile in cases.PREFILL_TILES:
        prefill = cases.PREFILLS[1]
        yield f"prefill {prefill.label()}, {tile}", prefill.call(Backend.MOSAIC, tile), prefill.shapes()
    for context in cases.CONTEXTS[:1]:
        yield f"context {context.label()}", context.call_context(Backend.MOSAIC), context.context_shapes()
        yield f"expanded {context.label()}", context.call_expanded(Backend.MOSAIC), context.expanded_shapes()
    for name, call in cases.WRITES[0].calls(Backend.MOSAIC).items():
        yield f"write, {name}", call, cases.WRITES[0].shapes()


def compile_all() -> int:
    """Compiles the programs for an H200 and prints their kernels' registers and spills; 1 if one spills."""
    spilled = 0
    for name, call, shapes in programs():
        for kernel in aot.kernel_resources(call, *shapes):
            spilled += kernel.spill_bytes > 0
            print(
                f"{name}: {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled", flush=True
            )
    print(f"{spilled} kernels spill")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
