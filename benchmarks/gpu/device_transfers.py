"""Compiles a kernel that sends rows to its peers by itself, with Mosaic GPU's public interface.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu.device_transfers

The kernel is the second hop of a dispatch: an all-to-all of [peers, rows, width] among the 8 GPUs of a node. A thread
block takes one peer: it copies the block of rows meant for it through shared memory into the peer's memory (TMA),
signals the peer's semaphore, and waits until all peers have signalled its own. It is compiled for one node and for two,
where a peer is once a GPU of the same node, once one of another. Nothing runs: docs/device_transfers.md says what the
output proves.
"""

import re
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import aot
from pallas_kernels.mosaic import swizzle_transforms

ROWS, WIDTH = 64, 256
_PIECES = {
    "stores to a peer by TMA": r"cp\.async\.bulk\.tensor\S*\.global\.shared",
    "signals to a peer": r"red\.release\.sys\S*",
    "reads of the own semaphore": r"ld\.\w+\.sys\S*",
}


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


def main() -> int:
    for nodes, axis in ((1, "gpu"), (2, "gpu"), (2, "node")):
        try:
            text, kernel = compiled(nodes, axis)
        except aot.AotUnavailableError as error:
            print(error, file=sys.stderr)
            return 2
        except Exception as error:  # whatever the compiler says is the answer
            print(f"{nodes} x 8, along {axis}: {type(error).__name__}: {str(error)[:300]}")
            continue
        named = r"\b(all-to-all|all-gather|all-reduce|collective-permute)\b"
        collectives = ", ".join(sorted(set(re.findall(named, text)))) or "none"
        print(
            f"{nodes} x 8, along {axis}: compiled, {kernel.spill_bytes} spilled bytes; XLA's collectives: {collectives}"
        )
        for what, pattern in _PIECES.items():
            print(f"    {what}: {', '.join(re.findall(pattern, kernel.ptx))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
