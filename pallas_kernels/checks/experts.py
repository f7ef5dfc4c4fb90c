"""Products of rows sorted by expert, and the sorting; NaN in padding and in unused weights."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.align import RowQueues, align_groups, aligned_rows, choose_tile_m, queue_rows
from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.checks.case import BFLOAT16, EXACT, FLOAT32, FP8_SUMS, Case, widened
from pallas_kernels.float8 import E4M3
from pallas_kernels.fp8 import quantize_1x128
from pallas_kernels.gemm import dispatch, shapes
from pallas_kernels.gemm.plan import WIDE_TILE_M, TilePlan
from pallas_kernels.grouped import (
    fp4_grouped_gemm_contiguous,
    fp8_grouped_gemm_contiguous,
    grouped_gemm_contiguous,
    int4_grouped_gemm_contiguous,
)
from pallas_kernels.routing import weighted_experts

INT4, FP4 = jnp.int32, jnp.uint32
"""Weights of four bits, by the type of their words."""

_PRODUCTS: dict[Any, Callable[..., jax.Array]] = {
    jnp.dtype(E4M3): fp8_grouped_gemm_contiguous,
    jnp.dtype(jnp.bfloat16): grouped_gemm_contiguous,
    jnp.dtype(INT4): int4_grouped_gemm_contiguous,
    jnp.dtype(FP4): fp4_grouped_gemm_contiguous,
}
_WEIGHTS: dict[Any, Callable[..., tuple[jax.Array, ...]]] = {
    jnp.dtype(E4M3): arrays.fp8_weights,
    jnp.dtype(jnp.bfloat16): lambda *shape: (arrays.normal(*shape),),
    jnp.dtype(INT4): arrays.int4_weights,
    jnp.dtype(FP4): arrays.fp4_weights,
}
_RAGGED = (5, 0, 1, 17)
"""Rows of the experts of a small case: one has none, one less than a tile."""
_MOST_RAGGED = (300, 0, 1, 17, 0, 128, 129, 64)


def fp8_grouped_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields experts of decode and of prefill, of DeepSeek-V3 and DeepGEMM's tests, and uneven ones."""
    if quick:
        yield decode_case(_RAGGED, 16, 192, 256, E4M3, backend, quick=True)
        yield contiguous_case(2, 256, 256, 128, E4M3, quick=True)
        if backend is Backend.MOSAIC:
            yield multicast_case(3, 256, 512, 512, E4M3, quick=True)
        return
    for groups, rows in shapes.DECODE_GROUPS:
        for n, k in shapes.EXPERT_NK:
            yield decode_case(about(rows, groups), rows, n, k, E4M3, backend)
    for groups, rows in shapes.CONTIGUOUS_GROUPS:
        for n, k in shapes.EXPERT_NK:
            yield contiguous_case(groups, rows, n, k, E4M3)
    yield decode_case(_MOST_RAGGED, 96, 4096, 7168, E4M3, backend)
    yield from other_fp8_cases(backend)


def other_fp8_cases(backend: Backend) -> Iterator[Case]:
    """Yields the rest of DeepGEMM's tests."""
    for n, k in shapes.OTHER_NK:
        for groups, rows in shapes.CONTIGUOUS_GROUPS:
            yield contiguous_case(groups, rows, n, k, E4M3)
        for groups, rows in ((6, 1024), (32, 192), (32, 20), (6, 20)):
            yield decode_case(about(rows, groups), rows, n, k, E4M3, backend)


def grouped_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields experts with bfloat16 weights."""
    if quick:
        yield decode_case(_RAGGED, 16, 192, 320, jnp.bfloat16, backend, quick=True)
        yield contiguous_case(2, 256, 256, 128, jnp.bfloat16, quick=True)
        if backend is Backend.MOSAIC:
            yield multicast_case(3, 256, 512, 512, jnp.bfloat16, quick=True)
        return
    for n, k in shapes.EXPERT_NK:
        yield decode_case(about(20, 32), 20, n, k, jnp.bfloat16, backend)
        yield decode_case(about(1024, 6), 1024, n, k, jnp.bfloat16, backend)
        yield contiguous_case(8, 4096, n, k, jnp.bfloat16)
    yield decode_case(_MOST_RAGGED, 96, 4096, 7168, jnp.bfloat16, backend)


def int4_grouped_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields Kimi-K2's INT4 experts: one for each tile height."""
    yield from _four_bit_cases(INT4, backend, quick)


