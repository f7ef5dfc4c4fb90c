"""The data-parallel ranks of an engine as a mesh axis."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

RANK = "rank"
"""Axis over data-parallel attention ranks: each owns its requests and their pages."""


def rank_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with one rank a device."""
    return Mesh(np.array(devices), (RANK,), axis_types=(AxisType.Auto,))


def by_rank(mesh: Mesh) -> NamedSharding:
    """Sharding of an array whose leading axis is the rank."""
    return NamedSharding(mesh, PartitionSpec(RANK))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every rank."""
    return NamedSharding(mesh, PartitionSpec())
