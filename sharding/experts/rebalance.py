"""Moves the expert replicas of a layer between devices, between two steps: one program for any permutation.

Sends addressed by the map (this replica to that device) would need a program per map. Instead every replica is cut into
one slice per device. The first all-to-all gives device j slice j of every replica. The device then permutes the slices
by a local gather, whose indices are data. The second all-to-all reassembles each replica on its new device. Twice the
weights cross the wire, evenly on all links, for any map.

The weights move as uint32 words, so that FP8 values and their float32 scales move together. A checksum of each replica
is compared before and after. The layer's weights and its placement are replaced together, or not at all if a checksum
differs. The stacks are updated in place if they are donated (on a GPU; XLA:CPU writes an FP8 stack through float16, and
so copies it).

Everything runs inside `shard_map`, on one device. Shapes: L layers, Z devices, Ed replicas per device, Er = Z * Ed
replicas, E experts, Ec replicas of the most replicated expert, U words per replica.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.experts.placement import Placement
from sharding.mesh import Machine
from sharding.words import from_words, to_words

TEMPORARY_LAYERS = 3
"""Temporary memory of a move on a GPU, in units of one layer's experts on a device (a test compiles it)."""


class LayerMove(NamedTuple):
    """A new expert map of one layer: the source replica of each replica, and the layer's part of `Placement`."""

    layer: Any  # [] int32, in the placement
    source: Any  # [Er] int32
    replicas: Any  # [E, Ec] int32
    copies: Any  # [E] int32


def move_layer(
    stacks: Any, placement: Placement, move: LayerMove, machine: Machine, first_layer: int = 0
) -> tuple[Any, Placement, jax.Array]:
    """Executes a move; returns the stacks, the placement and whether it succeeded, which is equal on all devices.

    `stacks` is a tree of `[L, Ed, ...]` arrays, the replicas of this device; `placement` and `move` are equal on all.
    The placement may have more layers than the stacks, whose first layer is `first_layer` in it.
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

    def replace_weights(stack: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(stack, jnp.where(intact, new, old), layer, 0)

    def replace_placement(array: jax.Array, new: jax.Array) -> jax.Array:
        old = lax.dynamic_index_in_dim(array, move.layer, keepdims=False)
        return lax.dynamic_update_index_in_dim(array, jnp.where(intact, new, old), move.layer, 0)

    placed = Placement(
        replace_placement(placement.replicas, move.replicas), replace_placement(placement.copies, move.copies)
    )
    return jax.tree.map(replace_weights, stacks, old, new), placed, intact


def permute(words: jax.Array, source: jax.Array, machine: Machine) -> jax.Array:
    """Returns this device's replicas after the move: replica p gets the words of `source[p]`; `words` are `[Ed, U]`."""
    Ed, U = words.shape
    Z = machine.devices
    width = -(-U // Z)
    slices = jnp.pad(words, ((0, 0), (0, Z * width - U))).reshape(Ed, Z, width)
    mine = _all_to_all(slices.transpose(1, 0, 2), machine)  # [Z, Ed, width]: my slice of all replicas, in their order
    permuted = mine.reshape(Z * Ed, width)[source].reshape(Z, Ed, width)
    return _all_to_all(permuted, machine).transpose(1, 0, 2).reshape(Ed, Z * width)[:, :U]


def checksums(words: jax.Array) -> jax.Array:
    """Returns a uint32 checksum per row of `words` `[Ed, U]`.

    It detects any change of a single word, and nearly all other changes. Words are weighted by odd numbers, so that it
    detects swapped words too.
    """
    weight = 2 * lax.iota(jnp.uint32, words.shape[1]) + 1
    return (words * weight).sum(axis=1, dtype=jnp.uint32)


def _all_to_all(blocks: jax.Array, machine: Machine) -> jax.Array:
    """Sends block j of the leading axis `[Z, ...]` to device j; block i of the result came from device i."""
    return lax.all_to_all(blocks, machine.axes, split_axis=0, concat_axis=0, tiled=True)
