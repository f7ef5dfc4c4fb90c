"""Where the replicas of each expert stand, as arrays on the devices, and which replica serves which token.

A placement is an argument of the compiled step, so a rebalanced one needs no recompilation. `sharding.experts.eplb`
computes expert maps. Shapes: T tokens, K experts per token, L MoE layers, E experts, Er replicas, Ec replicas of the
most replicated expert (padded, so that every placement has the same shape).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sharding.experts.eplb import ExpertMap, map_of


class Placement(NamedTuple):
    """The replicas of each expert in each layer of one stack.

    `replicas` `[L, E, Ec]` int32: their ids, cyclically repeated. `copies` `[L, E]` int32: how many there are.
    """

    replicas: Any
    copies: Any


def placement_of(expert_map: ExpertMap, max_copies: int) -> Placement:
    """Returns the placement that a map describes, as numpy arrays with `Ec` = `max_copies`.

    Raises ValueError when an expert has more replicas than that.
    """
    most = int(expert_map.logcnt.max())
    if most > max_copies:
        raise ValueError(f"an expert has {most} copies, the compiled step allows {max_copies}")
    columns = np.arange(max_copies) % expert_map.logcnt[:, :, None]
    replicas = np.take_along_axis(expert_map.log2phy, columns, axis=2)
    return Placement(replicas.astype(np.int32), expert_map.logcnt.astype(np.int32))


def expert_map_of(placement: Placement, num_replicas: int) -> ExpertMap:
    """Returns the map that describes a placement (numpy arrays).

    Copies are numbered in the order of their replica ids.
    """
    L, E, Ec = placement.replicas.shape
    phy2log = np.empty((L, num_replicas), np.int64)
    np.put_along_axis(phy2log, placement.replicas.reshape(L, -1), np.repeat(np.arange(E), Ec)[None], axis=1)
    return map_of(phy2log, E)


def choose_replicas(ids: jax.Array, replicas: jax.Array, copies: jax.Array, device: jax.Array | int) -> jax.Array:
    """Chooses replicas `[T, K]` for expert `ids` `[T, K]`, where -1 stays -1, from one layer's placement.

    `replicas` `[E, Ec]` and `copies` `[E]` are the layer's. The tokens of a device that want one expert take its
    replicas in turn, so no replica gets more than one token more than another. Devices start at different replicas, so
    that the odd tokens spread too.
    """
    flat = ids.reshape(-1)
    expert = jnp.maximum(flat, 0)
    if replicas.shape[1] == 1:  # nothing to choose from
        chosen = replicas[expert, 0]
    else:
        turn = _earlier_equals(flat, copies.shape[0]) + device
        chosen = replicas[expert, turn % copies[expert]]
    return jnp.where(flat >= 0, chosen, -1).reshape(ids.shape)


def _earlier_equals(ids: jax.Array, num_experts: int) -> jax.Array:
    """Counts for each of `ids` [M] the earlier ones that are equal, [M] int32; anything for ids below 0.

    It sorts. Cumulated one-hot counts [M, E] would take 67 MB per layer for 8,192 tokens of 8 experts, and on a CPU 12
    to 19 times the time.
    """
    order = jnp.argsort(ids, stable=True)
    ranked = ids[order]
    first = jnp.searchsorted(ranked, jnp.arange(num_experts), method="scan_unrolled")  # unrolled: no loop on a GPU
    number = jnp.arange(ids.shape[0], dtype=jnp.int32) - first[jnp.maximum(ranked, 0)].astype(jnp.int32)
    return jnp.zeros_like(number).at[order].set(number, unique_indices=True)
