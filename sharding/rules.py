"""The one place that names mesh axes: what a mesh of devices looks like, and which parameter lies where on it.

A data-parallel *rank* owns its requests and their pages. With tensor parallelism it is a group of devices instead of
one: they split its attention heads and MLP widths, and hold the same batches, pages and decode state.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.transport import Machine

NODE, GPU, TENSOR = DEVICES = ("node", "gpu", "tensor")
"""Axes of the mesh, outermost first: `gpu` counts the ranks of a node, `tensor` the devices of a rank."""
RANKS = (NODE, GPU)
"""Axes of the data-parallel ranks: batches, pages and decode state lie along these, equal on the devices of a rank."""

_SPLIT_AXES = ("heads", "heads_latent", "mlp", "gate_up")


def rank_mesh(devices: Sequence[jax.Device], num_nodes: int = 1, tensor_parallel_size: int = 1) -> Mesh:
    """A mesh over the devices in the order given: nodes of equally many ranks of `tensor_parallel_size` devices each.

    Raises ValueError when nodes and ranks do not divide the devices; a rank never spans nodes.
    """
    if not devices or len(devices) % num_nodes:
        raise ValueError(f"{len(devices)} devices do not divide over {num_nodes} nodes")
    if (len(devices) // num_nodes) % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the {len(devices) // num_nodes} devices of "
            "a node: a rank's devices must be in one node"
        )
    shape = (num_nodes, -1, tensor_parallel_size)
    return Mesh(np.array(devices).reshape(shape), DEVICES, axis_types=(AxisType.Auto,) * 3)


def rank_size(mesh: Mesh) -> int:
    """Devices of a rank: the tensor-parallel size."""
    return mesh.shape[TENSOR]


def machine_of(mesh: Mesh) -> Machine:
    """The devices of a mesh as the transports see them: the experts live on all of them."""
    return Machine(mesh.shape[NODE], mesh.shape[GPU] * mesh.shape[TENSOR], DEVICES)


def of_ranks() -> PartitionSpec:
    """Arrays with a leading rank axis: batches, pages, decode state."""
    return PartitionSpec(RANKS)


def by_rank(mesh: Mesh) -> NamedSharding:
    """Sharding of an array whose leading axis is the rank."""
    return NamedSharding(mesh, of_ranks())


def partition(axes: Sequence[str | None]) -> PartitionSpec:
    """Where a parameter with these logical axes (`dsv3.model.params.Axis`) lies.

    Experts are spread over all devices, heads and MLP widths over the devices of a rank; the rest is on each. Fused
    axes must have been arranged for it (`dsv3.model.tensor_parallel.arrange`).
    """
    return PartitionSpec(*(DEVICES if axis == "experts" else TENSOR if is_split(axis) else None for axis in axes))


def is_split(axis: str | None) -> bool:
    """Whether the devices of a rank split this logical axis among them."""
    return axis in _SPLIT_AXES


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of shardings for a tree of partitions."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
