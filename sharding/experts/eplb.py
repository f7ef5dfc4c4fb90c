"""Expert-parallel load balancing (EPLB): which expert each replica holds.

An *expert* is one of the model's. A *replica* is one stored copy of it on one device (logical and physical experts in
EPLB, whose names the fields of `ExpertMap` keep). Replicas are numbered device by device, node by node.
The policies and their results are those of DeepSeek's EPLB (open-source week, day 4). Ties
are broken by a stable order; the original leaves them to its sort.

Shapes: L layers, E experts, Er replicas, Ec replicas of the most replicated expert, Z devices.
"""

from typing import NamedTuple

import numpy as np


class ExpertMap(NamedTuple):
    """Which expert each replica holds, per layer; all int64.

    `phy2log` [L, Er]: the expert of each replica. `log2phy` [L, E, Ec]: the replicas of each expert, -1 beyond its
    copies. `logcnt` [L, E]: the number of copies of each expert.
    """

    phy2log: np.ndarray
    log2phy: np.ndarray
    logcnt: np.ndarray


def rebalance_experts(
    weight: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_devices: int
) -> ExpertMap:
    """Places `num_replicas` replicas of experts on `num_devices` devices so that the load, `weight` [L, E], is even.

    When the nodes divide the expert groups the policy is hierarchical. Whole groups are packed onto nodes, so that
    group-limited routing keeps a token's traffic inside few nodes. Then experts are replicated within a node, and
    replicas packed onto its devices. Otherwise the same steps run over the whole machine at once (global policy).
    Loads are compared in float32.

    Raises ValueError for counts that do not divide, and for loads that are negative or not finite.
    """
    weight = np.asarray(weight, np.float32)
    _check(weight, num_replicas, num_groups, num_nodes, num_devices)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    phy2log, rank, logcnt = _place(weight, num_replicas, num_groups, num_nodes, num_devices)
    return _complete(phy2log, rank, logcnt)


def map_of(phy2log: np.ndarray, num_experts: int) -> ExpertMap:
    """Returns the map of `num_experts` experts that `phy2log` [L, Er] describes; copies are numbered in their order."""
    order = np.argsort(phy2log, axis=1, kind="stable")
    held = np.take_along_axis(phy2log, order, axis=1)
    logcnt = (phy2log[:, :, None] == np.arange(num_experts)).sum(axis=1)
    before = np.cumsum(logcnt, axis=1) - logcnt
    rank = np.empty_like(phy2log)
    number = np.arange(phy2log.shape[1]) - np.take_along_axis(before, held, axis=1)
    np.put_along_axis(rank, order, number, axis=1)
    return _complete(phy2log, rank, logcnt)


def keep_in_place(new: ExpertMap, old: ExpertMap, num_groups: int, num_nodes: int, num_devices: int) -> ExpertMap:
    """Renumbers the devices of `new`, and the replicas within each, so that few experts move from their place in `old`.

    The policies decide which experts share a device and which devices a node, not which device or node. Devices
    (and nodes, where the policy is hierarchical) are matched by the experts they have in common, greedily from the best
    pair down. The devices have the loads of `new` in another order, so the balance is the same.
    """
    phy2log, E = new.phy2log, new.logcnt.shape[1]
    if num_groups % num_nodes == 0 and num_nodes > 1:
        phy2log = _match_units(phy2log, old.phy2log, E, num_nodes)
    else:
        num_nodes = 1
    L, Er = phy2log.shape
    of_nodes = _match_units(
        phy2log.reshape(L * num_nodes, -1), old.phy2log.reshape(L * num_nodes, -1), E, num_devices // num_nodes
    )
    Ed = Er // num_devices
    return map_of(_match_replicas(of_nodes.reshape(-1, Ed), old.phy2log.reshape(-1, Ed)).reshape(L, Er), E)


def sources(new: ExpertMap, old: ExpertMap) -> np.ndarray:
    """Returns the replica of `old` that each replica of `new` copies its weights from [L, Er]; itself if unchanged."""
    first = np.take_along_axis(old.log2phy[:, :, 0], new.phy2log, axis=1)
    return np.where(new.phy2log == old.phy2log, np.arange(new.phy2log.shape[1]), first)


def balancedness(weight: np.ndarray, expert_map: ExpertMap, num_devices: int) -> np.ndarray:
    """Returns the mean over maximum of the devices' loads per layer [L], 1 when perfectly even.

    Replicas share a load equally.
    """
    load = device_load(weight, expert_map, num_devices)
    peak = load.max(axis=1)
    return np.divide(load.mean(axis=1), peak, out=np.ones_like(peak), where=peak > 0)


def device_load(weight: np.ndarray, expert_map: ExpertMap, num_devices: int) -> np.ndarray:
    """Returns the load of each device [L, Z], float64, when the replicas of an expert share its load equally."""
    share = np.asarray(weight, np.float64) / expert_map.logcnt
    per_replica = np.take_along_axis(share, expert_map.phy2log, axis=1)
    return per_replica.reshape(len(per_replica), num_devices, -1).sum(axis=2)


