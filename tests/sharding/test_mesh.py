"""The table from logical to mesh axes: its partitions, its errors, and a changed line."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.model.params import ParamSpec, declare
from sharding.mesh import (
    AXES,
    DEVICES,
    OF_RANK,
    AxisTable,
    Machine,
    is_split,
    partition,
    partitions,
    rank_mesh,
    rank_size,
)

STACK = ("layers", "experts", None, None)


def test_every_declared_parameter_has_a_partition() -> None:
    specs = partitions(declare(DEEPSEEK_V3))
    assert specs.moe.moe.gate_up == PartitionSpec(None, DEVICES, None, None)
    assert specs.moe.attention.o == PartitionSpec(None, None, OF_RANK)
    assert specs.moe.moe.shared.gate_up == PartitionSpec(None, OF_RANK, None)
    assert specs.embed == PartitionSpec(None, None)


def test_a_changed_line_changes_the_layout() -> None:
    table = dataclasses.replace(AXES, experts=("node", "gpu"), vocab=OF_RANK)
    assert partition(STACK, table=table) == PartitionSpec(None, ("node", "gpu"), None, None)
    assert partition(("vocab", None), table=table) == PartitionSpec(OF_RANK, None)
    assert is_split("vocab", table) and not is_split("vocab")
    mesh = rank_mesh(jax.devices()[:8], num_nodes=2, tensor_parallel_size=2)
    assert Machine.from_mesh(mesh) == Machine(2, 4, DEVICES)
    assert Machine.from_mesh(mesh, table) == Machine(2, 2, ("node", "gpu"))


def test_the_devices_that_divide_pages_are_neighbors_in_a_rank() -> None:
    mesh = rank_mesh(jax.devices()[:8], tensor_parallel_size=4, context_shards=2)
    assert rank_size(mesh) == 4 and mesh.shape["context"] == 2
    assert [d.id for d in mesh.devices[0, 1, 0]] == [4, 5]
    with pytest.raises(ValueError, match="context_shards 3 does not divide tensor_parallel_size 4"):
        rank_mesh(jax.devices()[:8], tensor_parallel_size=4, context_shards=3)


def test_two_logical_axes_on_one_mesh_axis_are_rejected_by_name() -> None:
    declared = {"moe": {"gate_up": ParamSpec((2, 4, 8), ("layers", "experts", "mlp"))}}
    with pytest.raises(ValueError, match=r"moe\.gate_up: its axes 'experts' and 'mlp' both lie on mesh axis 'tensor'"):
        partitions(declared)
    assert partitions(declared, AxisTable(experts=("node", "gpu")))["moe"]["gate_up"] == PartitionSpec(
        None, ("node", "gpu"), OF_RANK
    )


def test_unknown_axes_are_rejected_by_name() -> None:
    with pytest.raises(ValueError, match=r"a parameter has the unknown logical axis 'head'; known are layers, experts"):
        partition(("layers", "head"))
    with pytest.raises(ValueError, match="logical axis 'mlp' lies on 'gpus'; mesh axes are node, gpu, tensor, context"):
        AxisTable(mlp=("gpus",))
    with pytest.raises(ValueError, match="their first mesh axis must be 'node'"):
        Machine.from_mesh(rank_mesh(jax.devices()[:2]), AxisTable(experts=("gpu",)))
