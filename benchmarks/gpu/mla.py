"""MLA attention on a GPU, in one run: correctness at the measured shapes, then FlashMLA's table, prefill, cache write.

    python -m benchmarks.gpu.mla --out DIR          on a Hopper GPU; under nine minutes, the table's first rows first
    python -m benchmarks.gpu.mla --compile          without a GPU: registers and spills at every shape of the table

Writes DIR/mla.md (the tables) and DIR/mla.json. A figure is the median of many runs with the L2 cache flushed before
each; times are CUPTI's, summed over the operation's kernels. Accounting is FlashMLA's: flop = b * h * s_q * 2 * length
* (576 + 512), bytes = queries + cached rows + output. Every rate stands next to what the same run measured for a copy,
for a bfloat16 product of 8192^3, and for the better of two plain XLA formulations.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import aot, mla
from pallas_kernels.backend import Backend, is_hopper

SCALE = 0.1352338
BATCH, LATENT, WIDTH, PAGE = 128, 512, 576, 64
RUNS = 20
FLUSH_BYTES = 256 << 20  # five L2 caches


@dataclasses.dataclass(frozen=True)
class Decode:
    """A row of the decode table."""

    heads: int
    queries: int
    length: int
    variable: bool = False
    fp8: bool = False
    batch: int = BATCH

    def lengths(self) -> np.ndarray:
        """Fixed, or normal with a standard deviation of half the mean, as FlashMLA's script draws them."""
        if not self.variable:
            return np.full(self.batch, self.length, np.int32)
        drawn = np.random.default_rng(0).normal(self.length, self.length / 2, self.batch)
        return np.clip(drawn, self.queries, 2 * self.length).astype(np.int32)

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        pages = -(-self.lengths() // PAGE)
        pool = (int(pages.sum()), PAGE, mla.fp8_row_bytes(LATENT, WIDTH - LATENT) if self.fp8 else WIDTH)
        return (
            jax.ShapeDtypeStruct((self.batch, self.queries, self.heads, WIDTH), jnp.bfloat16),
            jax.ShapeDtypeStruct(pool, jnp.uint8 if self.fp8 else jnp.bfloat16),
            jax.ShapeDtypeStruct((self.batch, int(pages.max())), jnp.int32),
            jax.ShapeDtypeStruct((self.batch,), jnp.int32),
        )

    def arrays(self) -> tuple[jax.Array, ...]:
        """Random values; pages in random order, page tails random too, unused table entries out of range."""
        q_shape, pool_shape, table_shape, _ = (s.shape for s in self.shapes())
        lengths = self.lengths()
        used = np.arange(table_shape[1]) < -(-lengths // PAGE)[:, None]
        table = np.full(table_shape, 2147480000, np.int32)
        table[used] = np.random.default_rng(1).permutation(pool_shape[0])
        q = jax.jit(lambda key: random(key, q_shape))(jax.random.key(0))
        pages = jax.jit(lambda key: random(key, (*pool_shape[:2], WIDTH)))(jax.random.key(1))
        if self.fp8:
            pages = jax.jit(lambda x: mla.fp8_pages_of_rows(mla.pack_fp8(x, LATENT), LATENT))(pages)
        return q, pages, jnp.asarray(table), jnp.asarray(lengths)

    def call(self, backend: Backend) -> Callable:
        """(q, pages, table, lengths, schedule) -> out, lse. The schedule of a step serves all its layers."""
        pool = self.shapes()[1].shape[0]
        return lambda q, pages, table, lengths, schedule: mla.mla_decode(
            q, pages, table, lengths, scale=SCALE, pages_per_layer=pool, schedule=schedule, backend=backend
        )

    def schedule(self, lengths: jax.Array):
        return mla.decode_schedule(lengths, queries=self.queries, heads=self.heads)

    def flops(self) -> float:
        return 2.0 * self.heads * self.queries * int(self.lengths().sum()) * (WIDTH + LATENT)

    def bytes(self) -> float:
        q, pages = self.shapes()[:2]
        rows = int(self.lengths().sum()) * pages.shape[2] * pages.dtype.itemsize
        return rows + 2.0 * math.prod(q.shape) + 2.0 * math.prod(q.shape[:3]) * LATENT

    def label(self) -> str:
        kind = f"{'variable' if self.variable else 'fixed'}{', FP8 cache' if self.fp8 else ''}"
        return f"{self.heads} | {self.queries} | {self.length} | {kind}"


def random(key, shape):
    return jnp.clip(jax.random.normal(key, shape, jnp.bfloat16) / 10, -1, 1)


def decode_cases() -> list[Decode]:
    """The rows that matter most come first, should time run out."""
    lengths = (4096, 8192, 16384, 32768)
    first = [Decode(h, 1, n) for n in lengths for h in (128, 16)]
    rest = [Decode(h, s, n, v) for s, v, n, h in itertools.product((2, 1), (False, True), lengths, (128, 16))]
    return [*first, *(case for case in rest if case not in first), *(Decode(h, 1, 8192, fp8=True) for h in (128, 16))]


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
    run = Run(device, time.monotonic() + 60 * args.minutes, args.out)
    run.roofs()
    for part in (run.edge_cases, run.decode_table, run.prefill_table, run.write_table):
        part()
        run.write()
    return 1 if run.failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/mla"), help="folder for the tables")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit; later rows are left out, and said so")
    parser.add_argument("--compile", action="store_true", help="compile every shape for an H200 and gate its resources")
    return parser.parse_args()


class Run:
    """What one run has measured."""

    def __init__(self, device: jax.Device, deadline: float, out: Path, backend: Backend = Backend.MOSAIC):
        self.device, self.deadline, self.out, self.backend = device, deadline, out, backend
        self.copy_rate = self.matrix_rate = math.nan
        self.tables: dict[str, list[dict]] = {}
        self.failures: list[str] = []
        self.left_out: list[str] = []

    def roofs(self) -> None:
        """Copy bandwidth in bytes/s and the bfloat16 rate of XLA's own product in flop/s."""
        gigabyte = jnp.zeros(1 << 28, jnp.float32)
        self.copy_rate = 2 * gigabyte.nbytes / (median_ms(lambda x: x + 1, gigabyte) / 1e3)
        square = random(jax.random.key(0), (8192, 8192))
        self.matrix_rate = 2 * 8192**3 / (median_ms(lambda x: x @ x, square) / 1e3)
        print(self.header(), flush=True)

    def header(self) -> str:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        return (
            f"{now}; {self.device.device_kind}; jax {jax.__version__}; {self.device.client.platform_version!r}\n"
            f"command: python -m benchmarks.gpu.mla {shlex.join(sys.argv[1:])}\n\n"
            f"Measured in this run: copy {self.copy_rate / 1e12:.2f} TB/s; bfloat16 8192^3 "
            f"{self.matrix_rate / 1e12:.0f} TFLOP/s."
        )

    def edge_cases(self) -> None:
        """Lengths around a page, empty requests, odd head counts, split requests; NaN wherever nothing was written."""
        for heads, queries, fp8 in ((16, 1, False), (128, 2, False), (3, 4, False), (127, 1, False), (16, 1, True)):
            case = Decode(heads, queries, 20000, fp8=fp8, batch=7)
            q, pages, table, _ = case.arrays()
            lengths = jnp.asarray([0, 1, 63, 64, 65, 777, 20000], jnp.int32)
            pages = poison_tails(pages, table, lengths, 0xFF if fp8 else jnp.nan)
            self.check(f"edge cases, {case.label()}", case, (q, pages, table, lengths))

    def decode_table(self) -> None:
        for case in decode_cases():
            if self.short_of_time(30, case.label()):
                continue
            arrays = case.arrays()
            if not self.check(f"decode {case.label()}", case, arrays):
                continue
            schedule = jax.jit(case.schedule)(arrays[3])
            kernel = median_ms(case.call(self.backend), *arrays, schedule)
            plain = min(median_ms(f, *arrays, runs=5) for f in plain_formulations(case))
            row = {
                "heads | s_q | length | kind": case.label(),
                "us": f"{kernel * 1e3:.1f}",
                "TFLOP/s": f"{case.flops() / kernel / 1e9:.0f}",
                "of the product's": f"{case.flops() / kernel * 1e3 / self.matrix_rate:.0%}",
                "GB/s": f"{case.bytes() / kernel / 1e6:.0f}",
                "of the copy's": f"{case.bytes() / kernel * 1e3 / self.copy_rate:.0%}",
                "schedule us (once a step)": f"{median_ms(case.schedule, arrays[3]) * 1e3:.1f}",
                "plain XLA us": f"{plain * 1e3:.0f}",
            }
            self.add("decode", row)

    def prefill_table(self) -> None:
        for tokens, segments in ((4096, 1), (8192, 1), (8192, 8), (16384, 1)):
            name = f"{tokens} tokens in {segments}"
            if self.short_of_time(30, name):
                continue
            q, k, v = (random(jax.random.key(i), (tokens, 128, w)) for i, w in enumerate((192, 192, 128)))
            cu_lengths = jnp.arange(segments + 1, dtype=jnp.int32) * (tokens // segments)
            kernel = functools.partial(mla.mla_prefill, scale=SCALE, backend=self.backend)
            plain = functools.partial(mla.mla_prefill, scale=SCALE, backend=Backend.REFERENCE)
            diff = largest_difference(jax.jit(kernel)(q, k, v, cu_lengths), jax.jit(plain)(q, k, v, cu_lengths))
            if not self.passed(f"prefill {name}", diff):
                continue
            flops = (
                128 * segments * (tokens // segments) ** 2 * (192 + 128)
            )  # the causal half of 2 * n * n * (192 + 128)
            ms = median_ms(kernel, q, k, v, cu_lengths)
            row = {"batch": name, "us": f"{ms * 1e3:.0f}", "TFLOP/s": f"{flops / ms / 1e9:.0f}"}
            row["of the product's"] = f"{flops / ms * 1e3 / self.matrix_rate:.0%}"
            self.add("prefill, 128 heads", row | {"plain XLA us": f"{median_ms(plain, q, k, v, cu_lengths) * 1e3:.0f}"})

    def write_table(self) -> None:
        """The kernel after XLA's RMSNorm and RoPE, against everything in one XLA program."""
        pages = jnp.zeros((4096, PAGE, WIDTH), jnp.bfloat16)
        for tokens in (128, 4096):
            raw = random(jax.random.key(0), (tokens, WIDTH))
            places = np.random.default_rng(0).permutation(4096 * PAGE)[:tokens].astype(np.int32)
            page_ids, offsets = jnp.asarray(places // PAGE), jnp.asarray(places % PAGE)
            row = {"tokens": str(tokens)}
            for name, backend in (("kernel us", self.backend), ("XLA us", Backend.REFERENCE)):
                step = functools.partial(norm_rotate_write, backend=backend)
                row[name] = f"{median_ms(step, pages, raw, page_ids, offsets, donate=True) * 1e3:.1f}"
            self.add("norm, rotate and write the cache", row)

    def check(self, name: str, case: Decode, arrays: tuple[jax.Array, ...]) -> bool:
        got = jax.jit(case.call(self.backend))(*arrays, jax.jit(case.schedule)(arrays[3]))
        return self.passed(name, largest_difference(got, jax.jit(functools.partial(oracle, case.fp8))(*arrays)))

    def passed(self, name: str, difference: dict[str, float]) -> bool:
        """FlashMLA's limits. A row that fails is not timed."""
        limits = {"cosine": 5e-6, "out": 1.0, "lse": 1.0, "infinities": 0.0}
        good = all(difference[key] <= limit for key, limit in limits.items())
        if not good:
            self.failures.append(f"{name}: {difference}")
        print("correct" if good else "WRONG", name, difference, flush=True)
        return good

    def short_of_time(self, seconds: float, what: str) -> bool:
        short = self.deadline - time.monotonic() < seconds
        if short:
            self.left_out.append(what)
        return short

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
        record = {"header": self.header(), "tables": self.tables, "wrong": self.failures, "left_out": self.left_out}
        (self.out / "mla.json").write_text(json.dumps(record, indent=1))


def oracle(fp8: bool, q, pages, table, lengths):
    """Attention in float32, request by request, over the table's whole width."""
    S = q.shape[1]

    def request(args):
        q, ids, length = args
        rows = pages.at[jnp.minimum(ids, pages.shape[0] - 1)].get()
        rows = mla.unpack_fp8(mla.layout.fp8_rows_of_pages(rows, LATENT), LATENT, jnp.bfloat16) if fp8 else rows
        position = jnp.arange(ids.shape[0] * PAGE)
        rows = jnp.where((position < length)[:, None], rows.reshape(-1, WIDTH), 0).astype(jnp.float32)
        scores = jnp.einsum("shd,kd->shk", q.astype(jnp.float32), rows, precision="highest") * SCALE
        seen = position < length - (S - 1 - jnp.arange(S))[:, None, None]
        lse = jax.nn.logsumexp(jnp.where(seen, scores, -jnp.inf), axis=-1)
        empty = jnp.isneginf(lse)
        weights = jnp.where(seen, jnp.exp(scores - jnp.where(empty, 0, lse)[..., None]), 0)
        out = jnp.einsum("shk,kv->shv", weights, rows[:, :LATENT], precision="highest")
        return out, jnp.where(empty, jnp.inf, lse)

    return lax.map(request, (q, table, lengths))


def largest_difference(got, expected) -> dict[str, float]:
    """1 is FlashMLA's limit for `out` (8e-4 or 2.01 / 128 of the value) and `lse` (1e-6 or 8.01 / 65536)."""

    @jax.jit
    def compare(got, expected):
        (out, lse), (want_out, want_lse) = ([x.astype(jnp.float32) for x in side] for side in (got, expected))
        norm = jnp.maximum((out * out + want_out * want_out).sum(), 1e-30)
        both = jnp.isfinite(lse) & jnp.isfinite(want_lse)
        error = jnp.where(both, jnp.abs(jnp.where(both, lse, 0) - jnp.where(both, want_lse, 0)), 0)
        return {
            "cosine": jnp.abs(1 - 2 * (out * want_out).sum() / norm),
            "out": (jnp.abs(out - want_out) / (8e-4 + 2.01 / 128 * jnp.abs(want_out))).max(),
            "lse": (error / (1e-6 + 8.01 / 65536 * jnp.abs(jnp.where(both, want_lse, 0)))).max(),
            "infinities": (jnp.isfinite(lse) != jnp.isfinite(want_lse)).sum(),
        }

    return {name: float(value) for name, value in compare(got, expected).items()}


def poison_tails(pages, table, lengths, poison):
    """Sets every row past a request's length to `poison`, and every page no request uses."""
    rows = np.zeros(pages.shape[:2], bool)
    for ids, length in zip(np.asarray(table), np.asarray(lengths), strict=True):
        for index in range(-(-length // PAGE)):
            rows[ids[index], : length - index * PAGE] = True
    if pages.dtype != jnp.uint8:
        return jnp.where(jnp.asarray(rows)[..., None], pages, poison)
    order = mla.layout.fp8_page_bytes(LATENT, pages.shape[2])
    keep = np.zeros((pages.shape[0], order.size), bool)
    for place in range(PAGE):
        keep[:, order[place]] = rows[:, place, None]
    return jnp.where(jnp.asarray(keep.reshape(pages.shape)), pages, jnp.uint8(poison))


def plain_formulations(case: Decode) -> list[Callable]:
    """What XLA makes of the operation without a kernel: an online softmax over pages, and one large gather."""
    paged = case.call(Backend.REFERENCE)

    def gathered(q, pages, table, lengths):
        B, S = q.shape[:2]
        rows = pages.at[jnp.minimum(table, pages.shape[0] - 1)].get()
        if case.fp8:
            rows = mla.unpack_fp8(mla.layout.fp8_rows_of_pages(rows, LATENT), LATENT, q.dtype)
        rows = rows.reshape(B, -1, WIDTH)
        scores = jnp.einsum("bshd,bkd->bshk", q, rows, preferred_element_type=jnp.float32) * SCALE
        limit = lengths[:, None] - (S - 1 - jnp.arange(S))
        scores = jnp.where(jnp.arange(rows.shape[1]) < limit[:, :, None, None], scores, -jnp.inf)
        return jnp.einsum("bshk,bkv->bshv", jax.nn.softmax(scores).astype(q.dtype), rows[..., :LATENT])

    return [lambda *arrays: paged(*arrays, None), gathered]


def norm_rotate_write(pages, raw, page_ids, offsets, *, backend: Backend):
    """The cache rows of new tokens from the down-projection: RMSNorm, interleaved RoPE, write."""
    latent, rope = raw[:, :LATENT].astype(jnp.float32), raw[:, LATENT:].astype(jnp.float32)
    latent = latent * lax.rsqrt((latent * latent).mean(-1, keepdims=True) + 1e-6)
    angle = jnp.arange(raw.shape[0])[:, None] * 10000.0 ** (-jnp.arange(0, 64, 2) / 64)
    even, odd = rope[:, ::2], rope[:, 1::2]
    rotated = (even * jnp.cos(angle) - odd * jnp.sin(angle), even * jnp.sin(angle) + odd * jnp.cos(angle))
    rows = jnp.concatenate([latent, jnp.stack(rotated, -1).reshape(-1, 64)], 1).astype(pages.dtype)
    return mla.write_pages(pages, rows, page_ids, offsets, pages_per_layer=pages.shape[0], backend=backend)


def median_ms(fn: Callable, *arrays, runs: int = RUNS, donate: bool = False) -> float:
    """Median milliseconds of `fn` with the L2 cache flushed before each run; the flush's own time is taken off."""
    flush = jnp.zeros(FLUSH_BYTES // 4, jnp.float32)

    def flushed(flush, *arrays):
        flush, arrays = lax.optimization_barrier((flush + 1, arrays))
        return flush, fn(*arrays)

    with_flush = jax.jit(flushed, donate_argnums=(1,) if donate else ())
    alone = jax.jit(lambda flush: flush + 1)
    if donate:  # a donated array cannot be passed twice, so each run gets what the last one returned
        return _clocked_in_place(with_flush, alone, flush, arrays, runs)
    return max(_device_ms(with_flush, runs, flush, *arrays) - _device_ms(alone, runs, flush), 1e-6)


def _device_ms(fn: Callable, runs: int, *arrays) -> float:
    try:
        from jax.experimental.mosaic.gpu import profiler

        times: Any = profiler.measure(fn, aggregate=True, iterations=runs)(*arrays)[1]
        return statistics.median(times)
    except (ImportError, RuntimeError, TypeError, AttributeError) as error:
        print(f"no CUPTI ({error}); the host's clock instead, launches included", file=sys.stderr)
        return statistics.median(_clock(lambda: jax.block_until_ready(fn(*arrays))) for _ in range(runs + 1))


def _clocked_in_place(with_flush, alone, flush, arrays, runs: int) -> float:
    pages, rest = jnp.copy(arrays[0]), arrays[1:]
    calls = 50

    def loop() -> None:
        nonlocal pages
        for _ in range(calls):
            _, pages = with_flush(flush, pages, *rest)
        jax.block_until_ready(pages)

    def loop_alone() -> None:
        jax.block_until_ready([alone(flush) for _ in range(calls)][-1])

    loop()
    loop_alone()
    both = statistics.median(_clock(loop) for _ in range(runs // 4))
    return max(both - statistics.median(_clock(loop_alone) for _ in range(runs // 4)), 1e-6) / calls


def _clock(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def compile_all() -> int:
    """Compiles one case for each kernel the decode table needs; 1 if a bfloat16 kernel spills."""
    spilled = 0
    for case in {(c.heads, c.queries, c.fp8): c for c in decode_cases()}.values():
        q, pages, table, lengths = case.shapes()
        schedule = jax.eval_shape(case.schedule, lengths)
        for kernel in aot.kernel_resources(case.call(Backend.MOSAIC), q, pages, table, lengths, schedule):
            spilled += kernel.spill_bytes > 0 and not case.fp8
            print(f"{case.label()}: {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
