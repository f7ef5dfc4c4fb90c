"""Compiled programs of a pipeline stage: forward, backward, its two halves, and the overlapped forward/backward pair.

In an overlapped pair each transfer of one direction runs beside matrix products of the other. The forward and the
backward are of different micro-batches and share no value, so any order of their parts is correct. DualPipe alternates
them, per layer:

    compute  | attention F | MLP B and W | MLP F      | attention B and W |
    network  | combine B   | dispatch F  | dispatch B | combine F         |

The two programs are traced and cut where a transfer's result is needed. The parts are compiled as units in that order,
between the start and the finish of the other direction's transfer (`sharding.collectives`).
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dsv3.model.decoder import embed
from dsv3.model.params import abstract
from sharding.collectives import (
    Overlap,
    Transfer,
    compiler_options,
    in_program_order,
    resolve_overlap,
    start_all_to_all,
)
from training.config import TrainingConfig
from training.pipeline import ranks
from training.pipeline.ranks import EVERYWHERE, SPLIT, own, partial
from training.pipeline.schedules import RankSize
from training.pipeline.split import Split, inline, split, variables
from training.pipeline.stages import (
    Stage,
    StageParams,
    compute,
    cut,
    extract_stage,
    needs_embedding,
    partitions,
    weights,
)

MAX_IN_FLIGHT = 6
"""Collectives of a pair: a combine, beside it the loop of rounds in a backward, which has five (`experts`)."""


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """The computation of one stage for one micro-batch, as pure functions of one device's part.

    The `..._program` methods map them over the devices of a rank. Weight gradients are added to `total`, a float32 tree
    like the weights. The input of the first stage are tokens `[B, S]`, which it embeds; the embedding's gradient
    follows from its input gradient.
    """

    stage: Stage
    weight_partitions: StageParams
    """Partitions of the weights over the devices."""
    size: RankSize
    parts: Split

    def forward(self, weights: StageParams, entry: jax.Array, data: Any) -> tuple[jax.Array, Any, list[jax.Array]]:
        """Returns the stage's output, its report, and the values saved for the backward."""
        if not self.stage.first:
            return self.parts.forward(weights, entry, data)
        y, report, saved = self.parts.forward(weights, embed(weights.ends, entry.reshape(-1)), data)
        return y, report, [*saved, entry]

    def input_gradient(
        self, weights: StageParams, saved: list[jax.Array], dy: jax.Array
    ) -> tuple[jax.Array | None, list[jax.Array]]:
        """Returns the gradient for the previous stage, and the values that the weight gradient needs of this half."""
        if not self.stage.first:
            return self.parts.input_gradient(weights, saved, dy)
        dx, made = self.parts.input_gradient(weights, saved[:-1], dy)
        return None, [*made, dx]

    def keep(self, saved: list[jax.Array], made: list[jax.Array]) -> list[jax.Array]:
        """Returns the values to keep until the weight gradient."""
        if not self.stage.first:
            return self.parts.keep(saved, made)
        return [*self.parts.keep(saved[:-1], made[:-1]), saved[-1], made[-1]]

    def weight_gradient(self, weights: StageParams, total: StageParams, kept: list[jax.Array]) -> StageParams:
        """Returns `total` with the micro-batch's weight gradient added."""
        if not self.stage.first:
            return _add(total, self.parts.weight_gradient(weights, kept))
        *kept, tokens, dx = kept
        total = _add(total, self.parts.weight_gradient(weights, kept))
        embedding = total.ends.embed.at[tokens.reshape(-1)].add(dx.astype(jnp.float32), mode="clip")
        return dataclasses.replace(total, ends=dataclasses.replace(total.ends, embed=embedding))

    def backward(
        self, weights: StageParams, total: StageParams, saved: list[jax.Array], dy: jax.Array
    ) -> tuple[jax.Array | None, StageParams]:
        """Returns the gradient for the previous stage, and `total` with the micro-batch's weight gradient added."""
        dx, made = self.input_gradient(weights, saved, dy)
        return dx, self.weight_gradient(weights, total, self.keep(saved, made))

    def zeros_program(self) -> Callable[..., Any]:
        """Maps the initial `total` of zeros: `(weights) -> total`."""

        def run(weights):
            return partial(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), weights))

        return ranks.spread(run, self.size, (self.weight_partitions,), SPLIT)

    @property
    def forward_inputs(self) -> tuple[Any, ...]:
        """The partitions of the arguments of `forward`."""
        return self.weight_partitions, SPLIT, (SPLIT, EVERYWHERE) if self.stage.last else ()

    @property
    def backward_inputs(self) -> tuple[Any, ...]:
        """The partitions of the arguments of `backward`."""
        return self.weight_partitions, SPLIT, SPLIT, self._dy

    def forward_on_device(self, weights, entry, data):
        """Runs `forward` inside `spread`; the last stage's y is partial."""
        y, report, saved = self.forward(weights, entry, data)
        return y[None] if self.stage.last else y, partial(report), partial(saved)

    def backward_on_device(self, weights, total, saved, dy):
        """Runs `backward` inside `spread`."""
        dx, total = self.backward(weights, own(total), own(saved), dy)
        return dx, partial(total)

    def forward_program(self) -> Callable[..., Any]:
        """Maps `forward`: `(weights, entry, data) -> (y, report, saved)`."""
        return ranks.spread(self.forward_on_device, self.size, self.forward_inputs, SPLIT)

    def input_gradient_program(self) -> Callable[..., Any]:
        """Maps `input_gradient`: `(weights, saved, dy) -> (dx, made)`."""

        def run(weights, saved, dy):
            dx, made = self.input_gradient(weights, own(saved), dy)
            return dx, partial(made)

        return ranks.spread(run, self.size, (self.weight_partitions, SPLIT, self._dy), SPLIT)

    def weight_gradient_program(self) -> Callable[..., Any]:
        """Maps `weight_gradient`: `(weights, total, kept) -> total`."""

        def run(weights, total, kept):
            return partial(self.weight_gradient(weights, own(total), own(kept)))

        return ranks.spread(run, self.size, (self.weight_partitions, SPLIT, SPLIT), SPLIT)

    def backward_program(self) -> Callable[..., Any]:
        """Maps `backward`: `(weights, total, saved, dy) -> (dx, total)`."""
        return ranks.spread(self.backward_on_device, self.size, self.backward_inputs, SPLIT)

    def pair_program(self, other: "StageProgram", overlap: Overlap) -> Callable[..., Any]:
        """Maps a forward of this stage and a backward of `other` as an overlapped pair (`overlapped_pair`).

        It takes the arguments of both, one after the other, and returns both results.
        """
        both = overlapped_pair(self.forward_on_device, other.backward_on_device, overlap)
        mapped = ranks.spread(both, self.size, (self.forward_inputs, other.backward_inputs), SPLIT)

        def run(weights, entry, data, other_weights, total, saved, dy):
            return mapped((weights, entry, data), (other_weights, total, saved, dy))

        return run

    def gradient_program(self) -> Callable[..., Any]:
        """Maps the sum over the rank: `(total) -> gradient`, partitioned as the weights are."""

        def run(total):
            return jax.tree.map(ranks.sum_gradient, self.weight_partitions, own(total), is_leaf=ranks.is_partition)

        return ranks.spread(run, self.size, (SPLIT,), self.weight_partitions)

    @property
    def _dy(self) -> Any:
        return EVERYWHERE if self.stage.last else SPLIT


