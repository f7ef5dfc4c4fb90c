"""The training step over a pipeline: parameters and moments by stage, the schedule's gradients, AdamW on each stage.

A stage's parameters in float32 and its moments lie on one rank, its owner. There an array is
split over the rank's teams, which would keep copies otherwise, and experts as in the compute besides.
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
from training.pipeline.ranks import EVERYWHERE, is_partition, over_data, size_of
from training.pipeline.run import Executed, PipelineRunner
from training.pipeline.schedules import PipelineSchedule, rows_of
from training.pipeline.stages import (
    Stage,
    StageParams,
    cut,
    declare_stage,
    merge,
    needs_embedding,
    partitions,
    stage_part,
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
    """A `TrainState` cut by stage. Each stage's parameters and moments lie on its owner.

    Where two ranks hold a stage, the other one gets the weights anew in every step, and sends its gradient.
    """

    params: tuple[StageParams, ...]
    moments: tuple[Any, ...]
    step: int


class PipelineTrainer:
    """Trains over the ranks of a schedule, each on a mesh of its own. It stands for `step.train_step` in a run.

    Raises ValueError where the schedule and the meshes do not fit the batch or the model.
    """

    def __init__(self, config: TrainingConfig, schedule: PipelineSchedule, meshes: Sequence[Mesh]):
        rows, self.size = _rows(config, schedule, meshes), size_of(meshes[0])
        self.config, self.schedule = config, schedule
        self.stages = cut(config.model, schedule.stages)
        programs = stage_programs(config, schedule.stages, rows, config.sequence_length, self.size)
        self.runner = PipelineRunner(schedule, programs, meshes, config.model.num_nextn_predict_layers)
        self.owners = [meshes[schedule.rank(stage.index, 0)] for stage in self.stages]
        everything = jax.eval_shape(lambda: by_layer(initial_state(config), cfg=config.model))
        self._shapes = [self._stage_shapes(stage, everything) for stage in self.stages]
        self._casts = [self._program_of_cast(stage) for stage in self.stages]
        self._updates = [self._program_of_update(stage) for stage in self.stages]

    def place(self, state: TrainState) -> PipelineState:
        """Cuts a state by stage and puts each part on its owner."""
        return self.resumed(by_layer(state, cfg=self.config.model), int(state.step))

    def resumed(self, saved: SavedState, step: int) -> PipelineState:
        """Returns the state after `step` steps from a saved one, on the host or where `shapes` says."""
        params, moments = [], []
        for stage, shapes in zip(self.stages, self._shapes, strict=True):
            cut_off = functools.partial(stage_part, stage=stage)
            own = SavedState(cut_off(saved.params), map_parts(cut_off, saved.moments))
            placed = processes.place(own, jax.tree.map(lambda shape: shape.sharding, shapes))
            params.append(placed.params)
            moments.append(placed.moments)
        return PipelineState(tuple(params), tuple(moments), step)

    def saved(self, state: PipelineState) -> SavedState:
        """Returns the state layer by layer; no array moves."""
        return SavedState(merge(state.params), map_parts(lambda *parts: merge(parts), *state.moments))

    def shapes(self) -> SavedState:
        """Returns where the arrays of a saved state shall lie to be resumed."""
        params = merge([own.params for own in self._shapes])
        return SavedState(params, map_parts(lambda *parts: merge(parts), *(own.moments for own in self._shapes)))

    def whole(self, state: PipelineState) -> TrainState:
        """Joins the parts to the state that one device would have, on this process's first device."""
        on_host = jax.tree.map(processes.whole, self.saved(state))
        return jax.device_put(stacked(on_host, self.config.model, state.step))

    def step(self, state: PipelineState, tokens: np.ndarray) -> tuple[PipelineState, dict[str, Any]]:
        """Trains on `tokens`, int32 [B, S]; returns the next state and the scalars to report."""
        executed = self.runner.run(self.runner.put(self._weights(state)), tokens)
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
        """Returns shapes and shardings of what the owner of a stage keeps, each array split over its teams too."""
        owner, held = self.owners[stage.index], partitions(self.config.model, stage, computing=False)

        def placed(partition: PartitionSpec, leaf: Any) -> jax.ShapeDtypeStruct:
            where = NamedSharding(owner, over_data(partition, leaf.shape, self.size))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        def own(params: StageParams) -> StageParams:
            return jax.tree.map(placed, held, stage_part(params, stage), is_leaf=is_partition)

        return SavedState(
            own(everything.params), map_parts(own, everything.moments, other=functools.partial(placed, EVERYWHERE))
        )

    def _program_of_cast(self, stage: Stage) -> Callable[..., StageParams]:
        """Compiles `weights` of a stage, on its owner."""
        held = shardings(partitions(self.config.model, stage, computing=True), self.owners[stage.index])
        return jax.jit(functools.partial(weights, config=self.config, stage=stage), out_shardings=held)

    def _program_of_update(self, stage: Stage) -> Callable[..., tuple[StageParams, Any]]:
        """Compiles the update of a stage: its results lie as its owner keeps them."""
        shapes = self._shapes[stage.index]
        where = jax.tree.map(lambda leaf: leaf.sharding, (shapes.params, shapes.moments))
        update = functools.partial(_update, config=self.config, stage=stage)
        return jax.jit(update, donate_argnums=(0, 1), out_shardings=where)

    def _weights(self, state: PipelineState) -> list[StageParams]:
        """Returns what every stage computes with in this step, on its owner."""
        made = []
        for stage, params, owner in zip(self.stages, state.params, self.owners, strict=True):
            table = None
            if needs_embedding(self.config.model, stage):
                table = state.params[0].ends.embed
                table = processes.move(table, NamedSharding(owner, table.sharding.spec))
            made.append(self._casts[stage.index](params, table))
        return made

    def _gradients(self, executed: Executed) -> list[StageParams]:
        """Returns the gradient of every stage on its owner: the sum over its holders, and one for the embedding."""
        sums: list[Any] = [None] * len(self.stages)
        for (_, number), gradient in executed.gradients.items():
            held_as = self.runner.programs.stages[number].held_as
            gradient = processes.move(gradient, shardings(held_as, self.owners[number]))
            sums[number] = gradient if sums[number] is None else _sum(sums[number], gradient)
        if needs_embedding(self.config.model, self.stages[-1]):
            table = processes.move(sums[-1].ends.embed, NamedSharding(self.owners[0], EVERYWHERE))
            sums[-1] = _with_embedding(sums[-1], None)
            sums[0] = _with_embedding(sums[0], sums[0].ends.embed + table)
        return sums

    def _norm(self, gradients: list[StageParams]) -> jax.Array:
        """Returns the norm of all stages' gradients together."""
        first = NamedSharding(self.owners[0], EVERYWHERE)
        squares = [processes.move(_square(gradient), first) for gradient in gradients]
        return jnp.sqrt(sum(squares[1:], start=squares[0]))