def fp4_grouped_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields the same products with FP4 experts."""
    yield from _four_bit_cases(FP4, backend, quick)


def _four_bit_cases(word: Any, backend: Backend, quick: bool) -> Iterator[Case]:
    if quick:
        yield decode_case(_RAGGED, 16, 128, 256, word, backend, quick=True)
        yield decode_case((70, 3), 64, 128, 512, word, backend, quick=True)
        return
    for groups, rows in shapes.INT4_GROUPS:
        for n, k in shapes.EXPERT_NK:
            yield decode_case(about(rows, groups), rows, n, k, word, backend)
    yield decode_case(_MOST_RAGGED, 96, 4096, 7168, word, backend)


def queue_case(rows: int, peers: int, each: int, capacity: int) -> Case:
    """Returns queues of rows with random ids, some of them without a peer."""
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, peers * each, (rows, 6)), jnp.int32)

    def call(operands: jax.Array, i: Any, backend: Backend) -> dict[str, jax.Array]:
        return queue_rows(arrays.anew(operands, i), peers, each, capacity, backend=backend)._asdict()

    return Case(
        f"{rows} rows for {peers} peers, {capacity} lines each", lambda key: ids, call,
        dict.fromkeys(RowQueues._fields, EXACT), counted=lambda operands, result: result,
        reference=lambda operands, i: call(operands, i, Backend.REFERENCE), bytes=4 * (2 * ids.size + peers * capacity),
    )  # fmt: skip


def choose_experts_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields DeepSeek-V3's group-limited top-k, and one without groups; only the C++ has its own implementation."""
    if backend in (Backend.NATIVE, Backend.REFERENCE):
        for rows in (3, 17) if quick else (3, 17, 512):
            yield _routing_case(rows, 256, 8, (8, 4, 2))
            yield _routing_case(rows, 64, 6, (1, 1, 1))


def weighted_case(rows: int, count: int, topk: int, score: str) -> Case:
    """Returns the choice of DeepSeek-V4, with a bias and with many equal scores."""

    def operands(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key)
        logits = jax.random.randint(keys[0], (rows, count), -8, 8).astype(jnp.float32)
        return {"logits": logits, "bias": jax.random.randint(keys[1], (3, count), 0, 3).astype(jnp.float32)}

    def reference(operands: dict[str, jax.Array], i: Any) -> dict[str, jax.Array]:
        of = jax.nn.sigmoid if score == "sigmoid" else lambda x: jnp.sqrt(jax.nn.softplus(x))
        scores = of(operands["logits"])
        ids = jax.lax.top_k(scores + operands["bias"][i % 3], topk)[1]
        weights = jnp.take_along_axis(scores, ids, axis=1)
        return {"ranked": jnp.sort(ids), "weights": jnp.sort(1.5 * weights / weights.sum(1, keepdims=True))}

    def call(operands: dict[str, jax.Array], i: Any, backend: Backend) -> dict[str, jax.Array]:
        if backend not in (Backend.MOSAIC, Backend.TRITON):
            return reference(operands, i)
        given = arrays.anew(operands, i)
        how: dict[str, Any] = {"topk": topk, "score": score, "normed": True, "factor": 1.5, "first": 2}
        ids, weights = weighted_experts(given["logits"], given["bias"], i % 3 + 2, **how, backend=backend)
        return {"ranked": jnp.sort(ids), "weights": jnp.sort(weights)}

    return Case(
        f"{topk} of {count} for {rows} tokens, {score}", operands, call, {"ranked": EXACT, "weights": FLOAT32},
        counted=lambda operands, result: result, reference=reference,
    )  # fmt: skip


def multicast_case(groups: int, rows: int, n: int, k: int, dtype: Any, *, quick: bool = False) -> Case:
    """Returns the product of prefill whose clusters of two tiles share weights if both have one group."""
    plan = TilePlan(True, WIDE_TILE_M, 128, cluster=2)
    made = contiguous_case(groups, rows, n, k, dtype, plan, quick=quick)
    return dataclasses.replace(made, name=f"{made.name}, by multicast")


def about(rows: int, groups: int) -> tuple[int, ...]:
    """Returns counts of 0.7 to 1.3 times `rows`, as in DeepGEMM's tests."""
    return tuple((np.random.default_rng(0).uniform(0.7, 1.3, groups) * rows).astype(int).tolist())