def _add(total: StageParams, gradient: StageParams) -> StageParams:
    return jax.tree.map(lambda sum_, part: sum_ + part.astype(jnp.float32), total, gradient)


def weight_shapes(config: TrainingConfig, stage: Stage) -> StageParams:
    """Returns the shapes of the weights that a stage computes with."""
    cfg = config.model
    shapes = jax.eval_shape(lambda params: extract_stage(params, cfg, stage), abstract(cfg, jnp.float32))
    table = jax.ShapeDtypeStruct((cfg.vocab_size, cfg.hidden_size), jnp.float32)
    embedding = table if needs_embedding(cfg, stage) else None
    return jax.eval_shape(lambda own, table: weights(own, table, config, stage), shapes, embedding)


def input_shapes(config: TrainingConfig, stage: Stage, rows: int) -> tuple[Any, Any, Any]:
    """Returns the shapes of a micro-batch's residual stream, its tokens, and the `data` of the stage (`compute`)."""
    cfg, length = config.model, config.sequence_length
    x = jax.ShapeDtypeStruct((rows * length, cfg.hidden_size), jnp.dtype(config.compute_dtype))
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    counts = jax.ShapeDtypeStruct((1 + cfg.num_nextn_predict_layers,), jnp.float32)
    return x, tokens, (tokens, counts) if stage.last else ()