def _rows(config: TrainingConfig, schedule: PipelineSchedule, meshes: Sequence[Mesh]) -> int:
    """Returns the rows of a micro-batch. Raises ValueError as `PipelineTrainer`."""
    if len(meshes) != schedule.ranks or len({mesh.size for mesh in meshes}) != 1:
        sizes = [mesh.size for mesh in meshes]
        raise ValueError(f"{schedule.algorithm} over {schedule.ranks} equal ranks got meshes of {sizes} devices")
    return rows_of(config.batch_size, config.model.n_routed_experts, schedule.micro_batches, size_of(meshes[0]))


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
    """Does to a stage what `train_step` does to the model: clips by `norm`, runs AdamW, moves the router's bias."""
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


def _expert_counts(executed: Executed) -> list[np.ndarray | None]:
    """Returns for each stage the counts [layers, E] of this process's devices; None for one without routed experts."""
    by_stage = [[report["expert_counts"] for report in reports] for reports in executed.reports]
    return [None if counts[0] is None else np.sum([*map(processes.own_sum, counts)], axis=0) for counts in by_stage]


def _losses(executed: Executed) -> dict[str, Any]:
    """Returns this process's part of the step's losses: the rows' parts add up to them."""
    reports = executed.reports[-1]
    return {name: np.sum([processes.own_sum(report[name]) for report in reports]) for name in ("loss", "mtp_loss")}