def contiguous_case(
    groups: int, rows: int, n: int, k: int, dtype: Any, plan: TilePlan | None = None, *, quick: bool = False
) -> Case:
    """Returns the product of prefill: about `rows` per group in whole tiles of 128, as in DeepGEMM's test."""
    fp8, tile_m = dtype == E4M3, 128
    itemsize = jnp.dtype(dtype).itemsize
    layers = arrays.stack(groups * n * k * itemsize, quick)
    tiles = np.maximum(1, np.asarray(about(rows, groups)) // tile_m)
    tile_group, m = np.repeat(np.arange(groups, dtype=np.int32), tiles), int(tiles.sum()) * tile_m

    def operands(key: jax.Array) -> dict[str, Any]:
        x_key, w_key = jax.random.split(key)
        if fp8:
            x, w = arrays.activation(x_key, m, k), arrays.fp8_weights(w_key, layers * groups, n, k)
            return {"x": x, "w": w}
        return {"x": (arrays.normal(x_key, m, k),), "w": (arrays.normal(w_key, layers * groups, n, k),)}

    def call(operands: dict[str, Any], i: Any, backend: Backend) -> jax.Array:
        place = {"tile_m": tile_m, "group_offset": i % layers * groups, "backend": backend}
        if plan is not None and backend is Backend.MOSAIC:
            (x, x_scale), (w, w_scale) = (v if fp8 else (*v, None) for v in (operands["x"], operands["w"]))
            where = jnp.asarray(tile_group), place["group_offset"], tile_m
            return dispatch.contiguous(x, x_scale, w, w_scale, *where, jnp.bfloat16, plan=plan)
        return _PRODUCTS[jnp.dtype(dtype)](*operands["x"], *operands["w"], jnp.asarray(tile_group), **place)

    return Case(
        f"{groups} groups, {m} rows, {n} x {k}{'' if fp8 else ', bfloat16'}",
        operands,
        call,
        {"out": FP8_SUMS if fp8 else BFLOAT16},
        poisoned=lambda operands, i: operands | {"w": arrays.only(operands["w"], i * groups, groups)},
        flops=2 * m * n * k,
        bytes=(m * k + groups * n * k) * itemsize + 2 * m * n,
        key=(jnp.dtype(dtype).name, groups, rows, n, k),
    )


def decode_case(
    counts: Sequence[int], rows: int, n: int, k: int, dtype: Any, backend: Backend, *, quick: bool = False
) -> Case:
    """Returns the product of decode: rows sorted by expert, `counts` of each, `rows` expected, twice the capacity.

    Padding rows are NaN inside tiles, and not compared elsewhere.
    """
    packed, groups = {INT4: "int4", FP4: "fp4"}.get(dtype), len(counts)
    scaled = dtype in (E4M3, FP4)
    itemsize = 4.5 / 8 if packed else jnp.dtype(dtype).itemsize
    layers, total = arrays.stack(groups * n * k * itemsize, quick), sum(counts)
    ids = np.full(2 * groups * rows, -1, np.int32)  # buffers of a dispatch are about half empty
    ids[:total] = np.repeat(np.arange(groups), counts)
    tile_m = choose_tile_m(groups * rows, groups, dtype=dtype, backend=backend)

    def operands(key: jax.Array) -> dict[str, Any]:
        x_key, w_key = jax.random.split(key)
        aligned = align_groups(jnp.asarray(ids), groups, tile_m, backend=Backend.REFERENCE)
        held = (aligned.source_row < ids.size)[:, None]
        x = jnp.where(held, arrays.normal(x_key, aligned_rows(ids.size, groups, tile_m), k), jnp.nan)
        rows = quantize_1x128(x, backend=Backend.REFERENCE) if scaled else (x,)
        w = _WEIGHTS[jnp.dtype(dtype)](w_key, layers * groups, n, k)
        return {"x": rows, "w": w, "held": held, "tile_group": aligned.tile_group}

    def call(operands: dict[str, Any], i: Any, backend: Backend) -> jax.Array:
        place = {"tile_m": tile_m, "group_offset": i % layers * groups, "backend": backend}
        return _PRODUCTS[jnp.dtype(dtype)](*operands["x"], *operands["w"], operands["tile_group"], **place)

    def poisoned(operands: dict[str, Any], i: Any) -> dict[str, Any]:
        w = arrays.only(operands["w"], i * groups, groups)
        for empty in np.flatnonzero(np.asarray(counts) == 0):
            w = arrays.without(w, i * groups + empty)
        return operands | {"w": w}

    kind = (packed, "bfloat16") if packed else (jnp.dtype(dtype).name,)
    weights = f", {packed.upper()}" if packed else "" if scaled else ", bfloat16"
    return Case(
        f"{groups} experts, about {rows} rows, {n} x {k}{weights}",
        operands,
        call,
        {"out": FP8_SUMS if scaled else BFLOAT16},
        counted=lambda operands, out: {"out": jnp.where(operands["held"], out, 0)},
        poisoned=poisoned,
        exact=lambda operands: operands | {"x": widened(operands["x"])} if dtype == INT4 else widened(operands),
        flops=2 * total * n * k,
        bytes=int(total * k * (1 if scaled else 2) + groups * n * k * itemsize) + 2 * total * n,
        key=(*kind, groups, rows, n, k),
    )


def align_case(rows: int, groups: int, tile_m: int, max_rows: int | None) -> Case:
    """Returns the alignment of random groups, some of them out of range; numpy computes the expected result."""
    ids = np.random.default_rng(0).integers(-1, groups + 1, rows, np.int32)

    def call(operands: jax.Array, i: Any, backend: Backend) -> dict[str, jax.Array]:
        return align_groups(arrays.anew(operands, i), groups, tile_m, max_rows=max_rows, backend=backend)._asdict()

    capacity = aligned_rows(min(rows, max_rows or rows), groups, tile_m)

    def counted(operands: jax.Array, result: dict[str, jax.Array]) -> dict[str, jax.Array]:
        del operands
        return result | {"aligned_row": jnp.minimum(result["aligned_row"], capacity)}

    name = f"{rows} rows of {groups} groups, tiles of {tile_m}{', over capacity' if capacity < rows else ''}"
    fields = ("source_row", "aligned_row", "tile_group", "counts", "needed", "overflow")
    return Case(
        name, lambda key: jnp.asarray(ids), call, dict.fromkeys(fields, EXACT), counted=counted,
        reference=lambda operands, i: _aligned(ids, groups, tile_m, capacity), bytes=4 * (2 * rows + capacity),
    )  # fmt: skip


def _aligned(ids: np.ndarray, groups: int, tile_m: int, capacity: int) -> dict[str, jax.Array]:
    """Aligns row by row, by the documentation of `GroupAlignment`."""
    has = (ids >= 0) & (ids < groups)
    counts = np.bincount(ids[has], minlength=groups)
    padded = -(-counts // tile_m) * tile_m
    ends = np.cumsum(padded)
    source, aligned = np.full(capacity, len(ids)), np.full(len(ids), capacity)
    for group in range(groups):
        mine = np.flatnonzero(ids == group)
        place = ends[group] - padded[group] + np.arange(len(mine))
        aligned[mine] = np.minimum(place, capacity)
        source[place[place < capacity]] = mine[place < capacity]
    tiles = np.repeat(np.arange(groups), padded // tile_m)[: capacity // tile_m]
    tile_group = np.full(capacity // tile_m, -1)
    tile_group[: len(tiles)] = tiles
    made = {"source_row": source, "aligned_row": aligned, "tile_group": tile_group, "counts": counts}
    made |= {"needed": ends[-1], "overflow": ends[-1] > capacity}
    return {name: jnp.asarray(x, jnp.int32) for name, x in made.items()}


def _routing_case(rows: int, experts: int, topk: int, limits: tuple[int, int, int]) -> Case:
    """Returns the selection of `topk` experts from `kept` of `groups`, ranked by their `counted` best scores."""
    groups, kept, counted = limits

    def operands(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (rows, experts), -8, 8).astype(jnp.float32)  # many are equal

    def reference(scores: jax.Array, i: Any) -> jax.Array:
        del i
        by_group = scores.reshape(rows, groups, -1)
        strength = jax.lax.top_k(by_group, counted)[0].sum(axis=-1)
        keep = jax.nn.one_hot(jax.lax.top_k(strength, kept)[1], groups, dtype=jnp.bool).any(axis=1)
        return jax.lax.top_k(jnp.where(keep[..., None], by_group, -jnp.inf).reshape(rows, experts), topk)[1]

    def call(scores: jax.Array, i: Any, backend: Backend) -> jax.Array:
        return native.choose_experts(scores, topk, *limits) if backend is Backend.NATIVE else reference(scores, i)

    name = f"{topk} of {experts} for {rows} tokens" + (f", in {kept} of {groups} groups" if groups > 1 else "")
    return Case(name, operands, call, {"out": EXACT})
