"""The FP4 kernel: interpreted with race detection, and compiled for an H200, whose conversion of words is run here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import aot, fp4
from pallas_kernels.backend import Backend
from pallas_kernels.gemm.fp4 import fp4_contiguous, to_registers
from pallas_kernels.grouped import fp4_grouped_gemm_contiguous
from pallas_kernels.mosaic import row_layout
from tests.pallas_kernels import fp4_weights, ptx
from tests.pallas_kernels.gemm.interpreted import NUM_BLOCKS, interpret, untouched
from tests.pallas_kernels.numerics import activation, calc_diff

N, K = 200, 384
"""A tile of rows that is not full, and three steps of K."""


def test_contiguous() -> None:
    """Weights of groups without tiles are never read: their scales are NaN. No weight is rounded."""
    tile_group, tile_m = [2, 0, 0, -1, 1, -1], 8
    (x, x_scale, x_true) = activation(0, len(tile_group) * tile_m, K)
    codes, places, scale = fp4_weights.random_weight(1, 5, N, K)
    poisoned = scale.copy()
    poisoned[[0, 1]] = np.nan
    fn = functools.partial(fp4_contiguous, tile_m=tile_m, out_dtype=jnp.bfloat16, stages=3, num_sms=NUM_BLOCKS)
    weight = fp4_weights.words(codes), fp4_weights.powers(places), poisoned
    out = interpret(fn, x, x_scale, *weight, jnp.array(tile_group), jnp.int32(2))
    real = fp4_weights.real(codes, places, scale)
    for tile, group in enumerate(tile_group):
        at = slice(tile * tile_m, (tile + 1) * tile_m)
        if group < 0:
            assert untouched(out[at])
        else:
            assert calc_diff(out[at], x_true[at] @ real[2 + group].T) < 1e-5


@pytest.mark.aot
@pytest.mark.skipif(not hasattr(plgpu, "store"), reason="jax 0.11 cannot store this layout to global memory")
def test_registers_hold_the_values_of_the_layout() -> None:
    """The compiled conversion, run on all 128 threads: each code at each place, in wgmma's order."""

    def body(words, powers, out):
        loaded = plgpu.load(words, layout=plgpu.Layout.WGMMA, optimized=False)
        steps = plgpu.load(powers, layout=row_layout(), optimized=False)
        plgpu.store(out, to_registers()(loaded, steps), optimized=False)

    def convert(words, powers):
        shape = jax.ShapeDtypeStruct((64, 128), jnp.float8_e4m3fn)
        return plgpu.kernel(body, out_type=shape)(words, powers)

    rng = np.random.default_rng(0)
    codes, places = rng.integers(0, 16, (64, 128)), rng.integers(0, fp4.MAX_SPREAD + 1, (64, 4))
    words, powers = fp4_weights.words(codes), fp4_weights.powers(places)[0]
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (words, powers))
    [kernel] = aot.kernel_resources(convert, *shapes)
    out = np.zeros((64, 128), np.uint8)
    ptx.run(kernel.ptx, threads=128, buffers=(words, powers, out))
    wanted = jax.jit(fp4.to_e4m3)(words, powers[None])
    np.testing.assert_array_equal(out, np.asarray(wanted).view(np.uint8))


@pytest.mark.aot
@pytest.mark.parametrize(("tile_m", "n", "k"), [(8, 4096, 4096), (128, 4096, 2048)])
def test_no_register_spills(tile_m: int, n: int, k: int) -> None:
    """Both products of Flash's experts, in decode and in prefill."""

    def spec(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = spec(jnp.float8_e4m3fn, 4096, k), spec(jnp.float32, k // 128, 4096)
    weight = spec(jnp.uint32, 8, n, k // 8), spec(jnp.uint32, 8, k // 128, n), spec(jnp.float32, 8, n // 128, k // 128)
    [kernel] = aot.kernel_resources(
        lambda *operands: fp4_grouped_gemm_contiguous(*operands, tile_m=tile_m, backend=Backend.MOSAIC),
        *(*rows, *weight),
        spec(jnp.int32, 4096 // tile_m),
    )
    assert (kernel.registers <= 168, kernel.spill_bytes) == (True, 0), kernel
