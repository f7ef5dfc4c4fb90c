"""The one place that names mesh axes: what a mesh of ranks looks like, and which parameter lies where on it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sharding.transport import Machine

NODE, GPU = RANKS = ("node", "gpu")
"""Every device is one data-parallel rank: it owns its requests and their pages, and a share of the experts."""


def rank_mesh(devices: Sequence[jax.Device], num_nodes: int = 1) -> Mesh:
    """A mesh with one rank a device, in the order given: `num_nodes` nodes of equally many GPUs.

    Raises ValueError when the nodes do not divide the devices.
    """
    if not devices or len(devices) % num_nodes:
        raise ValueError(f"{len(devices)} devices do not divide over {num_nodes} nodes")
    return Mesh(np.array(devices).reshape(num_nodes, -1), RANKS, axis_types=(AxisType.Auto,) * 2)


def machine_of(mesh: Mesh) -> Machine:
    """The ranks of a mesh as the transports see them."""
    return Machine(mesh.shape[NODE], mesh.shape[GPU], RANKS)


def of_ranks() -> PartitionSpec:
    """Arrays with a leading rank axis: batches, pages, decode state."""
    return PartitionSpec(RANKS)


def by_rank(mesh: Mesh) -> NamedSharding:
    """Sharding of an array whose leading axis is the rank."""
    return NamedSharding(mesh, of_ranks())


def partition(axes: Sequence[str | None]) -> PartitionSpec:
    """Where a parameter with these logical axes lies: experts are spread over all ranks, the rest is on each."""
    return PartitionSpec(*(RANKS if axis == "experts" else None for axis in axes))


def shardings(specs: Any, mesh: Mesh) -> Any:
    """A tree of shardings for a tree of partitions."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
