"""Compressed attention compiled for an H200 at DeepSeek-V4's sizes: no spills, no copies of the arrays of rows."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot, gpus
from pallas_kernels.backend import Backend
from pallas_kernels.compressed import RowList, attend_compressed
from pallas_kernels.triton.resources import kernel_resources

pytestmark = pytest.mark.aot
N, HEAVY = 64, 8192  # entries of a heavy layer after a million tokens
ARRAY = 1 << 29


def array(*shape: int, dtype: jax.typing.DTypeLike = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


attend = functools.partial(attend_compressed, scale=512**-0.5, plain=448, backend=Backend.MOSAIC)


@pytest.mark.parametrize(("width", "dtype"), [(584, jnp.uint8), (512, jnp.bfloat16)], ids=["FP8", "bfloat16"])
def test_a_long_list_is_two_kernels(width, dtype) -> None:
    """Temporaries are the shares' results. The first kernel is Mosaic's."""
    rows = ARRAY // (width * jnp.dtype(dtype).itemsize) // 136
    window = RowList(array(rows, 136, width, dtype=dtype), array(N, 128), array(N))
    entries = RowList(array(68 * rows, 2, width, dtype=dtype), array(N, HEAVY), array(N))
    arrays = array(N, 64, 512, dtype=jnp.bfloat16), array(2, 64, dtype=jnp.float32), array(N, width, dtype=dtype)
    compiled, mosaic = aot.compile_with_resources(attend, *arrays, window, entries)
    shares = 4 * N * 7 * 64 * 513
    assert compiled.memory_analysis().temp_size_in_bytes < shares + (1 << 20)
    text = compiled.as_text()
    calls = sum("triton_kernel_call" in line for line in text.splitlines() if " custom-call(" in line)
    kernels = kernel_resources(attend, *arrays, window, entries, gpu=gpus.by_number(90))
    assert [kernel.name for kernel in kernels] == ["join"] and calls == 1
    assert [(kernel.name, kernel.spill_bytes) for kernel in mosaic] == [("attend_lists", 0)]
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.shared_memory <= gpus.by_number(90).shared_memory
