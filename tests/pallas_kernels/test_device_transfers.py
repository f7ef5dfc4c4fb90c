"""A kernel that sends to its peers by itself compiles for one node (docs/performance/device_transfers.md).

The kernel is the second hop of a dispatch: an all-to-all of [peers, rows, width] among the 8 GPUs of a node. A thread
block takes one peer: it copies the block of rows meant for it through shared memory into the peer's memory (TMA),
signals the peer's semaphore, and waits until all peers have signalled its own. Nothing runs.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import aot
from pallas_kernels.mosaic import swizzle_transforms
from sharding.collectives import Overlap, resolve_overlap

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(resolve_overlap("cuda") is not Overlap.HOOKS, reason="written against jax 0.12"),
]
ROWS, WIDTH = 64, 256


def exchange(x: jax.Array, axis: str, peers: int) -> jax.Array:
    """Sends block j of x [peers, ROWS, WIDTH] to peer j along a mesh axis; block j of the result is peer j's."""

    def body(x_ref, out_ref, rows, arrived):
        received = pl.get_global(plgpu.SemaphoreType.REGULAR)
        own, peer = lax.axis_index(axis), lax.axis_index("peer")
        plgpu.copy_gmem_to_smem(x_ref.at[peer], rows, arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(rows, plgpu.remote_ref(out_ref, {axis: peer}).at[own])
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(received, device_id={axis: peer})
        pl.semaphore_wait(received, value=peers, decrement=False)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(peers,),
        grid_names=("peer",),
        scratch_types=[
            plgpu.SMEM((ROWS, WIDTH), x.dtype, transforms=swizzle_transforms(x.dtype, 64)),
            plgpu.Barrier(),
        ],
        kernel_name="exchange",
    )(x)


def compiled(nodes: int, axis: str) -> tuple[str, aot.KernelResources]:
    """Compiles an exchange along `axis` for nodes of 8 H200s; returns the program's text and the kernel.

    Raises AotUnavailableError without the `aot` extra; jax's and XLA's own errors where they cannot compile it.
    """
    mesh = aot.gpu_mesh({"node": nodes, "gpu": 8})
    where = PartitionSpec(("node", "gpu"))
    peers = mesh.shape[axis]
    mapped = jax.shard_map(
        lambda x: exchange(x[0], axis, peers)[None], mesh=mesh, in_specs=where, out_specs=where, check_vma=False
    )
    shape = (mesh.size, peers, ROWS, WIDTH)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, where))
    program, (kernel,) = aot.compile_with_resources(mapped, x, mesh=mesh)
    return program.as_text(), kernel


def test_peers_of_a_node_are_stored_to_and_signalled() -> None:
    text, kernel = compiled(1, "gpu")
    assert "all-to-all" not in text
    assert kernel.spill_bytes == 0
    assert "red.release.sys.global" in kernel.ptx and "cp.async.bulk.tensor" in kernel.ptx
