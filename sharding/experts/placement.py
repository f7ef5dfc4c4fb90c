"""Expert placement: the replicas of each expert, as arrays on the devices, and the replica that serves each token.

A placement is an argument of the compiled step, so rebalancing needs no recompilation. `sharding.experts.eplb`
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
    """Returns the placement of an expert map, as numpy arrays with `Ec` = `max_copies`.

    Raises ValueError if an expert has more replicas than that.
    """
    most = int(expert_map.logcnt.max())
    if most > max_copies:
        raise ValueError(f"an expert has {most} replicas, but the compiled step allows at most {max_copies}")
    columns = np.arange(max_copies) % expert_map.logcnt[:, :, None]
    replicas = np.take_along_axis(expert_map.log2phy, columns, axis=2)
    return Placement(replicas.astype(np.int32), expert_map.logcnt.astype(np.int32))


def expert_map_of(placement: Placement, num_replicas: int) -> ExpertMap:
    """Returns the expert map of a placement (numpy arrays); copies are numbered by replica id."""
    L, E, Ec = placement.replicas.shape
    phy2log = np.empty((L, num_replicas), np.int64)
    np.put_along_axis(phy2log, placement.replicas.reshape(L, -1), np.repeat(np.arange(E), Ec)[None], axis=1)
    return map_of(phy2log, E)


def choose_replicas(ids: jax.Array, replicas: jax.Array, copies: jax.Array, device: jax.Array | int) -> jax.Array:
    """Selects replicas `[T, K]` for expert `ids` `[T, K]`, where -1 stays -1, from one layer's placement.

    `replicas` `[E, Ec]` and `copies` `[E]` are the layer's. The tokens of a device that select one expert are assigned
    to its replicas round-robin, so the counts of replicas differ by at most one. Devices start at different replicas,
    so that the remainders spread too.
    """
    flat = ids.reshape(-1)
    expert = jnp.maximum(flat, 0)
    if replicas.shape[1] == 1:
        selected = replicas[expert, 0]
    else:
        number = _earlier_equals(flat, copies.shape[0]) + device
        selected = replicas[expert, number % copies[expert]]
    return jnp.where(flat >= 0, selected, -1).reshape(ids.shape)


def _earlier_equals(ids: jax.Array, num_experts: int) -> jax.Array:
    """Counts the earlier equal ids of each of `ids` [M], [M] int32; undefined for ids below 0.

    Uses a sort: cumulated one-hot counts [M, E] would take 67 MB per layer for 8,192 tokens of 8 experts, and on a CPU
    12 to 19 times the time.
    """
    order = jnp.argsort(ids, stable=True)
    ranked = ids[order]
    first = jnp.searchsorted(ranked, jnp.arange(num_experts), method="scan_unrolled")  # unrolled: no loop on a GPU
    number = jnp.arange(ids.shape[0], dtype=jnp.int32) - first[jnp.maximum(ranked, 0)].astype(jnp.int32)
    return jnp.zeros_like(number).at[order].set(number, unique_indices=True)