def _place(
    weight: np.ndarray, replicas: int, groups: int, nodes: int, devices: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs the three steps; returns phy2log [L, Er], the copy number of each replica [L, Er] and logcnt [L, E]."""
    L, E = weight.shape
    group_size = E // groups
    node, place = _pack(weight.reshape(L, groups, group_size).sum(axis=2), nodes)
    first = (node * (groups // nodes) + place) * group_size
    log2node = (first[:, :, None] + np.arange(group_size)).reshape(L, E)  # experts renumbered node by node
    node2log = np.argsort(log2node, axis=1)

    load = np.take_along_axis(weight, node2log, axis=1).reshape(L * nodes, E // nodes)
    phy2node, rank, count = _replicate(load, replicas // nodes)
    device, place = _pack(np.take_along_axis(load / count.astype(np.float32), phy2node, axis=1), devices // nodes)
    order = np.argsort(device * (replicas // devices) + place, axis=1)

    phy2node = np.take_along_axis(phy2node, order, axis=1).reshape(L, nodes, -1)
    phy2node = (phy2node + np.arange(0, E, E // nodes)[:, None]).reshape(L, replicas)
    phy2log = np.take_along_axis(node2log, phy2node, axis=1)
    rank = np.take_along_axis(rank, order, axis=1).reshape(L, replicas)
    return phy2log, rank, np.take_along_axis(count.reshape(L, E), log2node, axis=1)


def _pack(load: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs the n items of each row into `packs` packs of n / packs: heaviest first, into the lightest pack not full.

    Returns the pack of each item and its place in the pack, both [rows, n].
    """
    rows, n = load.shape
    capacity = n // packs
    if capacity == 1:
        return np.tile(np.arange(n), (rows, 1)), np.zeros((rows, n), np.int64)
    pack, place = np.empty((2, rows, n), np.int64)
    total = np.zeros((rows, packs), np.float32)  # infinity for full packs
    filled = np.zeros((rows, packs), np.int64)
    row = np.arange(rows)
    for item in np.argsort(-load, axis=1, kind="stable").T:
        lightest = total.argmin(axis=1)
        pack[row, item], place[row, item] = lightest, filled[row, lightest]
        total[row, lightest] += load[row, item]
        filled[row, lightest] += 1
        total[row, lightest] = np.where(filled[row, lightest] == capacity, np.inf, total[row, lightest])
    return pack, place


def _replicate(load: np.ndarray, replicas: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gives every expert of a row one replica, and each further replica to the expert with the most load per copy.

    Returns the expert and the copy number of each replica, [rows, replicas], and the copies of each expert.
    """
    rows, n = load.shape
    expert_of = np.tile(np.arange(replicas), (rows, 1))
    rank = np.zeros((rows, replicas), np.int64)
    count = np.ones((rows, n), np.int64)
    share = load.copy()
    row = np.arange(rows)
    for replica in range(n, replicas):
        expert = share.argmax(axis=1)
        expert_of[:, replica], rank[:, replica] = expert, count[row, expert]
        count[row, expert] += 1
        share[row, expert] = load[row, expert] / count[row, expert].astype(np.float32)
    return expert_of, rank, count


def _complete(phy2log: np.ndarray, rank: np.ndarray, logcnt: np.ndarray) -> ExpertMap:
    """Returns the map in which replicas hold experts `phy2log` as their copies number `rank`."""
    log2phy = np.full((*logcnt.shape, int(logcnt.max())), -1, np.int64)
    log2phy[np.arange(len(phy2log))[:, None], phy2log, rank] = np.arange(phy2log.shape[1])
    return ExpertMap(phy2log, log2phy, logcnt)


def _match_units(new: np.ndarray, old: np.ndarray, E: int, units: int) -> np.ndarray:
    """Reorders the `units` parts of `new` [rows, n] so that many experts are in the part where `old` has them."""
    rows, n = new.shape
    parts = new.reshape(rows, units, -1)
    # No matrix product: BLAS threads would compete for the cores of the server.
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
    """Returns whether each unit has a copy of each expert, int16 [rows, units, E]."""
    rows = len(phy2log)
    holds = np.zeros((rows, units, E), np.int16)
    unit = np.repeat(np.arange(units), phy2log.shape[1] // units)
    holds[np.arange(rows)[:, None], unit, phy2log] = 1
    return holds


def _match_replicas(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Reorders `new` [devices, Ed]: experts of `old` keep their index, the others fill the free ones in order."""
    left, placed = new.copy(), np.full_like(new, -1)
    for place in range(new.shape[1]):
        same = left == old[:, place : place + 1]
        device = np.flatnonzero(same.any(axis=1))
        placed[device, place] = old[device, place]
        left[device, same[device].argmax(axis=1)] = -1
    placed[placed < 0] = left[left >= 0]  # as many of each on every device, and both row by row
    return placed


def _check(weight: np.ndarray, replicas: int, groups: int, nodes: int, devices: int) -> None:
    if weight.ndim != 2 or not weight.size:
        raise ValueError(f"weight has shape {weight.shape}; it must be [layers, experts] and not empty")
    if not np.isfinite(weight).all() or (weight < 0).any():
        raise ValueError("weight holds a load that is negative or not finite")
    E = weight.shape[1]
    if min(replicas, groups, nodes, devices) < 1:
        raise ValueError(
            f"replicas {replicas}, groups {groups}, nodes {nodes} and devices {devices} must all be positive"
        )
    if replicas < E:
        raise ValueError(f"{replicas} replicas cannot hold {E} experts: use at least {E}")
    for name, whole, part_name, part in (
        ("replicas", replicas, "devices", devices),
        ("devices", devices, "nodes", nodes),
        ("experts", E, "groups", groups),
    ):
        if whole % part:
            raise ValueError(f"{whole} {name} do not divide over {part} {part_name}: make it a multiple of {part}")
