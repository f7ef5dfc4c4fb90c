"""The kernel of listed rows compiled for sm_90a: which rows each thread reads, and to where; spills; the main loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import aot
from pallas_kernels.float8 import E4M3
from pallas_kernels.mla.layout import LISTED_BYTES, LISTED_WIDTH
from pallas_kernels.mla.mosaic_gather import (
    ROTATED_PART,
    TILE,
    TileRows,
    copier,
    copy_layout,
    exponent_fetcher,
    packer,
    part_fetcher,
    scale_of,
)
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
        rows = TileRows(listed, *(scalars[i] for i in range(3)))
        copier(BF16)(stage, own, window, entries, *rows, scalars[3])
        layout = plgpu.Layout.SMEM_GMEM_COPY((TILE, LISTED_WIDTH // 4), BF16, 128)
        for quarter in range(2):
            out[quarter] = plgpu.load(stage.at[quarter], layout=layout)

    shape = (2, TILE, LISTED_WIDTH // 4)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, BF16),
        scratch_types={"stage": plgpu.SMEM(shape, BF16, transforms=swizzle_transforms(BF16, 64))},
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(own, window, entries, numbers, scalars)


def test_rows_are_where_products_read_them() -> None:
    """The compiled copies, run on all 128 threads; slots past the count are zeros, whatever their numbers are."""
    rng = np.random.default_rng(0)
    own, window, entries = (rng.integers(0, 1 << 16, (rows, LISTED_WIDTH), np.uint16) for rows in (8, 40, 90))
    numbers = rng.integers(-8, 30, TILE).astype(np.int32)
    arrays = (own, window, entries)
    spec = [jax.ShapeDtypeStruct(x.shape, BF16) for x in arrays]
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((TILE,), (4,))]
    [kernel] = aot.kernel_resources(half_of_tile, *spec, *ints)
    for in_window, first, real, half in ((1, 10, 64, 0), (0, 60, 64, 1), (0, 60, 37, 0), (1, 0, 0, 1)):
        listed = np.where(np.arange(TILE) < real, numbers, rng.choice([-(1 << 31), (1 << 31) - 1], TILE))
        out = np.zeros((2, TILE, LISTED_WIDTH // 4), np.uint16)
        scalars = np.array([in_window, first, real, half], np.int32)
        in_order_of_use = listed.astype(np.int32), scalars, out, window, entries, own
        ptx.run(kernel.ptx, 128, in_order_of_use, shared_words=out.size // 2)
        array = window if in_window else entries
        rows = [own[-1 - n] if n < 0 else array[first + n] for n in listed[:real]] + [np.zeros_like(own[0])] * (
            64 - real
        )
        columns = np.stack(rows)[:, 256 * half :][:, :256]
        np.testing.assert_array_equal(out, np.moveaxis(columns.reshape(TILE, 2, 128), 1, 0))


def part_of_tile(part, own, window, entries, zeros, numbers, scalars):
    """Returns what the threads hold of a part of FP8 rows, and the scales of its rows."""

    def body(own, window, entries, zeros, numbers, scalars, values, scales):
        listed = plgpu.load(numbers, layout=copy_layout().reduce(1), optimized=False)
        rows = TileRows(listed, *(scalars[i] for i in range(3)))
        values[...] = part_fetcher(part)(own, window, entries, zeros, *rows)
        exponents = exponent_fetcher()(own, window, entries, zeros, *rows)
        found = scale_of(part)(packer()(exponents)).astype(BF16)
        scales[...] = plgpu.layout_cast(lax.broadcast_in_dim(found, (TILE, 64), [0]), copy_layout())

    kinds = [E4M3 if part < ROTATED_PART else BF16, BF16]
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((TILE, 64), kind) for kind in kinds],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(own, window, entries, zeros, numbers, scalars)


@pytest.mark.parametrize("part", [0, 5, ROTATED_PART])
def test_fp8_rows_are_read_with_their_scales(part: int) -> None:
    """The compiled loads, run on all 128 threads; slots past the count are zeros, whatever their numbers are."""
    rng = np.random.default_rng(0)
    own, window, entries = (rng.integers(0, 256, (rows, LISTED_BYTES), np.uint8) for rows in (8, 40, 90))
    zeros = np.zeros((1, LISTED_BYTES), np.uint8)
    numbers = rng.integers(-8, 30, TILE).astype(np.int32)
    spec = [jax.ShapeDtypeStruct(x.shape, jnp.uint8) for x in (own, window, entries, zeros)]
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((TILE,), (3,))]
    [kernel] = aot.kernel_resources(functools.partial(part_of_tile, part), *spec, *ints)
    size = 1 if part < ROTATED_PART else 2
    for in_window, first, real in ((1, 10, 64), (0, 60, 64), (0, 60, 37), (1, 0, 0)):
        listed = np.where(np.arange(TILE) < real, numbers, rng.choice([-(1 << 31), (1 << 31) - 1], TILE))
        scalars = np.array([in_window, first, real], np.int32)
        values, scales = np.zeros((TILE, 64 * size), np.uint8), np.zeros((TILE, 64), np.uint16)
        in_order_of_use = listed.astype(np.int32), scalars, values, scales, window, entries, own, zeros
        ptx.run(kernel.ptx, 128, in_order_of_use)
        array = window if in_window else entries
        rows = [own[-1 - n] if n < 0 else array[first + n] for n in listed[:real]]
        rows = np.stack([*rows, *[np.zeros_like(own[0])] * (TILE - real)])
        np.testing.assert_array_equal(values, rows[:, 64 * part :][:, : 64 * size])
        exponents = rows[:, LISTED_BYTES - 8 + part].astype(np.uint16)
        np.testing.assert_array_equal(scales, np.tile(exponents[:, None] << 7, 64))


@pytest.mark.parametrize(
    ("heads", "fp8", "instructions", "cycles"),
    [
        (64, False, 1584, (5588, 5588)),
        (128, False, 1584, (5588, 5588)),
        (64, True, 3334, (6945, 7023)),
        (128, True, 3334, (6945, 7023)),
    ],
)
def test_no_register_spills(heads: int, fp8: bool, instructions: int, cycles: tuple[int, int]) -> None:
    """And the main loop is no longer than recorded: half of its cycles are those of 64 rows."""
    kernel = kernels.listed_rows(heads, fp8=fp8)
    fn, shapes = kernels.program_of(kernel.case)
    [compiled] = found = aot.kernel_resources(fn, *shapes)
    assert (compiled.spill_bytes, compiled.stack_bytes, compiled.registers <= 168) == (0, 0, True), compiled
    assert_no_longer(kernel, found, instructions=instructions, cycles=cycles)
