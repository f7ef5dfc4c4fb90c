"""What the Triton kernels take of each GPU, compiled without one: registers, spills and shared memory.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu.triton_kernels [--gpu 86,120] [--only decode]

Compiles every kernel at DeepSeek-V3's and V4's shapes for every compute capability of `pallas_kernels/gpus.py`:
registers x warps, KiB of shared memory. Exits with 1 if a kernel spills, or does not fit the shared memory of a
program. It says nothing of speed: no GPU has run these kernels.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.record import Report, arguments, run
from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.compressed import RowList, attend_compressed
from pallas_kernels.dense import head_gemm, layer_gemm
from pallas_kernels.dsa import key_row
from pallas_kernels.dsa.attend import copy_rows
from pallas_kernels.dsa.topk import raw_scores, select_in_kernel
from pallas_kernels.float8 import E4M3
from pallas_kernels.fp8 import fp8_gemm, swiglu_quantize
from pallas_kernels.grouped import fp4_grouped_gemm_contiguous, fp8_grouped_gemm_contiguous, grouped_gemm_contiguous
from pallas_kernels.mla import (
    fp8_row_bytes,
    mla_decode,
    mla_prefill,
    mla_prefill_context,
    mla_prefill_topk,
    write_pages,
)
from pallas_kernels.triton.resources import TritonResources, kernel_resources

type Case = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]
TRITON = Backend.TRITON
PAGES, TABLE = 256, 64
"""Pages of a layer, and of the longest request."""
_LONG_TABLE, _BEST = 2560, 2048
"""Pages of the longest request of DeepSeek-V3.2, and the tokens that are chosen."""


def main(report: Report) -> int:
    args = arguments(__doc__, gpu=None, only="", processes=2)
    kinds = [gpus.by_number(int(each)) for each in (args.gpu or "").split(",") if each] or list(gpus.KINDS)
    names = [name for name in cases() if not args.only or args.only in name]
    with ProcessPoolExecutor(args.processes) as pool:
        rows = pool.map(_compile, [name for name in names for _ in kinds], [k.number for _ in names for k in kinds])
        lines = ([name, *(_cell(next(rows), kind) for kind in kinds)] for name in names)
        table = report.table("Kernels", ["kernel", *(kind.architecture for kind in kinds)], lines)
    wrong = sum("**" in str(cell) for row in table.rows for cell in row)
    print(f"{wrong} of {len(names) * len(kinds)} spill or do not fit", file=sys.stderr)
    return 1 if wrong else 0


def cases() -> dict[str, Case]:
    """Returns the operations by name, with shapes of DeepSeek-V3 or V4 and bfloat16 but where FP8 is meant."""
    return dict([*_attention(), *_products(), *_rows(), *_sparse(), *_compressed()])


def _attention() -> Iterator[tuple[str, Case]]:
    place = {"scale": 0.1, "pages_per_layer": PAGES, "backend": TRITON}
    table, lengths = _array(64, TABLE, dtype=jnp.int32), _array(64, dtype=jnp.int32)
    for heads, queries in ((128, 1), (16, 1), (16, 4)):
        decode = functools.partial(mla_decode, **place)
        q = _array(64, queries, heads, 576)
        yield f"decode, {heads} heads, {queries} rows", (decode, (q, _array(2 * PAGES, 64, 576), table, lengths))
    fp8 = _array(2 * PAGES, 64, fp8_row_bytes(512, 64), dtype=jnp.uint8)
    yield "decode, 128 heads, FP8 pages", (decode, (_array(64, 1, 128, 576), fp8, table, lengths))
    narrow = functools.partial(mla_decode, value_width=256, **place)
    yield "decode, latents of 256", (narrow, (_array(64, 1, 32, 320), _array(2 * PAGES, 64, 320), table, lengths))
    context = functools.partial(mla_prefill_context, **place)
    arrays = _array(512, 128, 576), _array(2 * PAGES, 64, 576), table, lengths, _array(65, dtype=jnp.int32)
    yield "context, 128 heads", (context, arrays)
    prefill = functools.partial(mla_prefill, scale=0.1, backend=TRITON)
    for keys, values in ((192, 128), (256, 256), (128, 128)):
        arrays = (*(_array(4096, 16, width) for width in (keys, keys, values)), _array(9, dtype=jnp.int32))
        yield f"prefill, heads of {keys} and {values}", (prefill, arrays)
    for own, values in ((128, 128), (192, 256)):
        yield f"prefill to top-k keys, heads of {own + 64} and {values}", _chosen(own, values)


def _chosen(own: int, values: int) -> Case:
    """Returns masked attention of 4,096 tokens to 12,288, with 16 heads of `own` columns and 64 shared ones."""
    T, K = 4096, 12288

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, shared: jax.Array, *where: jax.Array) -> jax.Array:
        return mla_prefill_topk(q, k, v, *where, scale=0.1, shared_key=shared, backend=TRITON)

    arrays = _array(T, 16, own + 64), _array(K, 16, own), _array(K, 16, values), _array(K, 64)
    return attend, (*arrays, *(_array(*shape, dtype=jnp.int32) for shape in ((K // 32, T), (T,), (T,))))


def _products() -> Iterator[tuple[str, Case]]:
    dense = functools.partial(fp8_gemm, backend=TRITON)
    for rows in (1, 64, 4096):
        yield f"FP8, {rows} rows, 4096 x 7168", (dense, (*_fp8(rows, 7168), *_fp8_weight(4096, 7168)))
    for tile_m in (16, 64, 128):
        grouped = functools.partial(fp8_grouped_gemm_contiguous, tile_m=tile_m, backend=TRITON)
        arrays = (*_fp8(32 * tile_m, 7168), *_fp8_weight(8, 4096, 7168), _array(32, dtype=jnp.int32))
        yield f"FP8 experts, tiles of {tile_m}", (grouped, arrays)
    for tile_m in (16, 64):
        four_bit = functools.partial(fp4_grouped_gemm_contiguous, tile_m=tile_m, backend=TRITON)
        arrays = (_array(8 * tile_m, 4096), _array(4, 4096, 512, dtype=jnp.uint32), _array(4, 128, 4096))
        yield f"FP4 experts, tiles of {tile_m}", (four_bit, (*arrays, _array(8, dtype=jnp.int32)))
    plain = functools.partial(grouped_gemm_contiguous, tile_m=128, backend=TRITON)
    arrays = _array(512, 7168), _array(8, 4096, 7168), _array(4, dtype=jnp.int32)
    yield "bfloat16 experts, tiles of 128", (plain, arrays)
    router = functools.partial(layer_gemm, layer=1, out_dtype=jnp.float32, backend=TRITON)
    yield "router, 64 rows, float32 result", (router, (_array(64, 7168), _array(4, 256, 7168)))
    for transposed in (True, False):
        heads = functools.partial(head_gemm, layer=1, transposed=transposed, backend=TRITON)
        arrays = _array(64, 128, 128 if transposed else 512), _array(4, 128, 128, 512)
        yield f"{'k_up' if transposed else 'v_up'} per head, 64 rows", (heads, arrays)


def _rows() -> Iterator[tuple[str, Case]]:
    yield "SwiGLU and quantization", (functools.partial(swiglu_quantize, backend=TRITON), (_array(4096, 4096),))
    write = functools.partial(write_pages, pages_per_layer=PAGES, backend=TRITON)
    places = _array(64, dtype=jnp.int32)
    yield "cache write", (write, (_array(2 * PAGES, 64, 576), _array(64, 576), places, places))


def _sparse() -> Iterator[tuple[str, Case]]:
    """Yields the parts of sparse attention at DeepSeek-V3.2's shapes: 64 queries that see up to 163,840 tokens each."""
    table, numbers = _array(64, _LONG_TABLE, dtype=jnp.int32), _array(64, dtype=jnp.int32)
    score = functools.partial(raw_scores, first_page=0, backend=TRITON)
    for name, dtype in (("FP8", None), ("bfloat16", jnp.bfloat16)):
        width, kind = key_row(128, dtype)
        keys = _array(2 * PAGES, 64, width, dtype=kind)
        q, weights = _array(64, 64, 128), _array(64, 64, dtype=jnp.float32)
        yield f"index scores, {name} keys", (score, (q, weights, keys, table, numbers))
    choose = functools.partial(select_in_kernel, topk=_BEST, backend=TRITON)
    scores = _array(64, 64 * _LONG_TABLE, dtype=jnp.float32)
    yield "choice of 2,048 tokens", (choose, (scores, numbers))
    copy = functools.partial(copy_rows, first_page=0, value_width=512, backend=TRITON)
    for name, width, kind in (("FP8", fp8_row_bytes(512, 64), jnp.uint8), ("bfloat16", 576, jnp.bfloat16)):
        pages, positions = _array(2 * PAGES, 64, width, dtype=kind), _array(64, _BEST, dtype=jnp.int32)
        yield f"copies of chosen rows, {name}", (copy, (pages, table, positions, numbers))


