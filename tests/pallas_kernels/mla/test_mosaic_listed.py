"""The kernel of listed rows compiled for sm_90a: where each thread copies its rows to, spills, the main loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot
from pallas_kernels.mla.mosaic_listed import TILE, WIDTH, copier, copy_layout
from pallas_kernels.mosaic import plgpu, swizzle_transforms
from tests.pallas_kernels import ptx
from tests.pallas_kernels.main_loops import assert_no_longer
from tools.sass import kernels

pytestmark = pytest.mark.aot
BF16 = jnp.dtype(jnp.bfloat16)


def half_of_tile(own, window, entries, numbers, scalars):
    """Returns half of a tile `[2, 64, 128]`, as Mosaic reads it from shared memory."""

    def body(own, window, entries, numbers, scalars, out, stage):
        listed = plgpu.load(numbers, layout=copy_layout().reduce(1), optimized=False)
        copier(BF16)(stage, own, window, entries, listed, *(scalars[i] for i in range(4)))
        layout = plgpu.Layout.SMEM_GMEM_COPY((TILE, WIDTH // 4), BF16, 128)
        for quarter in range(2):
            out[quarter] = plgpu.load(stage.at[quarter], layout=layout)

    shape = (2, TILE, WIDTH // 4)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, BF16),
        scratch_types={"stage": plgpu.SMEM(shape, BF16, transforms=swizzle_transforms(BF16, 64))},
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(own, window, entries, numbers, scalars)


def test_rows_are_where_products_read_them() -> None:
    """The compiled copies, run on all 128 threads; slots past the count are zeros, whatever their numbers are."""
    rng = np.random.default_rng(0)
    own, window, entries = (rng.integers(0, 1 << 16, (rows, WIDTH), np.uint16) for rows in (8, 40, 90))
    numbers = rng.integers(-8, 30, TILE).astype(np.int32)
    arrays = (own, window, entries)
    spec = [jax.ShapeDtypeStruct(x.shape, BF16) for x in arrays]
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((TILE,), (4,))]
    [kernel] = aot.kernel_resources(half_of_tile, *spec, *ints)
    for in_window, first, real, half in ((1, 10, 64, 0), (0, 60, 64, 1), (0, 60, 37, 0), (1, 0, 0, 1)):
        listed = np.where(np.arange(TILE) < real, numbers, rng.choice([-(1 << 31), (1 << 31) - 1], TILE))
        out = np.zeros((2, TILE, WIDTH // 4), np.uint16)
        scalars = np.array([in_window, first, real, half], np.int32)
        in_order_of_use = listed.astype(np.int32), scalars, out, window, entries, own
        ptx.run(kernel.ptx, 128, in_order_of_use, shared_words=out.size // 2)
        array = window if in_window else entries
        rows = [own[-1 - n] if n < 0 else array[first + n] for n in listed[:real]] + [np.zeros_like(own[0])] * (
            64 - real
        )
        columns = np.stack(rows)[:, 256 * half :][:, :256]
        np.testing.assert_array_equal(out, np.moveaxis(columns.reshape(TILE, 2, 128), 1, 0))


@pytest.mark.parametrize("heads", [64, 128])
def test_no_register_spills(heads: int) -> None:
    """And the main loop is no longer than recorded: half of its cycles are those of 64 rows."""
    kernel = kernels.listed_rows(heads)
    fn, shapes = kernels.program_of(kernel.case)
    [compiled] = found = aot.kernel_resources(fn, *shapes)
    assert (compiled.spill_bytes, compiled.stack_bytes, compiled.registers <= 168) == (0, 0, True), compiled
    assert_no_longer(kernel, found, instructions=1584, cycles=(5588, 5588))
