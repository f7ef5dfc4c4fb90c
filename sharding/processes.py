"""Arrays over the devices of several processes, of which each process sees its own part."""

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, Sharding

from sharding.mesh import RANKS


def spans_processes(mesh: Mesh) -> bool:
    """Returns whether some devices of the mesh belong to other processes."""
    return mesh.is_multi_process


def place(tree: Any, shardings: Any) -> Any:
    """Returns a tree of arrays with the given `shardings` (a tree, or a prefix of one).

    Over several processes an array that has its sharding already stays as it is. Any other is a host array that every
    process has; each process takes its part.
    """
    leaves = jax.tree.leaves(shardings)
    if all(sharding.is_fully_addressable for sharding in leaves):
        return jax.device_put(tree, shardings)
    return jax.tree.map(lambda s, part: jax.tree.map(lambda leaf: _place(leaf, s), part), shardings, tree)


def _place(leaf: Any, sharding: Sharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def on_every_rank(tree: Any) -> Any:
    """Gathers arrays `[1, ...]` of one rank, inside `shard_map`, to `[X, ...]` of all ranks, the same on each."""
    return jax.tree.map(lambda x: lax.all_gather(x, RANKS, axis=0, tiled=True), tree)


def local_part(array: jax.Array) -> jax.Array:
    """Returns a part of the array that this process can read, to wait for."""
    return array if array.is_fully_addressable else array.addressable_data(0)
