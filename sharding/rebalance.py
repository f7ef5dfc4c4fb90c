"""Moves a layer's experts to other slots, on the devices, between two steps: one program for every permutation.

An exchange addressed by the map (this slot to that device) would need a program for each map. Instead every expert is
cut into as many slices as there are devices. The first all-to-all gives device j slice j of every slot; with all slots
of its slice at hand, a device permutes them by a local gather, whose indices are data; the second all-to-all brings
each slot's slices together where the slot is. Twice the weights cross the wire, evenly on all links, for any map.

The weights are moved as uint32 words, whatever their type: FP8 values and their float32 scales go in one piece. A
checksum of each slot is taken before and after; the layer's weights and its part of the placement are taken over
together, or, where a single checksum differs, neither is. The stacks are updated in place when they are donated (on a
GPU; XLA:CPU writes an FP8 stack by way of float16, and so copies it).

Everything runs inside `shard_map`, on one device. Letters: L layers, S slots a device, N devices, R = N * S slots,
E experts, C copies of the most copied expert, W words of a slot.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.placement import Placement
from sharding.transport import Machine
from sharding.words import from_words, to_words

LAYERS_HELD = 3
"""Temporary memory of a move on a GPU, in layers' experts of one device (a test compiles it)."""


class LayerMove(NamedTuple):
    """A new map of one layer: the slot that each slot's expert comes from, and the layer's part of `Placement`."""

    layer: Any  # [] int32
    source: Any  # [R] int32
    slots: Any  # [E, C] int32
    copies: Any  # [E] int32


def move_layer(
    stacks: Any, placement: Placement, move: LayerMove, machine: Machine
) -> tuple[Any, Placement, jax.Array]:
    """Carries out a move; returns the stacks, the placement and, the same everywhere, whether it was taken over.

    `stacks` is a tree of `[L, S, ...]` arrays, the slots of this device; `placement` and `move` are equal on all.
    """
    old = jax.tree.map(lambda stack: lax.dynamic_index_in_dim(stack, move.layer, keepdims=False), stacks)
    words = to_words(old)
    before = lax.all_gather(checksums(words), machine.axes, tiled=True)  # [R]
    new = from_words(permute(words, move.source, machine), old)
    first = lax.axis_index(machine.axes) * words.shape[0]
    wanted = before[lax.dynamic_slice_in_dim(move.source, first, words.shape[0])]
    differ = (checksums(to_words(new)) != wanted).any()
    intact = lax.pmax(differ.astype(jnp.int32), machine.axes) == 0

    def take_over(stack: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(stack, jnp.where(intact, new, old), move.layer, 0)

    def take_over_layer(stack: jax.Array, new: jax.Array) -> jax.Array:
        return take_over(stack, lax.dynamic_index_in_dim(stack, move.layer, keepdims=False), new)

    placed = Placement(take_over_layer(placement.slots, move.slots), take_over_layer(placement.copies, move.copies))
    return jax.tree.map(take_over, stacks, old, new), placed, intact


def permute(words: jax.Array, source: jax.Array, machine: Machine) -> jax.Array:
    """Slot p gets the words of slot `source[p]`, of all devices' slots; `words` are this device's, `[S, W]`."""
    S, W = words.shape
    N = machine.ranks
    width = -(-W // N)
    slices = jnp.pad(words, ((0, 0), (0, N * width - W))).reshape(S, N, width)
    mine = _all_to_all(slices.transpose(1, 0, 2), machine)  # [N, S, width]: my slice of all slots, in their order
    permuted = mine.reshape(N * S, width)[source].reshape(N, S, width)
    return _all_to_all(permuted, machine).transpose(1, 0, 2).reshape(S, N * width)[:, :W]


def checksums(words: jax.Array) -> jax.Array:
    """A uint32 for each row of `words` `[S, W]` that every change of a single word changes, and nearly every other.

    Words are weighed by odd numbers, so that exchanged words show too.
    """
    weight = 2 * lax.iota(jnp.uint32, words.shape[1]) + 1
    return (words * weight).sum(axis=1, dtype=jnp.uint32)


def _all_to_all(blocks: jax.Array, machine: Machine) -> jax.Array:
    """Block j of the leading axis `[N, ...]` to device j; block i of the result came from device i."""
    return lax.all_to_all(blocks, machine.axes, split_axis=0, concat_axis=0, tiled=True)
