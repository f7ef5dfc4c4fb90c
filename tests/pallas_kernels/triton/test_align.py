"""The order of rows by group in Triton's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpus
from pallas_kernels.align import align_groups
from pallas_kernels.backend import Backend
from pallas_kernels.triton.resources import kernel_resources


@pytest.mark.parametrize(("rows", "groups", "tile_m", "most"), [(1300, 5, 8, None), (40, 7, 16, 9), (3, 2, 4, None)])
@pytest.mark.usefixtures("interpreted")
def test_rows_are_where_the_reference_has_them(rows: int, groups: int, tile_m: int, most: int | None) -> None:
    """Some rows have no group, some groups no rows, and in one case the rows are more than the capacity."""
    ids = jnp.asarray(np.random.default_rng(rows).integers(-2, groups + 1, rows) // 2 * 2, jnp.int32)
    found, wanted = (
        jax.jit(lambda ids, backend=backend: align_groups(ids, groups, tile_m, max_rows=most, backend=backend))(ids)
        for backend in (Backend.TRITON, Backend.REFERENCE)
    )
    for name, mine, reference in zip(found._fields, found, wanted, strict=True):
        np.testing.assert_array_equal(mine, reference, err_msg=name)


@pytest.mark.aot
def test_the_kernel_fits() -> None:
    call = functools.partial(align_groups, num_groups=288, tile_m=8, backend=Backend.TRITON)
    (kernel,) = kernel_resources(call, jax.ShapeDtypeStruct((1512,), jnp.int32), gpu=gpus.by_number(90))
    assert kernel.spilled_bytes == 0
