"""Logical experts to the physical ones that hold them, on the device: the expert map as data.

The map is an argument of the compiled step, so a rebalanced map needs no recompilation. `sharding.eplb` computes maps.
Shapes: T tokens, K experts a token, L MoE layers, E logical experts, C copies of the most copied expert (padded, so
that a new map has the shape of the old one).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sharding.eplb import ExpertMap, map_of


class Placement(NamedTuple):
    """Slots of each logical expert in each layer `[L, E, C]` int32 (copies cyclically repeated) and copies `[L, E]`."""

    slots: Any
    copies: Any


def placement_of(expert_map: ExpertMap, max_copies: int) -> Placement:
    """The device form of a map, as numpy arrays of a shape that `max_copies` fixes.

    Raises ValueError when an expert has more copies than that.
    """
    most = int(expert_map.logcnt.max())
    if most > max_copies:
        raise ValueError(f"an expert has {most} copies, the compiled step allows {max_copies}")
    columns = np.arange(max_copies) % expert_map.logcnt[:, :, None]
    slots = np.take_along_axis(expert_map.log2phy, columns, axis=2)
    return Placement(slots.astype(np.int32), expert_map.logcnt.astype(np.int32))


def expert_map_of(placement: Placement, num_slots: int) -> ExpertMap:
    """The map that a placement (numpy arrays) was made of, its copies numbered in the order of their slots."""
    L, E, _ = placement.slots.shape
    phy2log = np.empty((L, num_slots), np.int64)
    np.put_along_axis(
        phy2log, placement.slots.reshape(L, -1), np.repeat(np.arange(E), placement.slots.shape[2])[None], axis=1
    )
    return map_of(phy2log, E)


def choose_replicas(ids: jax.Array, slots: jax.Array, copies: jax.Array, rank: jax.Array | int) -> jax.Array:
    """Physical ids `[T, K]` for logical `ids` `[T, K]` (-1 stays -1) of one layer, `slots` `[E, C]`, `copies` `[E]`.

    The tokens of a rank that want one expert take its copies in turn, and ranks start at different copies, so that
    replicas share their expert's load evenly within one token a rank.
    """
    E = copies.shape[0]
    flat = ids.reshape(-1)
    wanted = flat[:, None] == jnp.arange(E)  # [T * K, E]
    turn = (jnp.cumsum(wanted, axis=0, dtype=jnp.int32) * wanted).sum(axis=1) - 1 + rank
    expert = jnp.maximum(flat, 0)
    physical = slots[expert, turn % copies[expert]]
    return jnp.where(flat >= 0, physical, -1).reshape(ids.shape)
