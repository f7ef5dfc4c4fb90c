"""The INT4 kernel: unpacking of words, interpreted with race detection, compiled for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot
from pallas_kernels.backend import Backend
from pallas_kernels.gemm.int4 import int4_contiguous, int4_values
from pallas_kernels.grouped import int4_grouped_gemm_contiguous
from pallas_kernels.int4 import interleave
from tests.pallas_kernels import int4_weights
from tests.pallas_kernels.gemm.interpreted import NUM_BLOCKS, bfloat16, interpret, untouched
from tests.pallas_kernels.numerics import calc_diff

N, K = 200, 512
"""A tile of rows that is not full, and two steps of K."""


def test_the_values_of_each_group() -> None:
    values, _ = int4_weights.random_weight(0, 16, 256)
    words = jnp.asarray(interleave(int4_weights.pack(values)))
    found = jax.jit(lambda w: jnp.concatenate([int4_values(w, group) for group in range(8)], axis=1))(words)
    np.testing.assert_array_equal(found, values)


TILES = {
    "empty groups and tiles, most of them of 8 rows": ([2, 0, 0, -1, 1, -1], 8, 3),
    "the ring wraps around": ([1, 1, 0], 32, 2),
    "the largest tile": ([0, 2], 128, None),
    "nothing to do": ([-1, -1], 16, 3),
}


@pytest.mark.parametrize(("tile_group", "tile_m", "stages"), TILES.values(), ids=TILES)
def test_contiguous(tile_group, tile_m, stages) -> None:
    """Weights are rounded to bfloat16, as in the dequantized model, and so is the result.

    Weights of groups without tiles are never read: their scales are NaN.
    """
    (x, x_true), (values, scale) = bfloat16(0, len(tile_group) * tile_m, K), int4_weights.random_weight(1, 5, N, K)
    words = interleave(int4_weights.pack(values))
    unused = [group for group in range(5) if group - 2 not in tile_group]
    poisoned = scale.copy()
    poisoned[unused] = np.nan

    def fn(x, words, scale, tile_group, offset):
        return int4_contiguous(x, words, scale, tile_group, offset, tile_m, stages=stages, num_sms=NUM_BLOCKS)

    out = interpret(fn, x, words, poisoned.swapaxes(1, 2), jnp.array(tile_group), jnp.int32(2))
    weight = int4_weights.real(values, scale).astype(int4_weights.BF16).astype(np.float64)
    for tile, group in enumerate(tile_group):
        at = slice(tile * tile_m, (tile + 1) * tile_m)
        if group < 0:
            assert untouched(out[at])
        else:
            assert calc_diff(out[at], x_true[at] @ weight[2 + group].T) < 1e-5


@pytest.mark.aot
@pytest.mark.parametrize(("tile_m", "n", "k"), [(8, 4096, 7168), (128, 7168, 2048)])
def test_no_register_spills(tile_m: int, n: int, k: int) -> None:
    """The first product of Kimi-K2's experts in decode, the second one in prefill."""

    def spec(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    operands = spec(jnp.bfloat16, 4096, k), spec(jnp.int32, 8, n, k // 8), spec(jnp.bfloat16, 8, k // 32, n)
    [kernel] = aot.kernel_resources(
        lambda x, w, s, t: int4_grouped_gemm_contiguous(x, w, s, t, tile_m=tile_m, backend=Backend.MOSAIC),
        *operands,
        spec(jnp.int32, 4096 // tile_m),
    )
    assert (kernel.registers <= 168, kernel.spill_bytes) == (True, 0), kernel
