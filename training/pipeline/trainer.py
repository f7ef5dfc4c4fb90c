"""The training step over a pipeline: parameters and moments by stage, the schedule's gradients, AdamW on each stage.

One rank owns a stage's float32 parameters and moments. They are split over the rank's teams, as in ZeRO, and experts
also over a team's devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding import processes
from sharding.mesh import shardings
from training.config import TrainingConfig
from training.pipeline.programs import stage_programs
from training.pipeline.ranks import EVERYWHERE, is_partition, size_of, split_over_teams
from training.pipeline.run import PipelineRunner, StepResult
from training.pipeline.schedules import PipelineSchedule, micro_batch_rows
from training.pipeline.stages import (
    Stage,
    StageParams,
    cut,
    declare_stage,
    merge,
    needs_embedding,
    partitions,
    slice_stage,
    weights,
)
from training.step import (
    SavedState,
    TrainState,
    adamw,
    by_layer,
    expert_load_peak,
    initial_state,
    map_parts,
    router_bias_change,
    shift_bias,
    stacked,
)


@dataclasses.dataclass(frozen=True)
class PipelineState:
    """A `TrainState` cut by stage. Each stage's parameters and moments are on its owner.

    If two ranks hold a stage, the other one receives the weights in every step, and sends its gradient.
    """

    params: tuple[StageParams, ...]
    moments: tuple[Any, ...]
    step: int


class PipelineTrainer:
    """Trains over the ranks of a schedule, each on its own mesh. It replaces `step.train_step` in a run.

    Raises ValueError if the schedule and the meshes do not fit the batch or the model.
    """

    def __init__(self, config: TrainingConfig, schedule: PipelineSchedule, meshes: Sequence[Mesh]):
        rows, self.size = _rows(config, schedule, meshes), size_of(meshes[0])
        self.config, self.schedule = config, schedule
        self.stages = cut(config.model, schedule.stages)
        programs = stage_programs(config, schedule.stages, rows, self.size)
        self.runner = PipelineRunner(schedule, programs, meshes, config.model.num_nextn_predict_layers)
        self.owners = [meshes[schedule.rank(stage.index, 0)] for stage in self.stages]
        everything = jax.eval_shape(lambda: by_layer(initial_state(config), cfg=config.model))
        self._shapes = [self._stage_shapes(stage, everything) for stage in self.stages]
        self._casts = [self._program_of_cast(stage) for stage in self.stages]
        self._updates = [self._program_of_update(stage) for stage in self.stages]

    def place(self, state: TrainState) -> PipelineState:
        """Cuts a state by stage and copies each part to its owner."""
        return self.restore_state(by_layer(state, cfg=self.config.model), int(state.step))

    def restore_state(self, saved: SavedState, step: int) -> PipelineState:
        """Returns the state after `step` steps from a saved one, on the host or with the shardings of `shapes`."""
        params, moments = [], []
        for stage, shapes in zip(self.stages, self._shapes, strict=True):
            cut_off = functools.partial(slice_stage, stage=stage)
            own = SavedState(cut_off(saved.params), map_parts(cut_off, saved.moments))
            placed = processes.place(own, jax.tree.map(lambda shape: shape.sharding, shapes))
            params.append(placed.params)
            moments.append(placed.moments)
        return PipelineState(tuple(params), tuple(moments), step)

    def saved_state(self, state: PipelineState) -> SavedState:
        """Returns the state layer by layer; copies nothing."""
        return SavedState(merge(state.params), map_parts(lambda *parts: merge(parts), *state.moments))

    def shapes(self) -> SavedState:
        """Returns the shapes and shardings with which to restore a saved state."""
        params = merge([own.params for own in self._shapes])
        return SavedState(params, map_parts(lambda *parts: merge(parts), *(own.moments for own in self._shapes)))

    def on_one_device(self, state: PipelineState) -> TrainState:
        """Joins the parts to one device's state, on this process's first device."""
        on_host = jax.tree.map(processes.whole, self.saved_state(state))
        return jax.device_put(stacked(on_host, self.config.model, state.step))

    def step(self, state: PipelineState, tokens: np.ndarray) -> tuple[PipelineState, dict[str, Any]]:
        """Trains on `tokens`, int32 [B, S]; returns the next state and the scalars to report."""
        executed = self.runner.run(self.runner.place_weights(self._weights(state)), tokens)
        gradients = self._gradients(executed)
        norm = self._norm(gradients)
        counts, losses = processes.add_up((_expert_counts(executed), _losses(executed)))
        params, moments = [], []
        for i, owner in enumerate(self.owners):
            here = processes.move(norm, NamedSharding(owner, EVERYWHERE))
            updated = self._updates[i](state.params[i], state.moments[i], gradients[i], here, counts[i])
            params.append(updated[0])
            moments.append(updated[1])
        peak = expert_load_peak(np.concatenate([count for count in counts if count is not None]))
        metrics = losses | {"gradient_norm": norm, "expert_load_peak": peak}
        return PipelineState(tuple(params), tuple(moments), state.step + 1), metrics

    def _stage_shapes(self, stage: Stage, everything: SavedState) -> SavedState:
        """Returns shapes and shardings of a stage's state on its owner, also split over teams."""
        owner, held = self.owners[stage.index], partitions(self.config.model, stage, computing=False)

        def placed(partition: PartitionSpec, leaf: Any) -> jax.ShapeDtypeStruct:
            where = NamedSharding(owner, split_over_teams(partition, leaf.shape, self.size))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        def own(params: StageParams) -> StageParams:
            return jax.tree.map(placed, held, slice_stage(params, stage), is_leaf=is_partition)

        return SavedState(
            own(everything.params), map_parts(own, everything.moments, other=functools.partial(placed, EVERYWHERE))
        )

    def _program_of_cast(self, stage: Stage) -> Callable[..., StageParams]:
        """Compiles `weights` of a stage, on its owner."""
        held = shardings(partitions(self.config.model, stage, computing=True), self.owners[stage.index])
        return jax.jit(functools.partial(weights, config=self.config, stage=stage), out_shardings=held)

    def _program_of_update(self, stage: Stage) -> Callable[..., tuple[StageParams, Any]]:
        """Compiles the update of a stage, with the shardings of its owner."""
        shapes = self._shapes[stage.index]
        where = jax.tree.map(lambda leaf: leaf.sharding, (shapes.params, shapes.moments))
        update = functools.partial(_update, config=self.config, stage=stage)
        return jax.jit(update, donate_argnums=(0, 1), out_shardings=where)

    def _weights(self, state: PipelineState) -> list[StageParams]:
        """Returns the weights that every stage computes with in this step, on its owner."""
        made = []
        for stage, params, owner in zip(self.stages, state.params, self.owners, strict=True):
            table = None
            if needs_embedding(self.config.model, stage):
                table = state.params[0].ends.embed
                table = processes.move(table, NamedSharding(owner, table.sharding.spec))
            made.append(self._casts[stage.index](params, table))
        return made

    def _gradients(self, executed: StepResult) -> list[StageParams]:
        """Returns the gradient of every stage on its owner, summed over its ranks and both uses of the embedding."""
        sums: list[Any] = [None] * len(self.stages)
        for (_, number), gradient in executed.gradients.items():
            weight_partitions = self.runner.programs.stages[number].weight_partitions
            gradient = processes.move(gradient, shardings(weight_partitions, self.owners[number]))
            sums[number] = gradient if sums[number] is None else _sum(sums[number], gradient)
        if needs_embedding(self.config.model, self.stages[-1]):
            table = processes.move(sums[-1].ends.embed, NamedSharding(self.owners[0], EVERYWHERE))
            sums[-1] = _with_embedding(sums[-1], None)
            sums[0] = _with_embedding(sums[0], sums[0].ends.embed + table)
        return sums

    def _norm(self, gradients: list[StageParams]) -> jax.Array:
        """Returns the global norm of all stages' gradients."""
        first = NamedSharding(self.owners[0], EVERYWHERE)
        squares = [processes.move(_square(gradient), first) for gradient in gradients]
        return jnp.sqrt(sum(squares[1:], start=squares[0]))