def trace(config: TrainingConfig, stage: Stage, rows: int, size: RankSize) -> StageProgram:
    """Returns the program of a stage for micro-batches of `rows` rows, over a rank's devices."""
    held, (x, _, data) = weight_shapes(config, stage), input_shapes(config, stage, rows)
    function = compute(config, stage, ranks.routed_experts(size))
    parts: list[Split] = []

    def on_a_device(held: StageParams, x: jax.Array, data: Any) -> None:
        parts.append(split(function, held, x, data))

    weight_partitions = partitions(config.model, stage, computing=True)
    inputs = (weight_partitions, SPLIT, (SPLIT, EVERYWHERE) if stage.last else ())
    jax.eval_shape(ranks.spread(on_a_device, size, inputs, None), held, x, data)
    return StageProgram(stage, weight_partitions, size, parts[0])


class StagePrograms:
    """The programs of all stages, by stage. Stages with the same kinds of layers share them.

    Weights are whole, inputs and gradients between stages are rows, other values are partial (`ranks`). Programs that
    add to `total` donate it.
    """

    def __init__(self, config: TrainingConfig, stages: tuple[Stage, ...], rows: int, size: RankSize):
        self.stages = trace_stages(config, stages, rows, size)
        # Uses only the devices of the weights, which jax would drop with an unused argument.
        self.zeros = self._compiled(lambda stage: stage.zeros_program(), keep_unused=True)
        self.forward = self._compiled(lambda stage: stage.forward_program())
        self.input_gradient = self._compiled(lambda stage: stage.input_gradient_program())
        self.weight_gradient = self._compiled(lambda stage: stage.weight_gradient_program(), donate_argnums=1)
        self.backward = self._compiled(lambda stage: stage.backward_program(), donate_argnums=1)
        self.gradient = self._compiled(lambda stage: stage.gradient_program())
        self._pairs: dict[tuple[int, int], Callable[..., Any]] = {}

    def _compiled(self, program: Callable[[StageProgram], Any], **options: Any) -> list[Callable[..., Any]]:
        programs = {id(stage): jax.jit(program(stage), **options) for stage in self.stages}
        return [programs[id(stage)] for stage in self.stages]

    def pair(self, forward: int, backward: int) -> Callable[..., Any]:
        """Returns the compiled `pair_program` for a forward of one stage and a backward of another."""
        first, second = self.stages[forward], self.stages[backward]
        if (key := (id(first), id(second))) not in self._pairs:
            platform = jax.default_backend()
            program = first.pair_program(second, resolve_overlap(platform))
            options = compiler_options(platform, in_flight=MAX_IN_FLIGHT)
            self._pairs[key] = jax.jit(program, donate_argnums=4, compiler_options=options)
        return self._pairs[key]


def trace_stages(config: TrainingConfig, stages: tuple[Stage, ...], rows: int, size: RankSize) -> list[StageProgram]:
    """Returns the programs of all stages, as `trace` does; stages with the same kinds of layers share one."""
    keys = [_key(config, stage) for stage in stages]
    traced = {key: trace(config, stage, rows, size) for key, stage in zip(keys, stages, strict=True)}
    return [traced[key] for key in keys]


def _key(config: TrainingConfig, stage: Stage) -> tuple[Any, ...]:
    """Returns a key that is equal for stages with the same programs."""
    dense = [index < config.model.num_dense_layers for index in range(stage.begin, stage.end)]
    return stage.first, stage.last, *dense


@functools.lru_cache(maxsize=8)
def stage_programs(config: TrainingConfig, stages: int, rows: int, size: RankSize) -> StagePrograms:
    """Returns the programs of a model cut into `stages`, for micro-batches of `rows` rows.

    The devices of a rank split the rows. Raises ValueError as `cut` does.
    """
    return StagePrograms(config, cut(config.model, stages), rows, size)


