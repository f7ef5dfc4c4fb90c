"""Queues of rows for peers in Triton's interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpus
from pallas_kernels.align import queue_rows
from pallas_kernels.backend import Backend
from pallas_kernels.triton.resources import kernel_resources


@pytest.mark.parametrize(("rows", "peers", "capacity"), [(300, 3, 170), (40, 6, 5), (1, 2, 1)])
@pytest.mark.usefixtures("interpreted")
def test_rows_are_where_the_reference_has_them(rows: int, peers: int, capacity: int) -> None:
    """Some ids need no peer, some rows one peer several times, and some queues are too long."""
    ids = jnp.asarray(np.random.default_rng(rows).integers(-3, 2 * peers, (rows, 3)), jnp.int32)
    found, wanted = (
        jax.jit(lambda ids, backend=backend: queue_rows(ids, peers, 2, capacity, backend=backend))(ids)
        for backend in (Backend.TRITON, Backend.REFERENCE)
    )
    for name, mine, reference in zip(found._fields, found, wanted, strict=True):
        np.testing.assert_array_equal(mine, reference, err_msg=name)
    lines = np.asarray(found.line)[np.asarray(found.line) < peers * capacity]
    assert len(set(lines.tolist())) == len(lines)
    needs = [len({max(each, -1) // 2 for each in row} - {-1}) for row in np.asarray(ids).tolist()]
    assert len(lines) + found.lost.sum() == sum(needs)


@pytest.mark.aot
def test_the_kernel_fits() -> None:
    call = functools.partial(queue_rows, peers=144, ids_per_peer=2, capacity=16, backend=Backend.TRITON)
    (kernel,) = kernel_resources(call, jax.ShapeDtypeStruct((128, 8), jnp.int32), gpu=gpus.by_number(90))
    assert kernel.spilled_bytes == 0
