"""The kernel of index scores compiled for sm_90a at DeepSeek-V3.2's shapes: no spills, no copy of pages."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import aot
from pallas_kernels.dsa import mosaic_scores

pytestmark = pytest.mark.aot


def test_index_scores() -> None:
    T, table, pages = 64, 512, 64 * 512

    def array(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    arguments = (
        array((T, 64, 128), jnp.bfloat16),
        array((T, 64), jnp.float32),
        array((pages, 64, 128), jnp.bfloat16),
        array((T, table), jnp.int32),
        array((T,), jnp.int32),
    )
    run = functools.partial(mosaic_scores.index_scores_mosaic, first_page=0)
    compiled, kernels = aot.compile_with_resources(run, *arguments)
    assert [kernel.name for kernel in kernels] == ["dsa_scores"]
    assert all(kernel.spill_bytes == kernel.stack_bytes == 0 for kernel in kernels), kernels
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20
