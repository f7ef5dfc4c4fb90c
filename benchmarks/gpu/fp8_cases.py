"""The products that `fp8_gemm.py` compiles, checks and times: operands, a call, the answer in float32, work, bytes.

Weights are stacks that do not fit the L2 cache, and every call takes the next of them, so that a loop of calls reads
weights from memory as a model does.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Backend
from pallas_kernels.dense import head_gemm, layer_gemm
from pallas_kernels.fp8 import dequantize_128x128, fp8_gemm, quantize_1x128, quantize_128x128, swiglu_quantize
from pallas_kernels.gemm import dispatch, shapes
from pallas_kernels.gemm.plan import TilePlan
from pallas_kernels.grouped import (
    align_groups,
    choose_tile_m,
    dequantize_int4,
    fp8_grouped_gemm_contiguous,
    grouped_gemm_contiguous,
    int4_grouped_gemm_contiguous,
)

_STACK_BYTES = 256 << 20
"""Weights of a case together: five times the L2 cache of an H200."""
_INT4 = jnp.int32
"""Stands for weights of four bits, by the type of their words."""
_COMPARED_TOKENS = (64, 128)
"""Decode batches at which a product with one layer of a stack stands next to XLA's."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One product.

    Attributes:
      table: dense, contiguous, decode, quantize, heads or router.
      label: what the table's first column says.
      key: for looking up published figures.
      operands: makes the random operands, from a key.
      call: (operands, i) -> result, with weight number i of the stack.
      valid_rows: (operands, i) -> (results, expected), both float32; rows that do not count are zero in both.
      flops: of one call.
      bytes: read and written by one call, at the least.
      tolerance: on calc_diff.
      sliced: as `call`, but XLA's product with the slice `stack[i]`; None where that is not timed.
    """

    table: str
    label: str
    key: tuple
    operands: Callable[[jax.Array], dict]
    call: Callable[..., jax.Array]
    valid_rows: Callable[..., tuple[jax.Array, jax.Array]]
    flops: float
    bytes: float
    tolerance: float
    sliced: Callable[..., jax.Array] | None = None


def all_cases(backend: Backend) -> Iterator[Case]:
    """DeepGEMM's tables, the model's other products, DeepGEMM's tests: a run short of time leaves the last ones out."""
    fp8, bf16 = jnp.float8_e4m3fn, jnp.bfloat16
    for m in (4096, 64, 128, 1):
        for n, k in shapes.DENSE_NK:
            yield dense_case(m, n, k, backend)
    for groups, rows in shapes.DECODE_GROUPS:
        for n, k in shapes.EXPERT_NK:
            yield decode_case(groups, rows, n, k, fp8, backend)
    for groups, rows in shapes.CONTIGUOUS_GROUPS:
        for n, k in shapes.EXPERT_NK:
            yield contiguous_case(groups, rows, n, k, fp8, backend)
    for m in (128, 4096):
        yield quantize_case(m, 7168, False, backend)
        yield quantize_case(m, 2048, True, backend)
    yield from layer_cases(backend)
    for n, k in shapes.EXPERT_NK:
        yield decode_case(32, 20, n, k, bf16, backend)
        yield decode_case(6, 1024, n, k, bf16, backend)
        yield contiguous_case(8, 4096, n, k, bf16, backend)
    for groups, rows in shapes.INT4_GROUPS:
        for n, k in shapes.EXPERT_NK:
            yield decode_case(groups, rows, n, k, _INT4, backend)
    for n, k in shapes.OTHER_NK:
        for groups, rows in shapes.CONTIGUOUS_GROUPS:
            yield contiguous_case(groups, rows, n, k, fp8, backend)
        for groups, rows in ((6, 1024), (32, 192), (32, 20), (6, 20)):
            yield decode_case(groups, rows, n, k, fp8, backend)


def layer_cases(backend: Backend) -> Iterator[Case]:
    """The bfloat16 products of DeepSeek-V3 that address one layer of a stack: k_up, v_up and the router."""
    for m in shapes.HEAD_TOKENS:
        for transposed in (True, False):
            yield head_case(m, shapes.HEADS, shapes.HEAD_WIDTH, shapes.LATENT, transposed, backend)
    for m in shapes.ROUTER_TOKENS:
        yield router_case(m, *shapes.ROUTER_NK, backend)


