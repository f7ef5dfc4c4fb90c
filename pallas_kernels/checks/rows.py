"""Quantization of rows, and operations on rows between products."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import rows
from pallas_kernels.backend import Backend
from pallas_kernels.checks import arrays
from pallas_kernels.checks.case import BFLOAT16, FLOAT32, Case, Tolerance
from pallas_kernels.fp8 import quantize_1x128, swiglu_quantize
from pallas_kernels.heads import normed_latents, unit_rotated_heads
from pallas_kernels.mixing import read_streams, write_streams

VALUES = Tolerance(1e-4, 2**-3, 2**-9, "a value about halfway may be rounded to either neighbor in e4m3")
SCALES = Tolerance(1e-10, 2**-18, 0, "a division or an exponential may be approximate")
_EPSILON = 1e-6


def quantize_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields rows of the hidden width; small ones have a last block of fewer than 128 channels."""
    del backend
    if quick:
        yield quantize_case(3, 64, gated=False)
        yield quantize_case(33, 384, gated=False, ue8m0=True)
        return
    for m in (1, 128, 1000, 4096):
        yield quantize_case(m, 7168, gated=False)
    yield quantize_case(128, 7168, gated=False, ue8m0=True)


def swiglu_quantize_cases(backend: Backend, quick: bool) -> Iterator[Case]:
    """Yields rows between an expert's products, some of them undefined."""
    del backend
    if quick:
        yield quantize_case(4, 128, gated=True, limit=0.5)
        yield quantize_case(33, 64, gated=True, used=20)
        return
    for m, used, limit in ((1, None, None), (128, None, 0.5), (1000, 333, None), (4096, None, None)):
        yield quantize_case(m, 2048, gated=True, used=used, limit=limit)


def quantize_case(
    m: int, channels: int, *, gated: bool, ue8m0: bool = False, used: int | None = None, limit: float | None = None
) -> Case:
    """Returns the quantization of one buffer; if it fits the L2 cache (4096 rows) the rate is the cache's.

    Rows from `used` on are NaN.
    """
    width = 2 * channels if gated else channels
    quantize = functools.partial(swiglu_quantize if gated else quantize_1x128, ue8m0=ue8m0)
    counts = np.arange(m) < (m if used is None else used)

    def call(operands: jax.Array, i: Any, backend: Backend) -> tuple[jax.Array, jax.Array]:
        x = arrays.anew(operands, i)
        some: dict[str, Any] = {} if used is None else {"used_rows": jnp.int32(used)}
        some |= {} if limit is None else {"limit": limit}
        return quantize(x, backend=backend, **some)

    def counted(operands: jax.Array, result: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
        del operands
        values = jnp.where(counts[:, None], arrays.dequantized_rows(*result), 0)
        return {"values": values, "scale": jnp.where(counts, result[1], 0)}

    before = f"SwiGLU{f' up to {limit}' if limit else ''} and " if gated else ""
    kind = f"{before}1x128{' in powers of two' if ue8m0 else ''}"
    return Case(
        f"{kind}, {m} x {channels}{'' if used is None else f', {used} rows used'}",
        lambda key: jnp.where(counts[:, None], arrays.normal(key, m, width), jnp.nan),
        call,
        {"values": VALUES, "scale": SCALES},
        counted=counted,
        bytes=2 * m * width + m * channels + 4 * m * channels // 128,
        key=(gated, m, channels),
    )


def rms_norm_case(m: int, width: int, extra: int) -> Case:
    """Returns the norm of the hidden state, or of the first part of rows that are wider by `extra`."""
    return _row_case(
        f"{m} x {width}{f' of {width + extra}' if extra else ''}",
        lambda x, w, i, backend: rows.rms_norm(x, w, i, _EPSILON, backend=backend),
        (m, width + extra),
        width,
    )


def swiglu_case(m: int, width: int) -> Case:
    """Returns SwiGLU of bfloat16 rows."""
    return _row_case(f"{m} x {width}", lambda x, w, i, backend: rows.swiglu(x, backend=backend), (m, 2 * width), 8)


def rotate_heads_case(m: int, heads: int, width: int, turned: int) -> Case:
    """Returns the rotation of the last part of heads."""
    return _row_case(
        f"{m} x {heads} heads of {width}, {turned} rotated",
        lambda x, w, i, backend: rows.rotate_heads(x, *_angles(m, turned), backend=backend),
        (m, heads, width),
        8,
    )


def unit_rotated_heads_case(m: int, heads: int, width: int, turned: int) -> Case:
    """Returns the norm and rotation of DeepSeek-V4's queries."""
    return _row_case(
        f"{m} x {heads} heads of {width}, {turned} rotated",
        lambda x, w, i, backend: unit_rotated_heads(x, *_angles(m, turned), _EPSILON, backend=backend),
        (m, heads, width),
        8,
    )


def normed_latents_case(m: int, query: int, width: int, turned: int) -> Case:
    """Returns the norms of DeepSeek-V4's query latents and latents, and the rotation of these."""

    def both(x: jax.Array, w: jax.Array, i: Any, backend: Backend) -> jax.Array:
        angles = _angles(m, turned)
        found = normed_latents(x, w[:, :query], w[:, query:], i, *angles, _EPSILON, backend=backend)
        return jnp.concatenate(found[:2], axis=1)

    name = f"{m} x ({query} + {width}), {turned} rotated"
    return _row_case(name, both, (m, query + width), query + width)


def latent_rows_case(m: int, latent: int, turned: int, before: int) -> Case:
    """Returns rows of the cache from the end of rows that are wider by `before`."""
    return _row_case(
        f"{m} x ({latent} + {turned})",
        lambda x, w, i, backend: rows.latent_rows(x, w, i, *_angles(m, turned), _EPSILON, backend=backend),
        (m, before + latent + turned),
        latent,
    )


def read_streams_case(tokens: int, width: int) -> Case:
    """Returns the reading of four residual streams, as DeepSeek-V4 has them."""
    n, layers = 4, 3

    def operands(key: jax.Array) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 7))
        streams = arrays.normal(next(keys), tokens, n, width)
        shapes = {
            "weight": (layers, 24, n * width),
            "base": (layers, 24),
            "scale": (layers, 3),
            "norm": (layers, width),
        }
        made = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
        return {"streams": streams} | made | {"weight": made["weight"] * (n * width) ** -0.5}

    def call(operands: dict[str, Any], i: Any, backend: Backend) -> dict[str, jax.Array]:
        how: dict[str, Any] = {"layer": i % layers, "iterations": 20, "eps": _EPSILON, "norm_eps": _EPSILON}
        found = read_streams(**arrays.anew(operands, i), **how, backend=backend)
        return {"normed": found.normed, "post": found.post, "between": found.between}

    return Case(
        f"{tokens} tokens of {n} x {width}", operands, call,
        {"normed": BFLOAT16, "post": FLOAT32, "between": FLOAT32}, counted=lambda operands, result: result,
    )  # fmt: skip


