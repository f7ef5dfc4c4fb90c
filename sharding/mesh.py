"""The device mesh, and the table that maps each logical axis of a parameter to mesh axes.

This is the only place that names mesh axes. A data-parallel *rank* owns its requests and their pages. With tensor
parallelism a rank is a group of devices: they split its attention heads and MLP widths, and hold the same batches,
pages and decode state.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

NODE, GPU, TENSOR, CONTEXT = DEVICES = ("node", "gpu", "tensor", "context")
"""Axes of the mesh, outermost first: `gpu` counts the ranks of a node, the last two the devices of a rank.

Along `context` the devices of a rank hold different tokens of each page, along `tensor` the same ones.
"""
RANKS = (NODE, GPU)
"""Axes of the data-parallel ranks: batches, pages and decode state lie along these, equal on the devices of a rank."""
OF_RANK = (TENSOR, CONTEXT)
"""Axes of the devices of a rank, which split its heads and widths: tensor parallelism."""
OF_NODE = (GPU, *OF_RANK)
"""Axes of the devices of a node."""
RANK_SPEC = PartitionSpec(RANKS)
"""Partition of an array whose leading axis is the rank: a batch, the decode state, pages that devices replicate."""
PAGES_SPEC = PartitionSpec(RANKS, None, CONTEXT)
"""Partition of pages `[ranks, pages, rows, width]` whose rows the devices of a rank divide."""

MeshAxes = tuple[str, ...]
"""Mesh axes that a dimension is split over, outermost first; empty where every device holds the whole dimension."""


@dataclasses.dataclass(frozen=True)
class AxisTable:
    """Which mesh axes split each logical axis of a parameter (`dsv3.model.params.Axis`).

    To try another layout, change a line here, or pass `dataclasses.replace(AXES, ...)` as `table`. The fused axes
    "heads_latent" and "gate_up" need their rows arranged first (`dsv3.model.tensor_parallel.arrange`).

    Raises ValueError for a mesh axis that does not exist.
    """

    layers: MeshAxes = ()
    experts: MeshAxes = DEVICES
    vocab: MeshAxes = ()
    channels: MeshAxes = ()
    heads: MeshAxes = OF_RANK
    heads_latent: MeshAxes = OF_RANK
    mlp: MeshAxes = OF_RANK
    gate_up: MeshAxes = OF_RANK

    def __post_init__(self) -> None:
        for logical, axes in dataclasses.asdict(self).items():
            if unknown := set(axes) - set(DEVICES):
                raise ValueError(
                    f"logical axis {logical!r} lies on {min(unknown)!r}; mesh axes are {', '.join(DEVICES)}"
                )

    def mesh_axes(self, logical: str | None, parameter: str = "a parameter") -> MeshAxes:
        """Returns the mesh axes of one logical axis, none for None.

        Raises ValueError for a logical axis that the table lacks.
        """
        if logical is None:
            return ()
        known = [field.name for field in dataclasses.fields(self)]
        if logical not in known:
            raise ValueError(f"{parameter} has the unknown logical axis {logical!r}; known are {', '.join(known)}")
        return getattr(self, logical)


AXES = AxisTable()
"""The default table; embedding and head may be sharded over a node in addition (`dsv3.model.vocabulary`)."""


def partition(axes: Sequence[str | None], parameter: str = "a parameter", table: AxisTable = AXES) -> PartitionSpec:
    """Returns the partition of a parameter with these logical axes; `parameter` names it in errors.

    Raises ValueError for an unknown logical axis, and if two of them lie on the same mesh axis.
    """
    by_dimension = [table.mesh_axes(logical, parameter) for logical in axes]
    used: dict[str, str | None] = {}
    for logical, mesh_axes in zip(axes, by_dimension, strict=True):
        for mesh_axis in mesh_axes:
            if mesh_axis in used:
                raise ValueError(
                    f"{parameter}: its axes {used[mesh_axis]!r} and {logical!r} both lie on mesh axis {mesh_axis!r}; "
                    "change one of them in sharding.mesh.AXES"
                )
            used[mesh_axis] = logical
    return PartitionSpec(*map(_entry, by_dimension))


def _entry(axes: MeshAxes) -> Any:
    """Returns the entry of a `PartitionSpec`: None, the one axis, or several."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def partitions(declared: Any, table: AxisTable = AXES) -> Any:
    """Returns a tree of partitions for a tree of declared parameters (`dsv3.model.params.ParamSpec`).

    Raises ValueError as `partition` does.
    """

    def leaf(path: Any, spec: Any) -> PartitionSpec:
        return partition(spec.axes, jax.tree_util.keystr(path, simple=True, separator="."), table)

    return jax.tree_util.tree_map_with_path(leaf, declared)


def is_split(logical: str | None, table: AxisTable = AXES) -> bool:
    """Returns whether exactly the devices of a rank split this logical axis."""
    return table.mesh_axes(logical) == OF_RANK


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices that share the experts: `nodes` of `gpus` each, along mesh axes `axes`, the node axis first."""

    nodes: int
    gpus: int
    axes: MeshAxes = (NODE, GPU)

    @classmethod
    def from_mesh(cls, mesh: Mesh, table: AxisTable = AXES) -> "Machine":
        """Returns the devices of `mesh` over which `table` shards the experts.

        Raises ValueError if the first mesh axis of the experts is not the node axis: transports count nodes by it.
        """
        if table.experts[:1] != (NODE,):
            raise ValueError(f"experts lie on {table.experts}; their first mesh axis must be {NODE!r}")
        gpus = math.prod(mesh.shape[axis] for axis in table.experts[1:])
        return cls(mesh.shape[NODE], gpus, table.experts)

    @property
    def devices(self) -> int:
        """Number of devices on all nodes, `Z`."""
        return self.nodes * self.gpus


def rank_mesh(
    devices: Sequence[jax.Device], num_nodes: int = 1, tensor_parallel_size: int = 1, context_shards: int = 1
) -> Mesh:
    """Returns a mesh over devices in the given order: equal nodes of ranks of `tensor_parallel_size` devices.

    Each `context_shards` neighbors of a rank divide the tokens of its pages. Raises ValueError if nodes and ranks do
    not divide the devices, or `context_shards` not the rank's; a rank never spans nodes.
    """
    if not devices or len(devices) % num_nodes:
        raise ValueError(f"{len(devices)} devices do not divide over {num_nodes} nodes")
    if (len(devices) // num_nodes) % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the {len(devices) // num_nodes} devices of "
            "a node: a rank's devices must be in one node"
        )
    if tensor_parallel_size % context_shards:
        raise ValueError(f"context_shards {context_shards} does not divide tensor_parallel_size {tensor_parallel_size}")
    shape = (num_nodes, -1, tensor_parallel_size // context_shards, context_shards)
    return Mesh(np.array(devices).reshape(shape), DEVICES, axis_types=(AxisType.Auto,) * len(DEVICES))


def rank_size(mesh: Mesh) -> int:
    """Returns the devices per rank: the tensor-parallel size."""
    return mesh.shape[TENSOR] * mesh.shape[CONTEXT]


def shardings(specs: Any, mesh: Mesh) -> Any:
    """Returns a tree of shardings for a tree of partitions."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