Inputs = tuple[Any, ...]


def overlapped_pair(
    forward: Callable[..., Any], backward: Callable[..., Any], overlap: Overlap
) -> Callable[[Inputs, Inputs], tuple[Any, Any]]:
    """Returns a program of both, for `shard_map`: it takes the arguments of each and returns the results of each.

    It overlaps the transfers of one, all-to-alls of the leading axis, with compute of the other.
    """

    def both(inputs: Inputs, other_inputs: Inputs) -> tuple[Any, Any]:
        first = _Direction("forward", forward, inputs, overlap)
        second = _Direction("backward", backward, other_inputs, overlap)
        _interleave(first, second)
        return first.results(), second.results()

    return in_program_order(both, overlap)


class _Direction:
    """A partly executed program. A value's level is the length of the longest chain of transfers that it needs."""

    def __init__(self, name: str, function: Callable[..., Any], inputs: Inputs, overlap: Overlap):
        closed, self._shapes = jax.make_jaxpr(function, return_shape=True)(*inputs)
        closed = inline(closed)
        self._name, self._jaxpr, self._overlap = name, closed.jaxpr, overlap
        self._values: dict[Any, Any] = dict(zip(self._jaxpr.invars, jax.tree.leaves(inputs), strict=True))
        self._values |= dict(zip(self._jaxpr.constvars, closed.consts, strict=True))
        self._equations: dict[int, list[core.JaxprEqn]] = defaultdict(list)
        self._transfers: dict[int, list[core.JaxprEqn]] = defaultdict(list)
        self._under_way: dict[Any, Transfer] = {}
        self.depth = self._sort()

    def _sort(self) -> int:
        """Assigns each equation to its level; returns the highest level."""
        level = dict.fromkeys(self._values, 0)
        for eqn in self._jaxpr.eqns:
            at = max((level[v] for v in variables(eqn.invars)), default=0)
            moves = eqn.primitive.name == "all_to_all"
            (self._transfers if moves else self._equations)[at].append(eqn)
            level |= dict.fromkeys(eqn.outvars, at + moves)
        return max(level.values(), default=0)

    def compute(self, level: int) -> None:
        """Runs the equations of a level as one unit."""
        equations = self._equations.pop(level, [])
        if not equations:
            return
        made = dict.fromkeys(v for eqn in equations for v in eqn.outvars)
        reads = list(dict.fromkeys(v for eqn in equations for v in variables(eqn.invars) if v not in made))
        later = self._needed_later()
        gives = [v for v in made if v in later]
        info = self._jaxpr.debug_info.with_unknown_names()
        unit = self._jaxpr.replace(constvars=[], invars=reads, outvars=gives, eqns=equations, debug_info=info)
        with jax.named_scope(self._name):
            results = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(unit, [])))(*(self._values[v] for v in reads))
        self._values |= dict(zip(gives, results, strict=True))

    def _needed_later(self) -> set[Any]:
        rest = [eqn for group in (self._equations, self._transfers) for eqns in group.values() for eqn in eqns]
        return {v for eqn in rest for v in variables(eqn.invars)} | set(variables(self._jaxpr.outvars))

    def start(self, level: int) -> None:
        """Starts the transfers of a level's results."""
        for eqn in self._transfers.pop(level, []):
            (source,), (result,) = eqn.invars, eqn.outvars
            with jax.named_scope(self._name):
                started = start_all_to_all(self._values[source], eqn.params["axis_name"], self._overlap)
                self._under_way[result] = started

    def finish(self) -> None:
        """Waits for the transfers under way."""
        self._values |= {result: transfer.finish() for result, transfer in self._under_way.items()}
        self._under_way.clear()

    def results(self) -> Any:
        """Returns the program's results."""
        values = [self._values[v] if isinstance(v, core.Var) else v.val for v in self._jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(self._shapes), values)


def _interleave(forward: _Direction, backward: _Direction) -> None:
    """Runs both so that each transfer is in flight while the other direction computes."""
    backward.compute(0)
    for level in range(max(forward.depth, backward.depth) + 1):
        backward.start(level)
        forward.compute(level)
        backward.finish()
        forward.start(level)
        backward.compute(level + 1)
        forward.finish()