def _compressed() -> Iterator[tuple[str, Case]]:
    """Yields attention to rows of V4-Flash's window, and to the entries that V4-Flash and V4-Pro choose."""

    def attend(q: jax.Array, sink: jax.Array, own: jax.Array, window: RowList, entries: RowList) -> jax.Array:
        return attend_compressed(q, sink, own, window, entries, scale=0.1, plain=448, backend=TRITON)

    counts = _array(64, dtype=jnp.int32)
    for name, width, kind in (("bfloat16", 512, jnp.bfloat16), ("FP8", 584, jnp.uint8)):
        for heads, chosen in ((64, 512), (128, 1024), (16, 512)):
            lists = [
                RowList(_array(PAGES, rows, width, dtype=kind), _array(64, listed, dtype=jnp.int32), counts)
                for rows, listed in ((136, 128), (64, chosen))
            ]
            arrays = _array(64, heads, 512), _array(1, heads, dtype=jnp.float32), _array(64, width, dtype=kind)
            yield f"window and entries, {heads} heads, {name} rows", (attend, (*arrays, *lists))


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _fp8(rows: int, k: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return _array(rows, k, dtype=E4M3), _array(k // 128, rows, dtype=jnp.float32)


def _fp8_weight(*shape: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    *lead, n, k = shape
    return _array(*shape, dtype=E4M3), _array(*lead, n // 128, k // 128, dtype=jnp.float32)


def _compile(name: str, number: int) -> TritonResources:
    fn, arguments = cases()[name]
    (kernel,) = kernel_resources(fn, *arguments, gpu=gpus.by_number(number))
    return kernel


def _cell(kernel: TritonResources, gpu: gpus.GpuKind) -> str:
    """Writes registers, warps and KiB of shared memory, in bold where the kernel spills or does not fit."""
    text = f"{kernel.registers} x {kernel.warps}, {kernel.shared_memory / 1024:.0f}"
    if kernel.spilled_bytes:
        text += f", {kernel.spilled_bytes} B spilled"
    return text if not kernel.spilled_bytes and kernel.shared_memory <= gpu.shared_memory else f"**{text}**"


if __name__ == "__main__":
    run(main)