def _rows(config: TrainingConfig, schedule: PipelineSchedule, meshes: Sequence[Mesh]) -> int:
    """Returns the rows of a micro-batch. Raises ValueError as `PipelineTrainer`."""
    if len(meshes) != schedule.ranks or len({mesh.size for mesh in meshes}) != 1:
        sizes = [mesh.size for mesh in meshes]
        raise ValueError(f"{schedule.algorithm} over {schedule.ranks} equal ranks got meshes of {sizes} devices")
    return micro_batch_rows(
        config.batch_size, config.model.n_routed_experts, schedule.micro_batches, size_of(meshes[0])
    )


def _with_embedding(tree: StageParams, table: jax.Array | None) -> StageParams:
    return dataclasses.replace(tree, ends=dataclasses.replace(tree.ends, embed=table))


@functools.partial(jax.jit, donate_argnums=0)
def _sum(total: StageParams, more: StageParams) -> StageParams:
    return jax.tree.map(jnp.add, total, more)


@jax.jit
def _square(gradient: StageParams) -> jax.Array:
    return sum((jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradient)), start=jnp.zeros(()))


def _update(
    params: StageParams,
    moments: Any,
    gradient: StageParams,
    norm: jax.Array,
    counts: Any,
    *,
    config: TrainingConfig,
    stage: Stage,
) -> tuple[StageParams, Any]:
    """Updates a stage as `train_step` does the model: clips by `norm`, applies AdamW, moves the router's bias."""
    clipped = jax.tree.map(lambda g: jnp.where(norm < config.clip_norm, g, g / norm * config.clip_norm), gradient)
    updates, moments = adamw(config, declare_stage(config.model, stage)).update(clipped, moments, params)
    params = optax.apply_updates(params, updates)
    if counts is None:
        return params, moments
    change = list(router_bias_change(counts, config.router_bias_rate))
    layers = tuple(layer if layer.moe is None else shift_bias(layer, change.pop(0)[None]) for layer in params.layers)
    ends = params.ends
    if ends.mtp is not None:
        mtp = dataclasses.replace(ends.mtp, layers=shift_bias(ends.mtp.layers, jnp.stack(change)))
        ends = dataclasses.replace(ends, mtp=mtp)
    return StageParams(ends, layers), moments


def _expert_counts(executed: StepResult) -> list[np.ndarray | None]:
    """Returns for each stage the counts [layers, E] of this process's devices; None without routed experts."""
    by_stage = [[report["expert_counts"] for report in reports] for reports in executed.reports]
    return [None if counts[0] is None else np.sum([*map(processes.own_sum, counts)], axis=0) for counts in by_stage]


def _losses(executed: StepResult) -> dict[str, Any]:
    """Returns this process's part of the step's losses; the parts of all processes add up to them."""
    reports = executed.reports[-1]
    return {name: np.sum([processes.own_sum(report[name]) for report in reports]) for name in ("loss", "mtp_loss")}
