"""Expert-parallel load balancing: which physical slot holds a copy of which logical expert.

Terms: a *logical* expert is one of the model's; a *physical* expert (a replica) is a slot on a GPU that holds a copy of
one. Slots are numbered GPU by GPU, node by node. The policies and their results are those of DeepSeek's EPLB (open-
source week, day 4); ties are broken by a stable order, which the original leaves to its sort.

Shapes: L layers, E logical experts, R physical experts (replicas), C the largest number of copies of one expert.
"""

from typing import NamedTuple

import numpy as np


class ExpertMap(NamedTuple):
    """Placement of experts, per layer.

    `phy2log` [L, R]: the expert each slot holds. `log2phy` [L, E, C]: the slots of each expert, -1 beyond its copies.
    `logcnt` [L, E]: the number of copies of each expert. All int64.
    """

    phy2log: np.ndarray
    log2phy: np.ndarray
    logcnt: np.ndarray


def rebalance_experts(
    weight: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> ExpertMap:
    """Places `num_replicas` copies of experts on `num_gpus` GPUs so that the load, `weight` [L, E], is even.

    When the nodes divide the expert groups the policy is hierarchical: whole groups are packed onto nodes, so that
    group-limited routing keeps a token's traffic inside few nodes; then experts are copied within a node, and copies
    packed onto its GPUs. Otherwise the same steps run over the whole machine at once (global policy). Loads are
    compared in float32. Raises ValueError for counts that do not divide, and for loads that are negative or not finite.
    """
    weight = np.asarray(weight, np.float32)
    _check(weight, num_replicas, num_groups, num_nodes, num_gpus)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    phy2log, rank, logcnt = _place(weight, num_replicas, num_groups, num_nodes, num_gpus)
    log2phy = np.full((*logcnt.shape, int(logcnt.max())), -1, np.int64)
    layer = np.arange(len(weight))[:, None]
    log2phy[layer, phy2log, rank] = np.arange(num_replicas)
    return ExpertMap(phy2log, log2phy, logcnt)


def balancedness(weight: np.ndarray, expert_map: ExpertMap, num_gpus: int) -> np.ndarray:
    """Mean over maximum of the GPUs' loads in each layer [L], 1 when perfectly even; replicas share a load equally."""
    load = gpu_load(weight, expert_map, num_gpus)
    peak = load.max(axis=1)
    return np.divide(load.mean(axis=1), peak, out=np.ones_like(peak), where=peak > 0)


def gpu_load(weight: np.ndarray, expert_map: ExpertMap, num_gpus: int) -> np.ndarray:
    """Load of each GPU [L, num_gpus], float64, when the copies of an expert share its load equally."""
    share = np.asarray(weight, np.float64) / expert_map.logcnt
    per_slot = np.take_along_axis(share, expert_map.phy2log, axis=1)
    return per_slot.reshape(len(per_slot), num_gpus, -1).sum(axis=2)


def _place(weight: np.ndarray, R: int, groups: int, nodes: int, gpus: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three steps; returns phy2log [L, R], the replica number of each slot [L, R] and logcnt [L, E]."""
    L, E = weight.shape
    group_size = E // groups
    node, place = _pack(weight.reshape(L, groups, group_size).sum(axis=2), nodes)
    first = (node * (groups // nodes) + place) * group_size
    log2node = (first[:, :, None] + np.arange(group_size)).reshape(L, E)  # experts renumbered node by node
    node2log = np.argsort(log2node, axis=1)

    load = np.take_along_axis(weight, node2log, axis=1).reshape(L * nodes, E // nodes)
    slot2exp, rank, count = _replicate(load, R // nodes)
    gpu, place = _pack(np.take_along_axis(load / count.astype(np.float32), slot2exp, axis=1), gpus // nodes)
    order = np.argsort(gpu * (R // gpus) + place, axis=1)

    slot2exp = np.take_along_axis(slot2exp, order, axis=1).reshape(L, nodes, -1)
    slot2exp = (slot2exp + np.arange(0, E, E // nodes)[:, None]).reshape(L, R)
    phy2log = np.take_along_axis(node2log, slot2exp, axis=1)
    rank = np.take_along_axis(rank, order, axis=1).reshape(L, R)
    return phy2log, rank, np.take_along_axis(count.reshape(L, E), log2node, axis=1)


def _pack(load: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs n items a row into `packs` packs of n / packs: heaviest first, each into the lightest pack with room.

    Returns the pack of each item and its place in the pack, both [rows, n].
    """
    rows, n = load.shape
    room = n // packs
    if room == 1:
        return np.tile(np.arange(n), (rows, 1)), np.zeros((rows, n), np.int64)
    pack, place = np.empty((2, rows, n), np.int64)
    total = np.zeros((rows, packs), np.float32)  # of packs with room; a full pack weighs infinity
    filled = np.zeros((rows, packs), np.int64)
    row = np.arange(rows)
    for item in np.argsort(-load, axis=1, kind="stable").T:
        chosen = total.argmin(axis=1)
        pack[row, item], place[row, item] = chosen, filled[row, chosen]
        total[row, chosen] += load[row, item]
        filled[row, chosen] += 1
        total[row, chosen] = np.where(filled[row, chosen] == room, np.inf, total[row, chosen])
    return pack, place


def _replicate(load: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives every expert of a row one slot and each further slot to the expert with the most load a copy.

    Returns the expert of each slot and its replica number, [rows, slots], and the copies of each expert.
    """
    rows, n = load.shape
    slot2exp = np.tile(np.arange(slots), (rows, 1))
    rank = np.zeros((rows, slots), np.int64)
    count = np.ones((rows, n), np.int64)
    share = load.copy()
    row = np.arange(rows)
    for slot in range(n, slots):
        expert = share.argmax(axis=1)
        slot2exp[:, slot], rank[:, slot] = expert, count[row, expert]
        count[row, expert] += 1
        share[row, expert] = load[row, expert] / count[row, expert].astype(np.float32)
    return slot2exp, rank, count


def _check(weight: np.ndarray, R: int, groups: int, nodes: int, gpus: int) -> None:
    if weight.ndim != 2 or not weight.size:
        raise ValueError(f"weight has shape {weight.shape}; it must be [layers, experts] and not empty")
    if not np.isfinite(weight).all() or (weight < 0).any():
        raise ValueError("weight holds a load that is negative or not finite")
    E = weight.shape[1]
    if min(R, groups, nodes, gpus) < 1:
        raise ValueError(f"replicas {R}, groups {groups}, nodes {nodes} and gpus {gpus} must all be positive")
    if R < E:
        raise ValueError(f"{R} replicas cannot hold {E} experts: use at least {E}")
    for name, whole, part_name, part in (
        ("replicas", R, "gpus", gpus),
        ("gpus", gpus, "nodes", nodes),
        ("experts", E, "groups", groups),
    ):
        if whole % part:
            raise ValueError(f"{whole} {name} do not divide over {part} {part_name}: make it a multiple of {part}")
