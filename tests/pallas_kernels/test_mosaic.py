"""The interpreter's settings: a kernel with a data race must fail, one without must pass."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic


def two_warpgroups(x, *, synchronised):
    """Warpgroup 0 writes shared memory, warpgroup 1 reads it back, with or without a barrier between."""

    def body(x_ref, o_ref, smem, ready):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            smem[...] = x_ref[...]
            if synchronised:
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready)

        @pl.when(wg == 1)
        def _():
            if synchronised:
                plgpu.barrier_wait(ready)
            o_ref[...] = smem[...]

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_threads=2,
        thread_name="wg",
        scratch_types=dict(smem=plgpu.SMEM(x.shape, x.dtype), ready=plgpu.Barrier(num_arrivals=1)),
        interpret=mosaic.interpret_params(),
    )(x)


def test_synchronised_kernel_passes():
    x = jnp.arange(128, dtype=jnp.float32)
    assert jnp.array_equal(two_warpgroups(x, synchronised=True), x)


def test_race_raises():
    with pytest.raises(Exception, match=r"(?i)race"):
        jax.block_until_ready(two_warpgroups(jnp.ones(128, jnp.float32), synchronised=False))
    mosaic.reset_interpreter()


@pytest.mark.parametrize(
    ("dtype", "minor", "swizzle"),
    [(jnp.float8_e4m3fn, 128, 128), (jnp.bfloat16, 64, 128), (jnp.bfloat16, 32, 64), (jnp.bfloat16, 112, 32)],
)
def test_swizzle(dtype, minor, swizzle):
    tiling, swizzling = mosaic.swizzle_transforms(dtype, minor)
    assert swizzling.swizzle == swizzle
    assert tiling.tiling == (8, swizzle // jnp.dtype(dtype).itemsize)


def test_swizzle_too_small():
    with pytest.raises(ValueError, match="32 bytes"):
        mosaic.swizzle_transforms(jnp.bfloat16, 8)
