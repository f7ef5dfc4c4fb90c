"""The implementation that public operations select, read from programs lowered for a GPU."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, bodies
from pallas_kernels.backend import Backend, warn_once
from pallas_kernels.mla import fp8_row_bytes, mla_decode, mla_prefill, write_pages
from pallas_kernels.mla.mosaic_latent import TileShape

KERNEL = "mosaic_gpu"


def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def decode_program(width, value_width, backend, dtype=jnp.bfloat16):
    run = functools.partial(mla_decode, scale=1.0, pages_per_layer=4, value_width=value_width, backend=backend)
    arguments = (
        array((2, 1, 8, width), dtype),
        array((8, 64, width), dtype),
        array((2, 3), jnp.int32),
        array((2,), jnp.int32),
    )
    with bodies.left_out():
        return aot.lower_for(run, *arguments).as_text()


@pytest.mark.aot
def test_kernels_run_only_where_requested():
    assert KERNEL in decode_program(576, 512, Backend.MOSAIC)
    assert KERNEL in decode_program(320, 256, Backend.MOSAIC)
    assert KERNEL not in decode_program(576, 512, Backend.REFERENCE)
    assert KERNEL not in decode_program(576, 512, None)  # this process computes on a CPU


@pytest.mark.aot
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda: decode_program(48, 32, Backend.MOSAIC), r"\(32, 16\) are neither \(512, 64\) nor \(256, 64\)"),
        (lambda: decode_program(576, 512, Backend.MOSAIC, jnp.float32), "float32 is neither"),
        (
            lambda: aot.lower_for(
                functools.partial(mla_decode, scale=1.0, pages_per_layer=4, value_width=256, backend=Backend.MOSAIC),
                array((2, 1, 8, 320)),
                array((8, 64, fp8_row_bytes(256, 64)), jnp.uint8),
                array((2, 3), jnp.int32),
                array((2,), jnp.int32),
            ).as_text(),
            "FP8 pages have latents of 256 values, not 512",
        ),
        (
            lambda: aot.lower_for(
                functools.partial(mla_prefill, scale=1.0, backend=Backend.MOSAIC),
                *(array((64, 2, w)) for w in (24, 24, 16)),
                array((2,), jnp.int32),
            ).as_text(),
            r"\(24, 16\) are none of \(128, 128\), \(192, 128\), \(256, 256\)",
        ),
        (
            lambda: aot.lower_for(
                functools.partial(write_pages, pages_per_layer=8, value_width=20, backend=Backend.MOSAIC),
                array((8, 64, 31)),
                array((3, 31)),
                array((3,), jnp.int32),
                array((3,), jnp.int32),
            ).as_text(),
            "31 x bfloat16",
        ),
    ],
)
def test_unsupported_arrays_use_the_reference_and_are_logged(program, reason, caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert KERNEL not in program()
        program()
    (record,) = caplog.records
    assert re.search(reason, record.message)


def test_a_scale_that_is_not_above_zero_is_rejected():
    """The kernel takes the maximum of scores before it scales them."""
    with pytest.raises(ValueError, match=r"scale must be above 0, got 0\.0"):
        TileShape(heads=16, queries=1, rows=16, parts=1, dtype=jnp.dtype(jnp.bfloat16), scale=0.0, interpreted=True)
