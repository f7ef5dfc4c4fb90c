"""The FP4 kernel: the values of codes, interpreted with race detection, compiled for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot
from pallas_kernels.backend import Backend
from pallas_kernels.gemm.four_bit import four_bit_contiguous, fp4_values
from pallas_kernels.grouped import fp4_grouped_gemm_contiguous
from tests.pallas_kernels import fp4_weights
from tests.pallas_kernels.gemm.interpreted import NUM_BLOCKS, bfloat16, interpret, untouched
from tests.pallas_kernels.numerics import calc_diff

N, K = 200, 512
"""A tile of rows that is not full, and two steps of K."""


def test_the_values_of_each_group() -> None:
    codes, _ = fp4_weights.random_weight(0, 16, 256)
    words = jnp.asarray(fp4_weights.words(codes))
    found = jax.jit(lambda w: jnp.concatenate([fp4_values(w, group) for group in range(8)], axis=1))(words)
    np.testing.assert_array_equal(4 * found, fp4_weights.VALUES[codes])


def test_contiguous() -> None:
    """Weights of groups without tiles are never read: their scales are NaN. No weight is rounded."""
    tile_group, tile_m = [2, 0, 0, -1, 1, -1], 8
    (x, x_true), (codes, scale) = bfloat16(0, len(tile_group) * tile_m, K), fp4_weights.random_weight(1, 5, N, K)
    poisoned = scale.copy()
    poisoned[[0, 1]] = np.nan
    fn = functools.partial(four_bit_contiguous, tile_m=tile_m, stages=3, num_sms=NUM_BLOCKS)
    words = fp4_weights.words(codes)
    out = interpret(fn, x, words, poisoned.swapaxes(1, 2), jnp.array(tile_group), jnp.int32(2))
    weight = fp4_weights.real(codes, scale)
    for tile, group in enumerate(tile_group):
        at = slice(tile * tile_m, (tile + 1) * tile_m)
        if group < 0:
            assert untouched(out[at])
        else:
            assert calc_diff(out[at], x_true[at] @ weight[2 + group].T) < 1e-5


@pytest.mark.aot
@pytest.mark.parametrize(("tile_m", "n", "k"), [(8, 4096, 4096), (128, 4096, 2048)])
def test_no_register_spills(tile_m: int, n: int, k: int) -> None:
    """Both products of Flash's experts, in decode and in prefill."""

    def spec(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    operands = spec(jnp.bfloat16, 4096, k), spec(jnp.uint32, 8, n, k // 8), spec(jnp.bfloat16, 8, k // 32, n)
    [kernel] = aot.kernel_resources(
        lambda x, w, s, t: fp4_grouped_gemm_contiguous(x, w, s, t, tile_m=tile_m, backend=Backend.MOSAIC),
        *operands,
        spec(jnp.int32, 4096 // tile_m),
    )
    assert (kernel.registers <= 168, kernel.spill_bytes) == (True, 0), kernel
