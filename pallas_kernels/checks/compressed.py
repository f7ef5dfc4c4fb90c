"""Compressed attention: rows of a window and of entries, listed per query, and entries that a step completes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.checks.attention import OUT_OF_RANGE
from pallas_kernels.checks.case import BFLOAT16, EXACT, Case
from pallas_kernels.compressed import RowList, attend_compressed
from pallas_kernels.entries import Given, PoolSizes, StepTokens, complete_entries, encode_rows

WIDTH, PLAIN, WINDOW = 512, 448, 128
RING, PAGE = 136, 64
"""Rows of a page of the window, and of a page of entries, at DeepSeek-V4's sizes."""
SCALE = WIDTH**-0.5
ENTRIES = (((0, 0, 1, *(512,) * 125), 64), ((0, 1023, *(1024,) * 62), 128), ((0, 1, 896, 897, 8192), 64))
"""(entries of each query, heads), as V4-Flash, V4-Pro and their heavy layers list."""


def attend_case(entries: tuple[int, ...], heads: int, fp8: bool) -> Case:
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
        q, sink = arrays.normal(q_key, N, heads, WIDTH), jax.random.normal(sink_key, (1, heads), jnp.float32)
        return {"q": q, "sink": sink, "own": made[2], "window": lists[0], "entries": lists[1]}

    def poisoned(operands: dict[str, Any], i: Any) -> dict[str, Any]:
        def only(array: jax.Array, rows: np.ndarray) -> jax.Array:
            flat, bad = array.reshape(-1, width), jnp.asarray(255 if fp8 else jnp.nan, dtype)
            return jnp.full_like(flat, bad).at[rows].set(flat[rows]).reshape(array.shape)

        bad = {
            n: dataclasses.replace(operands[n], array=only(operands[n].array, r))
            for n, r in zip(("window", "entries"), listed, strict=False)
        }
        return operands | bad | {"own": only(operands["own"], listed[2])}

    def call(operands: dict[str, Any], i: Any, backend: Backend) -> jax.Array:
        return attend_compressed(
            **operands | {"q": arrays.anew(operands["q"], i)}, scale=SCALE, plain=PLAIN, backend=backend
        )

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


def encode_case(rows: int, width: int) -> Case:
    """Returns latents of DeepSeek-V4 as FP8 rows."""
    plain = width - 64

    def call(operands: jax.Array, i: Any, backend: Backend) -> jax.Array:
        return encode_rows(arrays.anew(operands, i), plain, jnp.uint8, backend=backend)

    return Case(
        f"{rows} x {width}, {plain} in FP8", lambda key: arrays.normal(key, rows, width), call, {"out": EXACT},
        bytes=3 * rows * width,
    )  # fmt: skip


def complete_case(requests: int, ratio: int, width: int) -> Case:
    """Returns the entries that one token of each request completes or not; odd requests have begun another page."""
    page, layers, rotated, rng = 256, 2, 64, np.random.default_rng(0)
    overlaps, is_key = ratio == 4, width == 128
    position = page + ratio * np.where(np.arange(requests) % 2, 1, page // ratio) - 1 - np.arange(requests) % 3 % 2
    done, ring = np.flatnonzero((position + 1) % ratio == 0), 2 * ratio + 8
    channels = (1 + overlaps) * width
    sizes = PoolSizes(2 * requests, 2 * requests, requests, page)
    pages, windows = (rng.permutation(2 * requests).reshape(requests, 2).astype(np.int32) for _ in range(2))
    slots = rng.permutation(requests).astype(np.int32)
    rows = ratio * (position[done, None] // ratio) + np.arange(-ratio if overlaps else 0, ratio)
    each, contexts = done[:, None], position[done, None]

    def operands(key: jax.Array) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 5))
        shapes = {"own": (requests, 2 * channels), "position": (layers, ratio, channels)}
        shapes |= {"parts": (layers * requests, ring, 2 * channels), "tails": (2 * layers * requests, ratio, 2 * width)}
        made = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
        return made | {"norm": arrays.normal(next(keys), layers, width)}

    def reference(operands: dict[str, Any], i: Any) -> jax.Array:
        layer = i % layers
        added = operands["own"].at[:, channels:].add(operands["position"][layer, position % ratio])
        kept = operands["parts"][layer * requests + slots[each], rows % ring]
        values, scores = jnp.split(jnp.where((rows == contexts)[..., None], added[each], kept), 2, axis=-1)
        if overlaps:
            earlier = (np.arange(2 * ratio) < ratio)[:, None]
            values, scores = (jnp.where(earlier, a[..., :width], a[..., width:]) for a in (values, scores))
            at = layer * sizes.window_pages + windows[each, rows // page]
            tail, tail_scores = jnp.split(operands["tails"][at, rows % ratio], 2, axis=-1)
            in_tail = (rows < contexts // page * page)[..., None]
            values, scores = jnp.where(in_tail, tail, values), jnp.where(in_tail, tail_scores, scores)
        made = (jax.nn.softmax(scores, axis=1) * values).sum(1)
        return made * jax.lax.rsqrt(jnp.mean(made * made, -1, keepdims=True) + 1e-6) * operands["norm"][layer]

    def call(operands: dict[str, Any], i: Any, backend: Backend) -> jax.Array:
        if backend not in (Backend.MOSAIC, Backend.TRITON):
            return reference(operands, i).astype(jnp.bfloat16)
        ints = functools.partial(jnp.asarray, dtype=jnp.int32)
        given = arrays.anew(operands, i)
        tokens = StepTokens(
            ints(np.arange(requests)), ints(position), ints(np.arange(requests)), ints(position), ints(position + 1),
            ints(slots), ints(pages), ints(windows),
        )  # fmt: skip
        tails = given["tails"] if overlaps else None
        entries = jnp.zeros((layers * sizes.pages, page // ratio, width), jnp.bfloat16)
        by = [jnp.ones((requests, rotated // 2)), jnp.zeros((requests, rotated // 2))]
        written = complete_entries(
            entries, Given(given["own"], given["position"], given["parts"], tails), given["norm"], i % layers, tokens,
            *by, sizes=sizes, eps=1e-6, is_key=is_key, backend=backend,
        )  # fmt: skip
        number = position[done] // ratio * ratio
        return written[i % layers * sizes.pages + pages[done, number // page], number % page // ratio]

    name = f"{len(done)} of {requests} requests, {width} values of {ratio} tokens{' twice' if overlaps else ''}"
    return Case(name, operands, call, {"out": BFLOAT16}, reference=reference, bytes=8.0 * channels * rows.size)


def _lists(rng: np.random.Generator, rows: int, counts: np.ndarray, most: int) -> np.ndarray:
    """Returns numbers int32 `[N, most]` of other rows for each query; out of range where a list has ended."""
    numbers, order = np.full((len(counts), most), OUT_OF_RANGE, np.int32), rng.permutation(rows)
    for query, (first, count) in enumerate(zip(np.cumsum(counts) - counts, counts, strict=True)):
        numbers[query, :count] = order[first : first + count]
    return numbers
