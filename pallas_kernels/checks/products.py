"""Dense products: FP8 ones, those with a layer of a bfloat16 stack, per head, and of training with gradients."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.checks.case import BFLOAT16, FLOAT32, FP8_SUMS, Case, Tolerance
from pallas_kernels.dense import head_gemm, layer_gemm, plain_gemm
from pallas_kernels.fp8 import fp8_gemm, trained_gemm
from pallas_kernels.gemm import dispatch, shapes
from pallas_kernels.gemm.plan import TALL_TILE_M, TALL_TILE_N, WIDE_TILE_M, TilePlan
from pallas_kernels.grouped import trained_gemm_contiguous

_COMPARED_TOKENS = (64, 128)
"""Decode batches at which a product with one layer of a stack is compared with XLA's."""


def fp8_gemm_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields DeepSeek-V3's products, and rows and columns that fill no tile; on Hopper also small ones by multicast."""
    if quick:
        yield dense_case(3, 192, 256, quick=True)
        yield dense_case(130, 320, 96, quick=True)
        if backend is Backend.MOSAIC:
            yield from multicast_cases(300, 512, 512, quick=True)
        return
    for m in (4096, 64, 128, 1):
        for n, k in shapes.DENSE_NK:
            yield dense_case(m, n, k)
    for m in (33, 129, 1000):
        yield dense_case(m, 2112, 7168)


def multicast_cases(m: int, n: int, k: int, *, quick: bool = False) -> Iterator[Case]:
    """Yields a product under plans of Hopper's kernels whose clusters of two blocks share loads."""
    for shared, plan in (
        ("activations", TilePlan(True, WIDE_TILE_M, 128, cluster=2)),
        ("weights", TilePlan(True, WIDE_TILE_M, 128, cluster=2, shares_weights=True)),
        ("tall, activations", TilePlan(True, TALL_TILE_M, TALL_TILE_N, cluster=2)),
    ):
        made = dense_case(m, n, k, plan, quick=quick)
        yield dataclasses.replace(made, name=f"{made.name}, {shared} by multicast")


def layer_gemm_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields the router's product, whose result is float32, and a product of bfloat16."""
    del backend
    if quick:
        yield router_case(3, 16, 128, quick=True)
        yield plain_case(33, 192, 320, quick=True)
        return
    for m in shapes.ROUTER_TOKENS:
        yield router_case(m, *shapes.ROUTER_NK)
    for m in (1, 64, 1000):
        yield plain_case(m, 2112, 7168)


def head_gemm_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields k_up and v_up of DeepSeek-V3."""
    del backend
    if quick:
        yield head_case(3, 2, 16, 64, transposed=False, quick=True)
        yield head_case(33, 2, 16, 64, transposed=True, quick=True)
        yield head_case(33, 2, 64, 64, transposed=True, carried=64, quick=True)
        return
    for m in shapes.HEAD_TOKENS:
        for transposed in (True, False):
            yield head_case(m, shapes.HEADS, shapes.HEAD_WIDTH, shapes.LATENT, transposed=transposed)
        yield head_case(m, shapes.HEADS, shapes.HEAD_WIDTH, shapes.LATENT, transposed=True, carried=64)


def dense_case(m: int, n: int, k: int, plan: TilePlan | None = None, *, quick: bool = False) -> Case:
    """Returns the product of `fp8_gemm`, under a plan of Hopper's kernels if given."""
    layers = arrays.stack(n * k, quick)

    def operands(key: jax.Array) -> dict[str, Any]:
        a_key, b_key = jax.random.split(key)
        return {"a": arrays.activation(a_key, m, k), "b": arrays.fp8_weights(b_key, layers, n, k)}

    def call(operands: dict[str, Any], i: Any, backend: Backend) -> jax.Array:
        if plan is not None and backend is Backend.MOSAIC:
            (a, a_scale), (b, b_scale) = operands["a"], operands["b"]
            return dispatch.dense(a, a_scale, b, b_scale, i % layers, jnp.bfloat16, plan=plan)
        return fp8_gemm(*operands["a"], *operands["b"], layer=i % layers, backend=backend)

    size = m * k + n * k + 2 * m * n
    return Case(
        f"{m} x {n} x {k}", operands, call, {"out": FP8_SUMS},
        poisoned=lambda operands, i: operands | {"b": arrays.only(operands["b"], i)},
        flops=2 * m * n * k, bytes=size, key=(m, n, k),
    )  # fmt: skip


def head_case(
    m: int, heads: int, width: int, latent: int, *, transposed: bool, carried: int = 0, quick: bool = False
) -> Case:
    """Returns the product of queries of `width` channels a head to latents (`transposed`), or of latents to values.

    With `carried`, columns of queries are appended to it; XLA has no such product to compare.
    """
    n, k = (latent, width) if transposed else (width, latent)
    suffix = f", {carried} carried" if carried else ""
    made = _layer_case(
        f"{'k_up' if transposed else 'v_up'}, {heads} heads, {m} x {n} x {k}{suffix}",
        "mhk,hkn->mhn" if transposed else "mhk,hnk->mhn",
        ((m, heads, k + carried), (heads, width, latent), jax.ShapeDtypeStruct((m, heads, n + carried), jnp.bfloat16)),
        functools.partial(head_gemm, transposed=transposed, carried=carried),
        BFLOAT16,
        quick,
    )
    return dataclasses.replace(made, sliced=None, flops=2 * m * heads * n * k) if carried else made


