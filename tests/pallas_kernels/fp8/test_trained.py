"""Products of training on e4m3 values: against float64 of the quantized formulas, tiles along tokens, errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp8
from pallas_kernels.align import align_groups
from pallas_kernels.backend import Backend
from pallas_kernels.float8 import BLOCK, E4M3
from pallas_kernels.fp8 import activation_tiles, along_tokens, dequantized, trained_gemm
from pallas_kernels.grouped import trained_gemm_contiguous

REFERENCE = Backend.REFERENCE


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tiles(x: np.ndarray) -> np.ndarray:
    """Rows of x after quantization in tiles of 1 x 128 with power-of-two scales, in float64."""
    out = np.empty(x.shape)
    for first in range(0, x.shape[1], BLOCK):
        part = x[:, first : first + BLOCK]
        mantissa, exponent = np.frexp(np.maximum(np.abs(part).max(axis=1), 1e-4).astype(np.float64) / 448)
        scale = np.exp2(exponent - (mantissa == 0.5))[:, None]
        out[:, first : first + BLOCK] = (part / scale).astype(E4M3).astype(np.float64) * scale
    return out


def blocks(w: np.ndarray) -> np.ndarray:
    values, scale = fp8.quantize_128x128(w)
    return np.asarray(fp8.dequantize_128x128(values, scale, jnp.float32), np.float64)


def formulas(x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, dx and dw of one linear layer in float64."""
    kept, held = tiles(x), blocks(w)
    return kept @ held.T, tiles(dy) @ held, tiles(dy.T) @ tiles(kept.T).T


def assert_close(got: Any, wanted: np.ndarray) -> None:
    assert np.linalg.norm(np.asarray(got, np.float64) - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize(("tokens", "out", "channels"), [(200, 144, 160), (128, 128, 128)], ids=["edges", "one tile"])
def test_a_linear_layer_and_its_gradients_are_those_formulas(tokens: int, out: int, channels: int) -> None:
    """The compiler must not remove the conversions to e4m3 and back, which are adjacent for a single tile."""
    x, w, dy = normal(0, tokens, channels), 3 * normal(1, out, channels), normal(2, tokens, out)
    dy *= np.exp2(np.arange(out) % 7 - 9).astype(np.float32)  # channels of different magnitudes

    @jax.jit
    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda x, w: trained_gemm(x, w, backend=REFERENCE), x, w)
        return y, *pullback(dy)

    for got, wanted in zip(run(x, w, dy), formulas(x, w, dy), strict=True):
        assert_close(got, wanted)


def test_experts_and_their_gradients_are_those_formulas() -> None:
    """One expert has more rows than a tile, one has none, one a few; some rows have no expert."""
    ids = np.repeat([0, 2, -1], [130, 5, 7]).astype(np.int32)
    np.random.default_rng(0).shuffle(ids)
    x, w, dy = normal(3, ids.size, 96), normal(4, 3, 64, 96), normal(5, ids.size, 64)

    @jax.jit
    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        order = align_groups(jnp.asarray(ids), 3, BLOCK)
        aligned, aligned_dy = (v.at[order.source_row].get(mode="fill", fill_value=0) for v in (x, dy))
        unused = jnp.repeat(order.tile_group < 0, BLOCK)[:, None]  # undefined rows
        y, pullback = jax.vjp(
            lambda x, w: trained_gemm_contiguous(x, w, order.tile_group, backend=REFERENCE), aligned, w
        )
        dx, dw = pullback(jnp.where(unused, jnp.nan, aligned_dy))
        return *(v.at[order.aligned_row].get(mode="fill", fill_value=0) for v in (y, dx)), dw, unused.sum()

    y, dx, dw, unused = run(x, w, dy)
    assert unused == BLOCK
    for expert in (0, 2):
        own = ids == expert
        for got, wanted in zip((y[own], dx[own], dw[expert]), formulas(x[own], w[expert], dy[own]), strict=True):
            assert_close(got, wanted)
    assert not np.any(dw[1])
    assert not np.any(y[ids < 0])


@jax.jit
def requantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    kept = dequantized(activation_tiles(x, REFERENCE))
    return kept, along_tokens(kept, REFERENCE)


def test_tiles_of_a_weight_gradient_are_along_the_tokens() -> None:
    """An outlier costs digits of its own channel in its own 128 tokens; padding costs nothing."""
    x = np.sign(normal(6, 200, 3)) * np.random.default_rng(7).uniform(0.5, 4, (200, 3)).astype(np.float32)
    kept, again = map(np.asarray, requantized(x))
    np.testing.assert_array_equal(again, kept)  # power-of-two scales are exact
    assert np.abs(kept - x).max() > 0.01
    with_outlier = x.copy()
    with_outlier[5, 1] = 2.0**20
    rounded = np.asarray(jax.jit(lambda x: along_tokens(x, REFERENCE))(np.stack([*with_outlier, *0 * x[:56]])))
    plain = np.asarray(jax.jit(lambda x: along_tokens(x, REFERENCE))(x))
    same = rounded[:200] == plain
    assert same[:, [0, 2]].all() and same[128:, 1].all()
    assert not same[:128, 1].any()
    assert not rounded[200:].any()


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ((4, 32), (16, 48), r"one K, got \(4, 32\) and \(16, 48\)"),
        ((4, 32), (2, 16, 32), r"got \(4, 32\) and \(2, 16, 32\)"),
        ((2, 4, 32), (16, 32), r"got \(2, 4, 32\)"),
    ],
)
def test_mismatched_shapes_are_rejected(x: tuple[int, ...], w: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained_gemm(jnp.zeros(x), jnp.zeros(w))


def test_mismatched_types_and_tiles_are_rejected() -> None:
    with pytest.raises(ValueError, match="must be bfloat16 or float32, got float16"):
        trained_gemm(jnp.zeros((4, 32), jnp.float16), jnp.zeros((16, 32)))
    with pytest.raises(ValueError, match=r"needs x \[A, K\] and w \[G, N, K\]"):
        trained_gemm_contiguous(jnp.zeros((128, 32)), jnp.zeros((16, 32)), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="96 rows in tiles of 128"):
        trained_gemm_contiguous(jnp.zeros((96, 32)), jnp.zeros((2, 16, 32)), jnp.zeros(1, jnp.int32))
