"""Memory of each device of a pipeline rank, from the shapes of the trainer's state and its programs' saved values."""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.model.params import abstract
from sharding.mesh import DEVICES, NODE
from training.config import TrainingConfig
from training.pipeline import ranks
from training.pipeline.programs import StageProgram, input_shapes, trace_stages, weight_shapes
from training.pipeline.ranks import is_partition, split_over_teams
from training.pipeline.schedules import PassKind, PipelineSchedule, RankSize
from training.pipeline.stages import Stage, cut, extract_stage, partitions

MASTERS = 3
"""Float32 values per parameter that the owner of a stage keeps: the parameter and AdamW's two moments."""


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """Bytes of one device of a rank.

    `weights` are those that its stages compute with (of two stages if the schedule has two directions), `gradients`
    their float32 sums, `optimizer` its share of the float32 parameters and moments of the stages that it owns.
    `activations` are the most that micro-batches in flight keep for their backwards. Not counted: working memory of
    programs, and copies in sends.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def needed(self) -> int:
        """The sum of all."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(config: TrainingConfig, schedule: PipelineSchedule, rows: int, size: RankSize) -> tuple[RankMemory, ...]:
    """Returns the memory of each rank for micro-batches of `rows` rows, which the devices of a rank split.

    Traces the stages' programs without compiling them.
    """
    stages = cut(config.model, schedule.stages)
    programs = trace_stages(config, stages, rows, size)
    saved = {stage.index: _saved(config, programs[stage.index], rows) for stage in stages}
    held = {stage.index: weight_shapes(config, stage) for stage in stages}
    memory = []
    for rank in range(schedule.ranks):
        own = [schedule.stage(rank, direction) for direction in range(schedule.directions)]
        bytes_of = [_bytes(held[i], programs[i].weight_partitions, size) for i in own]
        elements = [_bytes(_as_float32(held[i]), programs[i].weight_partitions, size) for i in own]
        owned = (stage for stage in stages if schedule.rank(stage.index, 0) == rank)
        memory.append(
            RankMemory(sum(bytes_of), sum(elements), _optimizer(config, owned, size), _peak(schedule, rank, saved))
        )
    return tuple(memory)


def _saved(config: TrainingConfig, program: StageProgram, rows: int) -> int:
    """Returns the bytes that one micro-batch's forward keeps for its backward on one device."""
    stage = program.stage
    x, tokens, data = input_shapes(config, stage, rows)
    entry = tokens if stage.first else x
    _, _, saved = jax.eval_shape(program.forward_program(), weight_shapes(config, stage), entry, data)
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))


def _peak(schedule: PipelineSchedule, rank: int, saved: dict[int, int]) -> int:
    """Returns the most bytes that the rank's micro-batches keep at once; an input gradient is assumed to free none."""
    held: collections.Counter[tuple[int, int]] = collections.Counter()
    peak = 0
    for operation in schedule.orders[rank]:
        chunks = [(part.kind, (schedule.stage(rank, part.direction), schedule.batch(part))) for part in operation]
        held.update({chunk: saved[chunk[0]] for kind, chunk in chunks if kind is PassKind.FORWARD})
        peak = max(peak, held.total())
        for kind, chunk in chunks:
            if kind in (PassKind.BACKWARD, PassKind.WEIGHT):
                del held[chunk]
    return peak


def _optimizer(config: TrainingConfig, owned: Iterable[Stage], size: RankSize) -> int:
    everything = abstract(config.model, jnp.float32)
    total = 0
    for stage in owned:
        shapes = extract_stage(everything, config.model, stage, _one_layer)
        where = partitions(config.model, stage, computing=False)
        spread = jax.tree.map(
            lambda p, leaf: split_over_teams(p, leaf.shape, size), where, shapes, is_leaf=is_partition
        )
        total += MASTERS * _bytes(shapes, spread, size)
    return total


def _one_layer(leaf: Any, _: slice) -> Any:
    return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype)


def _as_float32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), tree)


def _bytes(shapes: Any, where: Any, size: RankSize) -> int:
    """Returns the bytes of one device of a tree with these partitions."""
    sizes = dict.fromkeys(DEVICES, 1) | {NODE: size.data, ranks.TEAM[0]: size.experts}
    flat = jax.tree.leaves(where, is_leaf=is_partition)
    total = 0
    for partition, leaf in zip(flat, jax.tree.leaves(shapes), strict=True):
        axes = [axis for entry in partition if entry for axis in ([entry] if isinstance(entry, str) else entry)]
        total += math.prod(leaf.shape) * leaf.dtype.itemsize // math.prod(sizes[axis] for axis in axes)
    return total
