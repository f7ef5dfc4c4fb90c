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
    return _complete(phy2log, rank, logcnt)


def map_of(phy2log: np.ndarray, num_experts: int) -> ExpertMap:
    """The map of `num_experts` experts whose slots hold `phy2log` [L, R]; copies are numbered in the order of slots."""
    order = np.argsort(phy2log, axis=1, kind="stable")
    held = np.take_along_axis(phy2log, order, axis=1)
    logcnt = (phy2log[:, :, None] == np.arange(num_experts)).sum(axis=1)
    before = np.cumsum(logcnt, axis=1) - logcnt
    rank = np.empty_like(phy2log)
    number = np.arange(phy2log.shape[1]) - np.take_along_axis(before, held, axis=1)
    np.put_along_axis(rank, order, number, axis=1)
    return _complete(phy2log, rank, logcnt)


def keep_in_place(new: ExpertMap, old: ExpertMap, num_groups: int, num_nodes: int, num_gpus: int) -> ExpertMap:
    """`new` with its GPUs renumbered, and the slots within each, so that experts stay where `old` has them.

    The policies say which experts share a GPU and which GPUs a node, not which of them. GPUs (and nodes, where the
    policy is hierarchical) are matched by the experts they have in common, greedily from the best pair down. The loads
    of the GPUs are those of `new` in another order, so the balance is the same.
    """
    phy2log, E = new.phy2log, new.logcnt.shape[1]
    if num_groups % num_nodes == 0 and num_nodes > 1:
        phy2log = _match_units(phy2log, old.phy2log, E, num_nodes)
    else:
        num_nodes = 1
    L, R = phy2log.shape
    of_nodes = _match_units(
        phy2log.reshape(L * num_nodes, -1), old.phy2log.reshape(L * num_nodes, -1), E, num_gpus // num_nodes
    )
    span = R // num_gpus
    return map_of(_match_slots(of_nodes.reshape(-1, span), old.phy2log.reshape(-1, span)).reshape(L, R), E)


def sources(new: ExpertMap, old: ExpertMap) -> np.ndarray:
    """The slot of `old` that each slot of `new` takes its expert from [L, R]: itself where it holds it already."""
    first = np.take_along_axis(old.log2phy[:, :, 0], new.phy2log, axis=1)
    return np.where(new.phy2log == old.phy2log, np.arange(new.phy2log.shape[1]), first)


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


def _complete(phy2log: np.ndarray, rank: np.ndarray, logcnt: np.ndarray) -> ExpertMap:
    """The map, from the expert and the number of the copy that each slot holds."""
    log2phy = np.full((*logcnt.shape, int(logcnt.max())), -1, np.int64)
    log2phy[np.arange(len(phy2log))[:, None], phy2log, rank] = np.arange(phy2log.shape[1])
    return ExpertMap(phy2log, log2phy, logcnt)


def _match_units(new: np.ndarray, old: np.ndarray, E: int, units: int) -> np.ndarray:
    """`new` [rows, n], its `units` parts reordered so that many experts are in the part where `old` has them."""
    rows, n = new.shape
    parts = new.reshape(rows, units, -1)
    # Without a matrix product: BLAS would wait for its threads on cores that serve.
    held = np.take_along_axis(_holds(new, E, units), old[:, None, :], axis=2)  # [rows, new unit, n]
    common = held.reshape(rows, units, units, -1).sum(axis=3, dtype=np.int16)  # [rows, new unit, old unit]
    order = np.empty((rows, units), np.int64)
    row = np.arange(rows)
    for _ in range(units):
        best, place = np.divmod(common.reshape(rows, -1).argmax(axis=1), units)
        order[row, place] = best
        common[row, best], common[row, :, place] = -1, -1
    return parts[row[:, None], order].reshape(rows, n)


def _holds(phy2log: np.ndarray, E: int, units: int) -> np.ndarray:
    """Whether each unit has a copy of each expert, int16 [rows, units, E]."""
    rows = len(phy2log)
    holds = np.zeros((rows, units, E), np.int16)
    unit = np.repeat(np.arange(units), phy2log.shape[1] // units)
    holds[np.arange(rows)[:, None], unit, phy2log] = 1
    return holds


def _match_slots(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """`new` [GPUs, span] with what `old` has too in the same slots, and the others in the free ones, in order."""
    left, placed = new.copy(), np.full_like(new, -1)
    for slot in range(new.shape[1]):
        same = left == old[:, slot : slot + 1]
        gpu = np.flatnonzero(same.any(axis=1))
        placed[gpu, slot] = old[gpu, slot]
        left[gpu, same[gpu].argmax(axis=1)] = -1
    placed[placed < 0] = left[left >= 0]  # as many of each on every GPU, and both row by row
    return placed


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