def write_streams_case(tokens: int, width: int) -> Case:
    """Returns the writing of four residual streams after a block of two parts."""
    n = 4

    def operands(key: jax.Array) -> dict[str, jax.Array]:
        keys = iter(jax.random.split(key, 7))
        made = {"streams": arrays.normal(next(keys), tokens, n, width)}
        made |= {name: arrays.normal(next(keys), tokens, width) for name in ("first", "second")}
        shapes = {"post": (tokens, n), "between": (tokens, n, n)}
        return made | {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}

    def call(operands: dict[str, jax.Array], i: Any, backend: Backend) -> dict[str, jax.Array]:
        given = arrays.anew(operands, i)
        parts = given["post"], given["between"], given["first"], given["second"]
        return {"streams": write_streams(given["streams"], *parts, backend=backend)}

    return Case(
        f"{tokens} tokens of {n} x {width}", operands, call, {"streams": BFLOAT16},
        counted=lambda operands, result: result,
    )  # fmt: skip


def _row_case(name: str, function: Callable[..., jax.Array], shape: tuple[int, ...], width: int) -> Case:
    """Returns the case of function(x, norm weights `[3, width]`, layer, backend)."""

    def operands(key: jax.Array) -> dict[str, jax.Array]:
        x_key, w_key = jax.random.split(key)
        return {"x": arrays.normal(x_key, *shape), "w": arrays.normal(w_key, 3, width)}

    def call(operands: dict[str, jax.Array], i: Any, backend: Backend) -> jax.Array:
        return function(operands["x"], operands["w"], i % 3, backend)

    return Case(
        name, operands, call, {"out": BFLOAT16},
        poisoned=lambda operands, i: operands | {"w": arrays.only(operands["w"], i)},
    )  # fmt: skip


def _angles(m: int, turned: int) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of `m` positions, as for the rotation of keys."""
    angles = jnp.arange(m)[:, None] * 10000.0 ** (-jnp.arange(0, turned, 2) / turned)
    return jnp.cos(angles), jnp.sin(angles)
