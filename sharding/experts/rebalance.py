"""Moves the replicas of a layer between devices, between two steps: one program for every permutation.

An exchange addressed by the map (this replica to that device) would need a program per map. Instead every replica is
cut into as many slices as there are devices. The first all-to-all gives device j slice j of every replica. With all
replicas of its slice at hand, a device permutes them by a local gather, whose indices are data. The second all-to-all
brings the slices of each replica together where the replica stands. Twice the weights cross the wire, evenly on all
links, for any map.

The weights move as uint32 words, whatever their type: FP8 values and their float32 scales go in one piece. A checksum
of each replica is taken before and after. The weights of the layer and its part of the placement are taken over
together, or, where one checksum differs, neither is. The stacks are updated in place when they are donated (on a GPU;
XLA:CPU writes an FP8 stack by way of float16, and so copies it).

Everything runs inside `shard_map`, on one device. Shapes: L layers, Z devices, Ed replicas per device, Er = Z * Ed
replicas, E experts, Ec replicas of the most replicated expert, U words per replica.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.experts.placement import Placement
from sharding.mesh import Machine
from sharding.wire.words import from_words, to_words

TEMPORARY_LAYERS = 3
"""Temporary memory of a move on a GPU, in layers' experts of one device (a test compiles it)."""


class LayerMove(NamedTuple):
    """A new map of one layer: the replica whose weights each replica takes, and the layer's part of `Placement`."""

    layer: Any  # [] int32, in the placement
    source: Any  # [Er] int32
    replicas: Any  # [E, Ec] int32
    copies: Any  # [E] int32


def move_layer(
    stacks: Any, placement: Placement, move: LayerMove, machine: Machine, first_layer: int = 0
) -> tuple[Any, Placement, jax.Array]:
    """Carries out a move; returns the stacks, the placement and, the same everywhere, whether it was taken over.

    `stacks` is a tree of `[L, Ed, ...]` arrays, the replicas of this device; `placement` and `move` are equal on all.
    The placement may have more layers than the stacks, whose first one has number `first_layer` in it.
    """
    layer = move.layer - first_layer
    old = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, layer, keepdims=False), stacks)
    words = to_words(old)
    before = lax.all_gather(checksums(words), machine.axes, tiled=True)  # [Er]
    new = from_words(permute(words, move.source, machine), old)
    first = lax.axis_index(machine.axes) * words.shape[0]
    wanted = before[lax.dynamic_slice_in_dim(move.source, first, words.shape[0])]
    differ = (checksums(to_words(new)) != wanted).any()
    intact = lax.pmax(differ.astype(jnp.int32), machine.axes) == 0

    def take_over(stack: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(stack, jnp.where(intact, new, old), layer, 0)

    def place(array: jax.Array, new: jax.Array) -> jax.Array:
        old = lax.dynamic_index_in_dim(array, move.layer, keepdims=False)
        return lax.dynamic_update_index_in_dim(array, jnp.where(intact, new, old), move.layer, 0)

    placed = Placement(place(placement.replicas, move.replicas), place(placement.copies, move.copies))
    return jax.tree.map(take_over, stacks, old, new), placed, intact


def permute(words: jax.Array, source: jax.Array, machine: Machine) -> jax.Array:
    """Gives replica p the words of replica `source[p]`, of all devices' replicas; `words` `[Ed, U]` are this one's."""
    Ed, U = words.shape
    Z = machine.devices
    width = -(-U // Z)
    slices = jnp.pad(words, ((0, 0), (0, Z * width - U))).reshape(Ed, Z, width)
    mine = _all_to_all(slices.transpose(1, 0, 2), machine)  # [Z, Ed, width]: my slice of all replicas, in their order
    permuted = mine.reshape(Z * Ed, width)[source].reshape(Z, Ed, width)
    return _all_to_all(permuted, machine).transpose(1, 0, 2).reshape(Ed, Z * width)[:, :U]


def checksums(words: jax.Array) -> jax.Array:
    """Returns a uint32 per row of `words` `[Ed, U]`.

    Any change of a single word changes it, and nearly every other change.

    Words are weighed by odd numbers, so that exchanged words show too.
    """
    weight = 2 * lax.iota(jnp.uint32, words.shape[1]) + 1
    return (words * weight).sum(axis=1, dtype=jnp.uint32)


def _all_to_all(blocks: jax.Array, machine: Machine) -> jax.Array:
    """Sends block j of the leading axis `[Z, ...]` to device j; block i of the result came from device i."""
    return lax.all_to_all(blocks, machine.axes, split_axis=0, concat_axis=0, tiled=True)
