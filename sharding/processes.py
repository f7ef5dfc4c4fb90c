"""Arrays over the devices of several processes; each process addresses its own shards."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from sharding.mesh import RANKS


def place(tree: Any, shardings: Any) -> Any:
    """Returns a tree of arrays with the given `shardings` (a tree, or a prefix of one).

    With several processes, an array that already has its sharding is returned as is. Any other must be a host array
    that is equal in every process; each process copies its shards.
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


def move(tree: Any, shardings: Any) -> Any:
    """Returns a tree of arrays copied to the devices of `shardings`, a tree of the same shape.

    With several processes each copies its own shards, so both shardings must cut an array in the same way.
    """
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)
    return jax.tree.map(_move, tree, shardings)


def _move(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    parts = {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    wanted = sharding.addressable_devices_indices_map(array.shape)
    moved = [jax.device_put(parts[_bounds(index, array.shape)], device) for device, index in wanted.items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, moved)


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(part.indices(n) for part, n in zip(index, shape, strict=True))


def whole(array: jax.Array) -> np.ndarray:
    """Returns an array on this host. With several processes it is a collective: all must call it, in the same order."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    assert isinstance(array.sharding, NamedSharding)
    everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
    return np.asarray(_replicate(everywhere)(array))


@functools.lru_cache(maxsize=8)
def _replicate(everywhere: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Returns the cached program that replicates an array: a state of 100 leaves would compile 100 programs."""
    return jax.jit(lambda x: x, out_shardings=everywhere)


def own_sum(array: jax.Array) -> np.ndarray:
    """Sums this process's shards of an array `[Z, ...]` that is split along its leading axis: `[...]`."""
    return np.sum([np.asarray(shard.data).sum(axis=0) for shard in array.addressable_shards], axis=0)


def add_up(tree: Any) -> Any:
    """Sums host arrays over all processes, leaf by leaf. A collective: all must call it, in the same order."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda parts: parts.sum(axis=0), multihost_utils.process_allgather(tree))


def any_of(flag: bool) -> bool:
    """Returns whether the flag is set in any process. A collective: all must call it, in the same order."""
    return bool(add_up(np.int32(flag)))


def first_process_first[T](make: Callable[[], T]) -> T:
    """Calls `make` in process 0, and then in all others: for files that one process writes and all read."""
    if jax.process_index() == 0:
        made = make()
        multihost_utils.sync_global_devices("made")
        return made
    multihost_utils.sync_global_devices("made")
    return make()


def on_every_rank(tree: Any) -> Any:
    """Gathers arrays `[1, ...]` of one rank, inside `shard_map`, to `[X, ...]` of all ranks."""
    return jax.tree.map(lambda x: lax.all_gather(x, RANKS, axis=0, tiled=True), tree)


def local_part(array: jax.Array) -> jax.Array:
    """Returns an addressable part of the array, to block on."""
    return array if array.is_fully_addressable else array.addressable_data(0)
