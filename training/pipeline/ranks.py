"""Data and expert parallelism over the devices of a pipeline rank.

A rank's devices are `data` teams of `experts` devices: teams along the mesh axis `node`, a team's devices along `gpu`.
All of them split the rows of a micro-batch. Those of a team split the experts, so each team has every expert once.

Programs are written for one device and mapped over the rank's with `shard_map`, on an abstract mesh, so that all ranks
share them. Arrays have one of three partitions. *Rows* are split by row. *Whole* parameters are replicated, except
experts, which are split by expert. *Partial* values belong to one device, with a leading axis `[Z]` of the devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from dsv3.model.layers.experts import LOCAL_EXPERTS, RoutedExperts
from sharding.mesh import DEVICES, NODE, AxisTable, rank_mesh
from training.pipeline.experts import TEAM, AllToAllExperts
from training.pipeline.schedules import RankSize

SPLIT = PartitionSpec(DEVICES)
"""Partition of rows, and of partial values."""
EVERYWHERE = PartitionSpec()
TABLE = AxisTable(experts=TEAM, heads=(), heads_latent=(), mlp=(), gate_up=())
"""Partitions of parameters: only experts are split."""


def size_of(mesh: Mesh) -> RankSize:
    """Returns the size of a rank on `mesh`."""
    return RankSize(mesh.shape[NODE], mesh.size // mesh.shape[NODE])


def rank_meshes(devices: Sequence[jax.Device], ranks: int, size: RankSize) -> list[Mesh]:
    """Returns a mesh for each of `ranks`, over `devices` of one or several processes; some devices may be left over.

    Each process has an equal share of every rank, so sends between ranks stay inside a process; collectives of a rank
    do not. Teams are split over processes before their devices are.

    Raises ValueError if a rank does not divide over the processes, or a process has too few devices.
    """
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    share, rest = divmod(size.devices, len(by_process))
    if rest:
        raise ValueError(
            f"data={size.data} x expert={size.experts} devices of a rank do not divide over {len(by_process)} processes"
        )
    if (available := min(map(len, by_process.values()))) < ranks * share:
        needed = f"{ranks} ranks of {size.devices} devices need {ranks * share} devices in each process"
        raise ValueError(f"{needed}, but one has {available}")
    of_rank = [
        [device for own in by_process.values() for device in own[rank * share : (rank + 1) * share]]
        for rank in range(ranks)
    ]
    return [rank_mesh(of, num_nodes=size.data) for of in of_rank]


def routed_experts(size: RankSize) -> RoutedExperts:
    """Returns the routed experts of a rank: local, or spread over a team."""
    return LOCAL_EXPERTS if size.experts == 1 else AllToAllExperts(size.experts)


def spread(function: Callable[..., Any], size: RankSize, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Maps `function`, written for one device, over a rank's devices; `inputs` and `outputs` are `PartitionSpec`s."""
    mesh = AbstractMesh((size.data, size.experts, 1, 1), DEVICES, axis_types=(AxisType.Auto,) * len(DEVICES))
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def partial(tree: Any) -> Any:
    """Adds the device axis to a device's values, inside `spread`."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def own(tree: Any) -> Any:
    """Removes the device axis of partial values, inside `spread`."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def is_partition(node: Any) -> bool:
    """Returns whether a node of a tree is a partition."""
    return isinstance(node, PartitionSpec)


def sum_gradient(partition: PartitionSpec, gradient: jax.Array) -> jax.Array:
    """Returns a weight's gradient over all rows of the rank, inside `spread`; experts already have their team's."""
    return lax.psum(gradient, NODE if any(partition) else DEVICES)


def split_over_teams(partition: PartitionSpec, shape: Sequence[int], size: RankSize) -> PartitionSpec:
    """Returns the partition with one more dimension split over the teams, so that optimizer state is not replicated.

    It is the first unsplit dimension that the teams divide; without one the partition is unchanged.
    """
    entries = [*partition, *[None] * (len(shape) - len(partition))]
    free = (i for i, n in enumerate(shape) if entries[i] is None and n % size.data == 0)
    place = next(free, None) if size.data > 1 else None
    return partition if place is None else PartitionSpec(*entries[:place], NODE, *entries[place + 1 :])