def router_case(m: int, n: int, k: int, *, quick: bool = False) -> Case:
    """Returns the product whose result is float32; one that is rounded to bfloat16 differs by 1e-6."""
    out = jax.ShapeDtypeStruct((m, n), jnp.float32)
    product = functools.partial(layer_gemm, out_dtype=jnp.float32)
    return _layer_case(f"{m} x {n} x {k}", "mk,nk->mn", ((m, k), (n, k), out), product, FLOAT32, quick)


def plain_case(m: int, n: int, k: int, *, quick: bool = False) -> Case:
    """Returns the product of a linear layer in bfloat16."""
    out = jax.ShapeDtypeStruct((m, n), jnp.bfloat16)
    name = f"{m} x {n} x {k}, bfloat16"
    return _layer_case(name, "mk,nk->mn", ((m, k), (n, k), out), layer_gemm, BFLOAT16, quick)


def unstacked_case(m: int, n: int, k: int) -> Case:
    """Returns the product of `plain_gemm`, with a float32 result."""

    def operands(key: jax.Array) -> dict[str, jax.Array]:
        x_key, w_key = jax.random.split(key)
        return {"x": arrays.normal(x_key, m, k), "w": arrays.normal(w_key, n, k)}

    def call(operands: dict[str, jax.Array], i: Any, backend: Backend) -> jax.Array:
        x = arrays.anew(operands["x"], i)
        return plain_gemm(x, operands["w"], out_dtype=jnp.float32, backend=backend)

    size = 2 * (m * k + n * k) + 4 * m * n
    return Case(f"{m} x {n} x {k}", operands, call, {"out": FLOAT32}, flops=2 * m * n * k, bytes=size,
                key=("bfloat16",))  # fmt: skip


def _layer_case(
    name: str, equation: str, shapes_: tuple, product: Callable[..., jax.Array], tolerance: Tolerance, quick: bool
) -> Case:
    """Returns `product(x, stack, layer)`, which is `equation`; shapes of x and of a layer, shape and dtype of out."""
    x_shape, w_shape, out = shapes_
    layers = arrays.stack(2 * math.prod(w_shape), quick)

    def operands(key: jax.Array) -> dict[str, jax.Array]:
        x_key, w_key = jax.random.split(key)
        return {"x": arrays.normal(x_key, *x_shape), "w": arrays.normal(w_key, layers, *w_shape)}

    def call(operands: dict[str, jax.Array], i: Any, backend: Backend) -> jax.Array:
        return product(operands["x"], operands["w"], i % layers, backend=backend)

    def sliced(operands: dict[str, jax.Array], i: Any) -> jax.Array:
        w = jax.lax.dynamic_index_in_dim(operands["w"], i % layers, keepdims=False)
        return jnp.einsum(equation, operands["x"], w, preferred_element_type=out.dtype)

    size = 2 * (math.prod(x_shape) + math.prod(w_shape)) + out.size * out.dtype.itemsize
    return Case(
        name, operands, call, {"out": tolerance},
        poisoned=lambda operands, i: operands | {"w": arrays.only(operands["w"], i)},
        flops=2 * out.size * x_shape[-1], bytes=size, key=("bfloat16", name),
        sliced=sliced if x_shape[0] in _COMPARED_TOKENS else None,
    )  # fmt: skip


_TRAINED = Tolerance(1e-3, 2**-5, 2**-3, "few of a sum's values are rounded to another e4m3 neighbor")


def trained_case(m: int, n: int, k: int) -> Case:
    """Returns a linear layer of training, with its gradients."""
    return _trained(f"{m} x {n} x {k}", (m, k), (n, k), lambda x, w, backend: trained_gemm(x, w, backend=backend))


def trained_contiguous_case(tiles: tuple[int, ...], n: int, k: int) -> Case:
    """Returns experts with so many `tiles`, with their gradients; tiles without a group are not compared."""
    tile_group = np.repeat(np.arange(len(tiles), dtype=np.int32), tiles)
    groups, held = np.append(tile_group, np.int32(-1)), len(tile_group) * 128

    def product(x: jax.Array, w: jax.Array, backend: Backend) -> jax.Array:
        made = trained_gemm_contiguous(x, w, jnp.asarray(groups), backend=backend)
        return jnp.where(np.repeat(groups >= 0, 128)[:, None], made, 0)

    name = f"{len(tiles)} groups, {held} rows, {n} x {k}"
    return _trained(name, (len(groups) * 128, k), (len(tiles), n, k), product, held=held)


def _trained(
    name: str,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    product: Callable[..., jax.Array],
    held: int | None = None,
) -> Case:
    def operands(key: jax.Array) -> dict[str, jax.Array]:
        x_key, w_key, dy_key = jax.random.split(key, 3)
        live = jnp.arange(x_shape[0])[:, None] < (x_shape[0] if held is None else held)
        x, dy = (
            jnp.where(live, arrays.normal(k, x_shape[0], n), 0) for k, n in ((x_key, x_shape[1]), (dy_key, w_shape[-2]))
        )
        return {"x": x, "w": arrays.normal(w_key, *w_shape), "dy": dy}

    def call(operands: dict[str, jax.Array], i: Any, backend: Backend) -> dict[str, jax.Array]:
        x = arrays.anew(operands["x"], i)
        y, gradient = jax.vjp(lambda x, w: product(x, w, backend), x, operands["w"])
        dx, dw = gradient(operands["dy"])
        return {"y": y, "dx": dx[:held], "dw": dw}

    return Case(
        name, operands, call, dict.fromkeys(("y", "dx", "dw"), _TRAINED),
        counted=lambda operands, result: result, exact=lambda operands: operands, key=("float8_e4m3fn",),
        flops=6 * math.prod(x_shape) * w_shape[-2], bytes=4 * math.prod(x_shape) + 4 * math.prod(w_shape),
    )  # fmt: skip
