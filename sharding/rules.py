"""The one place that names mesh axes: what a mesh of ranks looks like, and which parameter lies where on it."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.transport import Machine

NODE, GPU = RANKS = ("node", "gpu")
"""Every device is one data-parallel rank: it owns its requests and their pages, and a share of the experts."""


def rank_mesh(devices: Sequence[jax.Device], num_nodes: int = 1) -> Mesh:
    """A mesh over all `devices`, in the order given: `num_nodes` nodes of equally many GPUs.

    Raises ValueError when the nodes do not divide the devices.
    """
    if not devices or len(devices) % num_nodes:
        raise ValueError(f"{len(devices)} devices do not divide over {num_nodes} nodes")
    return Mesh(np.array(devices).reshape(num_nodes, -1), RANKS)


def machine_of(mesh: Mesh) -> Machine:
    """The ranks of a mesh as the transports see them."""
    return Machine(mesh.shape[NODE], mesh.shape[GPU], RANKS)


def partition(axes: Sequence[str | None]) -> PartitionSpec:
    """Where a parameter with these logical axes lies: experts are spread over all ranks, the rest is on each."""
    return PartitionSpec(*(RANKS if axis == "experts" else None for axis in axes))


def of_ranks() -> PartitionSpec:
    """Arrays with a leading rank axis: batches, pages, decode state."""
    return PartitionSpec(RANKS)


def check_divides(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The sharding of one parameter; ValueError, naming shape and ranks, when the ranks do not divide its experts."""
    ranks = math.prod(mesh.devices.shape)
    for axis, size in zip(axes, shape, strict=True):
        if axis == "experts" and size % ranks:
            raise ValueError(
                f"{size} physical experts of a parameter {tuple(shape)} do not divide over {ranks} ranks: "
                f"use redundant experts to reach {-(-size // ranks) * ranks}"
            )
    return NamedSharding(mesh, partition(axes))
