"""The products of training, whose gradients are products of e4m3 values too."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.checks.case import Case, Tolerance
from pallas_kernels.fp8 import trained_gemm
from pallas_kernels.grouped import trained_gemm_contiguous

_TRAINED = Tolerance(1e-3, 2**-5, 2**-3, "few of a sum's values are rounded to another e4m3 neighbor")


def trained_gemm_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields a linear layer, with its gradients."""
    del backend
    for m, n, k in ((48, 144, 256), (130, 128, 128)) if quick else ((4096, 2112, 7168), (1000, 7168, 2048)):
        yield _case(f"{m} x {n} x {k}", (m, k), (n, k), lambda x, w, backend: trained_gemm(x, w, backend=backend))


def trained_gemm_contiguous_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields experts, one of which has no row, with their gradients; tiles without a group are not looked at."""
    del backend
    for tiles, n, k in (
        (((1, 0, 2), 128, 144),) if quick else (((8, 0, 24, 1), 4096, 7168), ((8, 0, 24, 1), 7168, 2048))
    ):
        tile_group = np.repeat(np.arange(len(tiles), dtype=np.int32), tiles)
        groups = jnp.asarray(np.append(tile_group, -1))

        def product(x: jax.Array, w: jax.Array, backend: Backend, groups: jax.Array = groups) -> jax.Array:
            made = trained_gemm_contiguous(x, w, groups, backend=backend)
            held = jnp.repeat(groups >= 0, 128)[:, None]
            return jnp.where(held, made, 0)

        name = f"{len(tiles)} groups, {len(tile_group) * 128} rows, {n} x {k}"
        yield _case(name, (len(groups) * 128, k), (len(tiles), n, k), product, held=len(tile_group) * 128)


def _case(
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
        x, _ = jax.lax.optimization_barrier((operands["x"], i))
        y, gradient = jax.vjp(lambda x, w: product(x, w, backend), x, operands["w"])
        dx, dw = gradient(operands["dy"])
        return {"y": y, "dx": dx[:held], "dw": dw}

    return Case(
        name, operands, call, dict.fromkeys(("y", "dx", "dw"), _TRAINED),
        counted=lambda operands, result: result, exact=lambda operands: operands, key=("float8_e4m3fn",),
        flops=6 * np.prod(x_shape) * w_shape[-2], bytes=4 * np.prod(x_shape) + 4 * np.prod(w_shape),
    )  # fmt: skip