def dense_case(m: int, n: int, k: int, backend: Backend, plan: TilePlan | None = None) -> Case:
    layers = _stack(n * k)

    def operands(key):
        a_key, b_key = jax.random.split(key)
        return {"a": _activation(a_key, m, k), "b": _weight(b_key, layers, n, k)}

    def call(operands, i):
        (a, a_scale), (b, b_scale) = operands["a"], operands["b"]
        if plan is not None:
            return dispatch.dense(a, a_scale, b, b_scale, i % layers, jnp.bfloat16, plan=plan)
        return fp8_gemm(a, a_scale, b, b_scale, layer=i % layers, backend=backend)

    def valid_rows(operands, i):
        b, b_scale = (v[i % layers] for v in operands["b"])
        expected = _exact(_dequantize_rows(*operands["a"]), dequantize_128x128(b, b_scale, jnp.float32))
        return call(operands, i).astype(jnp.float32), expected

    size = m * k + n * k + 2 * m * n
    return Case("dense", f"{m} x {n} x {k}", (m, n, k), operands, call, valid_rows, 2 * m * n * k, size, 1e-3)


def contiguous_case(
    groups: int, rows: int, n: int, k: int, dtype, backend: Backend, plan: TilePlan | None = None
) -> Case:
    """Rows per group are 0.7 to 1.3 times `rows`, in whole tiles of 128, as in DeepGEMM's test."""
    fp8, tile_m = dtype == jnp.float8_e4m3fn, 128
    layers = _stack(groups * n * k * jnp.dtype(dtype).itemsize)
    tiles = np.maximum(1, np.random.default_rng(0).uniform(0.7, 1.3, groups) * rows // tile_m).astype(int)
    tile_group, m = np.repeat(np.arange(groups, dtype=np.int32), tiles), int(tiles.sum()) * tile_m

    def operands(key):
        x_key, w_key = jax.random.split(key)
        if fp8:
            return {"x": _activation(x_key, m, k), "w": _weight(w_key, layers * groups, n, k)}
        return {"x": (_normal(x_key, m, k),), "w": (_normal(w_key, layers * groups, n, k),)}

    def call(operands, i):
        place = {"tile_m": tile_m, "group_offset": i % layers * groups, "backend": backend}
        if plan is not None:
            x, w = (v if fp8 else (*v, None) for v in (operands["x"], operands["w"]))
            return dispatch.contiguous(*x, *w, tile_group, place["group_offset"], tile_m, jnp.bfloat16, plan=plan)
        product = fp8_grouped_gemm_contiguous if fp8 else grouped_gemm_contiguous
        return product(*operands["x"], *operands["w"], tile_group, **place)

    def valid_rows(operands, i):
        x = _dequantize_rows(*operands["x"]) if fp8 else operands["x"][0].astype(jnp.float32)

        def tile(x_and_group):  # one shape for all tiles, since XLA tunes each shape that it meets
            x, group = x_and_group
            return _exact(x, _weight_at(operands["w"], i % layers * groups + group))

        expected = jax.lax.map(tile, (x.reshape(-1, tile_m, k), tile_group)).reshape(m, n)
        return call(operands, i).astype(jnp.float32), expected

    itemsize = jnp.dtype(dtype).itemsize
    size = (m * k + groups * n * k) * itemsize + 2 * m * n
    label = f"{groups} groups, {m} rows, {n} x {k}"
    key = (jnp.dtype(dtype).name, groups, rows, n, k)
    tolerance = 1e-3 if fp8 else 1e-5
    return Case("contiguous", label, key, operands, call, valid_rows, 2 * m * n * k, size, tolerance)


def decode_case(groups: int, rows: int, n: int, k: int, dtype, backend: Backend) -> Case:
    """What a decode step computes: rows sorted by expert, counts 0.7 to 1.3 times `rows`, room for twice as many.

    Aligned rows that hold no row are NaN where tiles have them, and not looked at elsewhere.
    """
    fp8, int4 = dtype == jnp.float8_e4m3fn, dtype == _INT4
    itemsize = 4.5 / 8 if int4 else jnp.dtype(dtype).itemsize
    layers = _stack(int(groups * n * k * itemsize))
    counts = (np.random.default_rng(0).uniform(0.7, 1.3, groups) * rows).astype(np.int32)
    ids = np.full(2 * groups * rows, -1, np.int32)  # buffers of a dispatch are about half empty
    ids[: counts.sum()] = np.repeat(np.arange(groups), counts)
    tile_m = choose_tile_m(groups * rows, groups, backend=backend)
    aligned = _aligned(ids, groups, tile_m)
    held = (aligned.source_row < ids.size)[:, None]

    def operands(key):
        x_key, w_key = jax.random.split(key)
        x = jnp.where(held, _normal(x_key, held.size, k), jnp.nan)
        if fp8:
            return {"x": quantize_1x128(x, backend=Backend.REFERENCE), "w": _weight(w_key, layers * groups, n, k)}
        if int4:
            return {"x": (x,), "w": _int4_weight(w_key, layers * groups, n, k)}
        return {"x": (x,), "w": (_normal(w_key, layers * groups, n, k),)}

    def call(operands, i):
        product = int4_grouped_gemm_contiguous if int4 else grouped_gemm_contiguous
        product = fp8_grouped_gemm_contiguous if fp8 else product
        place = {"tile_m": tile_m, "group_offset": i % layers * groups, "backend": backend}
        return product(*operands["x"], *operands["w"], aligned.tile_group, **place)

    def valid_rows(operands, i):
        x = _dequantize_rows(*operands["x"]) if fp8 else operands["x"][0].astype(jnp.float32)

        def tile(x_and_group):
            x, group = x_and_group
            return _exact(x, _weight_at(operands["w"], i % layers * groups + jnp.maximum(group, 0)))

        expected = jax.lax.map(tile, (x.reshape(-1, tile_m, k), aligned.tile_group)).reshape(-1, n)
        out = call(operands, i).astype(jnp.float32)
        return tuple(jnp.where(held, v, 0) for v in (out, expected))

    total = int(counts.sum())
    size = int(total * k * (1 if fp8 else 2) + groups * n * k * itemsize) + 2 * total * n
    label = f"{groups} experts, about {rows} rows, {n} x {k}{', INT4' if int4 else ''}"
    kind = ("int4", "bfloat16") if int4 else (jnp.dtype(dtype).name,)
    key = (*kind, groups, rows, n, k)
    tolerance = 1e-3 if fp8 else 1e-5
    return Case("decode", label, key, operands, call, valid_rows, 2 * total * n * k, size, tolerance)


def quantize_case(m: int, channels: int, gated: bool, backend: Backend) -> Case:
    """The input is one buffer: where it fits the L2 cache (58 MB and 34 MB at 4096 rows) the rate is the cache's."""
    width = 2 * channels if gated else channels
    quantize = swiglu_quantize if gated else quantize_1x128

    def operands(key):
        return {"x": _normal(key, m, width)}

    def call(operands, i):
        x, _ = jax.lax.optimization_barrier((operands["x"], i))  # or a loop of calls would compute it once
        return quantize(x, backend=backend)

    def valid_rows(operands, i):
        x = operands["x"].astype(jnp.float32)
        expected = jax.nn.silu(x[:, :channels]) * x[:, channels:] if gated else x
        return _dequantize_rows(*call(operands, i)), expected

    label = f"{'SwiGLU and ' if gated else ''}1x128, {m} x {channels}"
    size = 2 * m * width + m * channels + 4 * m * channels // 128
    return Case("quantize", label, (gated, m, channels), operands, call, valid_rows, 0, size, 1e-3)


def head_case(m: int, heads: int, width: int, latent: int, transposed: bool, backend: Backend) -> Case:
    """Queries of `width` channels a head to latents by k_up (`transposed`), or latents to values by v_up."""
    n, k = (latent, width) if transposed else (width, latent)
    return _layer_case(
        "heads",
        f"{'k_up' if transposed else 'v_up'}, {heads} heads, {m} x {n} x {k}",
        "mhk,hkn->mhn" if transposed else "mhk,hnk->mhn",
        ((m, heads, k), (heads, width, latent), jax.ShapeDtypeStruct((m, heads, n), jnp.bfloat16)),
        functools.partial(head_gemm, transposed=transposed, backend=backend),
        1e-5,
    )


def router_case(m: int, n: int, k: int, backend: Backend) -> Case:
    """The tolerance is for float32 sums: a result rounded to bfloat16 differs by 1e-6."""
    return _layer_case(
        "router",
        f"{m} x {n} x {k}",
        "mk,nk->mn",
        ((m, k), (n, k), jax.ShapeDtypeStruct((m, n), jnp.float32)),
        functools.partial(layer_gemm, out_dtype=jnp.float32, backend=backend),
        1e-8,
    )


def _layer_case(table: str, label: str, equation: str, arrays: tuple, product: Callable, tolerance: float) -> Case:
    """`product(x, stack, layer)`, which is `equation`; arrays: shape of x, shape of a layer, shape and dtype of out."""
    x_shape, w_shape, out = arrays
    layers = _stack(2 * math.prod(w_shape))

    def operands(key):
        x_key, w_key = jax.random.split(key)
        return {"x": _normal(x_key, *x_shape), "w": _normal(w_key, layers, *w_shape)}

    def call(operands, i):
        return product(operands["x"], operands["w"], i % layers)

    def sliced(operands, i):
        w = jax.lax.dynamic_index_in_dim(operands["w"], i % layers, keepdims=False)
        return jnp.einsum(equation, operands["x"], w, preferred_element_type=out.dtype)

    def valid_rows(operands, i):
        x, w = operands["x"].astype(jnp.float32), operands["w"][i % layers].astype(jnp.float32)
        expected = jnp.einsum(equation, x, w, precision=jax.lax.Precision.HIGHEST)
        return call(operands, i).astype(jnp.float32), expected

    flops = 2 * out.size * x_shape[-1]
    size = 2 * (math.prod(x_shape) + math.prod(w_shape)) + out.size * out.dtype.itemsize
    key = ("bfloat16", table, label)
    compared = sliced if x_shape[0] in _COMPARED_TOKENS else None
    return Case(table, label, key, operands, call, valid_rows, flops, size, tolerance, compared)


def calc_diff(x: jax.Array, y: jax.Array) -> jax.Array:
    """`1 - 2<x,y>/(|x|^2+|y|^2)`, written as `|x-y|^2/(|x|^2+|y|^2)`: the same number, exact enough in float32."""
    return jnp.sum(jnp.square(x - y)) / (jnp.sum(jnp.square(x)) + jnp.sum(jnp.square(y)))


def _stack(weight_bytes: int) -> int:
    return max(2, math.ceil(_STACK_BYTES / weight_bytes))


_aligned = jax.jit(align_groups, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnums=range(1, 5))
def _normal(key, *shape) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _activation(key, m: int, k: int) -> tuple[jax.Array, jax.Array]:
    return quantize_1x128(_normal(key, m, k), backend=Backend.REFERENCE)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _weight(key, stack: int, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    return jax.lax.map(lambda key: quantize_128x128(_normal(key, n, k)), jax.random.split(key, stack))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _int4_weight(key, stack: int, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    words_key, scale_key = jax.random.split(key)
    words = jax.random.bits(words_key, (stack, n, k // 8), jnp.uint32).astype(jnp.int32)
    return words, jax.random.uniform(scale_key, (stack, k // 32, n), jnp.bfloat16, 0.01, 0.02)


def _weight_at(w: tuple, i) -> jax.Array:
    if w[0].dtype == _INT4:
        return dequantize_int4(w[0][i], w[1][i], jnp.float32)
    return dequantize_128x128(w[0][i], w[1][i], jnp.float32) if len(w) == 2 else w[0][i].astype(jnp.float32)


def _dequantize_rows(q: jax.Array, scale: jax.Array) -> jax.Array:
    return q.astype(jnp.float32) * jnp.repeat(scale.T, 128, axis=1)[:, : q.shape[1]]


def _exact(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w.T, precision=jax.lax.Precision.HIGHEST)
