"""Compressed attention: rows of a window and of entries, listed per query. NaN in every row that no list names."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.checks.attention import OUT_OF_RANGE
from pallas_kernels.checks.case import BFLOAT16, Case
from pallas_kernels.compressed import RowList, attend_compressed, encode_rows

WIDTH, PLAIN, WINDOW = 512, 448, 128
RING, PAGE = 136, 64
"""Rows of a page of the window, and of a page of entries, at DeepSeek-V4's sizes."""
SCALE = WIDTH**-0.5


def attend_compressed_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields queries without rows, with few, and with as many as V4-Flash, V4-Pro and their heavy layers list."""
    del backend
    for fp8 in (False, True):
        if quick:
            yield attend_case((0, 1, 64, 200), heads=16, fp8=fp8)
        else:
            yield attend_case((0, 0, 1, *(512,) * 125), heads=64, fp8=fp8)
            yield attend_case((0, 1023, *(1024,) * 62), heads=128, fp8=fp8)
            yield attend_case((0, 1, 896, 897, 8192), heads=64, fp8=fp8)


def attend_case(entries: tuple[int, ...], *, heads: int, fp8: bool) -> Case:
    """Returns attention of one query per number of entries. The first sees nothing, the others up to 128 tokens."""
    N, rng = len(entries), np.random.default_rng(0)
    seen = np.minimum(50 * np.arange(N), WINDOW), np.asarray(entries)
    seen[1][0] = 0
    sizes = N * RING, PAGE * (1 + -(-int(seen[1].sum()) // PAGE)), N
    numbers = _lists(rng, sizes[0], seen[0], WINDOW), _lists(rng, sizes[1], seen[1], max(entries))
    numbers[0][1:, 0] = -1 - np.arange(1, N)  # the query's own token
    listed = (*(np.unique(each[(each >= 0) & (each < OUT_OF_RANGE)]) for each in numbers), np.arange(1, N))
    width, dtype = (584, jnp.uint8) if fp8 else (WIDTH, jnp.bfloat16)

    def operands(key: jax.Array) -> dict[str, Any]:
        q_key, sink_key, *keys = jax.random.split(key, 5)
        made = [encode_rows(arrays.small(k, (size, WIDTH)), PLAIN, dtype) for k, size in zip(keys, sizes, strict=True)]
        lists = [
            RowList(array.reshape(-1, rows, width), jnp.asarray(number), jnp.asarray(count, jnp.int32))
            for array, rows, number, count in zip(made[:2], (RING, PAGE), numbers, seen, strict=True)
        ]
        q, sink = arrays.normal(q_key, N, heads, WIDTH), jax.random.normal(sink_key, (heads,), jnp.float32)
        return {"q": q, "sink": sink, "own": made[2], "window": lists[0], "entries": lists[1]}

    def poisoned(operands: dict[str, Any], i: Any) -> dict[str, Any]:
        def only(array: jax.Array, rows: np.ndarray) -> jax.Array:
            flat, bad = array.reshape(-1, width), jnp.asarray(255 if fp8 else jnp.nan, dtype)
            return jnp.full_like(flat, bad).at[rows].set(flat[rows]).reshape(array.shape)

        bad = {n: operands[n]._replace(array=only(operands[n].array, r)) for n, r in zip(_LISTS, listed, strict=False)}
        return operands | bad | {"own": only(operands["own"], listed[2])}

    def call(operands: dict[str, Any], i: Any, backend: Backend) -> jax.Array:
        q, _ = jax.lax.optimization_barrier((operands["q"], i))  # else a loop of calls would compute it once
        return attend_compressed(**operands | {"q": q}, scale=SCALE, plain=PLAIN, backend=backend)

    rows = int(seen[0].sum() + seen[1].sum())
    named = ", ".join(map(str, dict.fromkeys(entries)))
    return Case(
        f"{named} entries, {N} queries, {heads} heads{', FP8 rows' if fp8 else ''}",
        operands,
        call,
        {"out": BFLOAT16},
        poisoned=poisoned,
        flops=4.0 * heads * rows * WIDTH,
        bytes=rows * width * jnp.dtype(dtype).itemsize + 4.0 * N * heads * WIDTH,
        key=("bfloat16",),
    )


_LISTS = ("window", "entries")


def _lists(rng: np.random.Generator, rows: int, counts: np.ndarray, most: int) -> np.ndarray:
    """Returns numbers int32 `[N, most]` of other rows for each query; out of range where a list has ended."""
    numbers, order = np.full((len(counts), most), OUT_OF_RANGE, np.int32), rng.permutation(rows)
    for query, (first, count) in enumerate(zip(np.cumsum(counts) - counts, counts, strict=True)):
        numbers[query, :count] = order[first : first + count]
    return numbers
