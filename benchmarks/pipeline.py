"""Runs the four pipeline schedules on CPU devices: bubbles, activations in flight, and gradients against one device's.

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_DISABLE_MOST_OPTIMIZATIONS=1
    python -m benchmarks.pipeline --picture docs/pipeline_schedules.svg

The model is the bundled configuration at a width of 64 with two dense layers of four, in float32, with micro-batches of
one row of 32 tokens. The last variable leaves out LLVM's optimisations, as the tests do. Bubbles are simulated: a
forward takes 1, each half of a backward 1, an overlapped pair 3. Activations are counted while the schedule runs.
Gradients are compared by norm, with that of the whole batch on one device. What one device computes row by row is
compared too: its difference is rounding. The picture shows the operations that ran with four stages, at their simulated
times.
"""

import argparse
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from configs.tiny import MODEL, TRAINING
from dsv3.model.forward import forward
from dsv3.model.params import Params, initialize
from sharding.mesh import rank_mesh
from training.config import TrainingConfig
from training.loss import objective, target_counts, training_backend
from training.pipeline.programs import stage_programs
from training.pipeline.run import PipelineRunner, StepResult
from training.pipeline.schedules import ALGORITHMS, Pass, PassKind, PipelineSchedule, RankSize, build
from training.pipeline.simulator import activations, bubble, simulate
from training.pipeline.stages import cut, extract_stage, join, needs_embedding, weights

LENGTH = 32
MICRO_BATCHES = 12
SMALL = dataclasses.replace(
    MODEL, vocab_size=512, hidden_size=64, q_lora_rank=32, kv_lora_rank=32, intermediate_size=96,
    first_k_dense_replace=2, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, moe_intermediate_size=32,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=pathlib.Path, help="write an SVG of the schedules with four stages here")
    picture = parser.parse_args().picture
    simulated()
    print()
    timelines = executed()
    if picture:
        picture.write_text(draw(timelines))


def simulated() -> None:
    """Prints the bubble of every schedule from 2 to 16 ranks, simulated and by formula."""
    print("| schedule | ranks | stages | micro-batches | bubble | by formula | of the step | in flight | by table |")
    print("|---|---|---|---|---|---|---|---|---|")
    for algorithm in ALGORITHMS:
        for ranks in (2, 4, 8, 16):
            schedule = build(algorithm, ranks, 4 * ranks)
            timeline = simulate(schedule)
            idle = sorted(set(timeline.bubbles()))
            print(
                f"| {algorithm} | {ranks} | {schedule.stages} | {schedule.micro_batches} "
                f"| {' to '.join(f'{x:g}' for x in idle)} | {bubble(schedule):g} | {idle[-1] / timeline.makespan:.1%} "
                f"| {max(timeline.in_flight())} | {activations(schedule)} |"
            )


def executed() -> list[StepResult]:
    """Prints what running the schedules with 2 and 4 stages gave; returns the runs with 4."""
    config = dataclasses.replace(
        TRAINING, model=SMALL, batch_size=MICRO_BATCHES, sequence_length=LENGTH, compute_dtype="float32"
    )
    params = jax.device_get(initialize(SMALL, jax.random.key(0), np.float32, std=0.1))
    tokens = np.random.default_rng(0).integers(10, SMALL.vocab_size, (MICRO_BATCHES, LENGTH)).astype(np.int32)
    wanted = jax.device_get(jax.jit(jax.grad(loss), static_argnums=1)(params, config, tokens, None))
    print("| schedule | ranks | stages | in flight, by rank | by table | gradient off by | its worst leaf by |")
    print("|---|---|---|---|---|---|---|")
    alone = row_by_row(params, config, tokens)
    whole, leaf = difference(flat(alone), flat(wanted)), worst_leaf(alone, wanted)
    print(f"| one device, row by row | 1 | 1 | | | {whole:.1e} | {leaf:.1e} |")
    runs = []
    for stages in (2, 4):
        for algorithm in ALGORITHMS:
            schedule = build(algorithm, stages // 2 if algorithm == "DualPipeV" else stages, MICRO_BATCHES)
            run = execute(schedule, config, params, tokens)
            got = gradient(run, config, schedule)
            print(
                f"| {algorithm} | {schedule.ranks} | {stages} | {', '.join(map(str, run.in_flight))} "
                f"| {activations(schedule)} | {difference(flat(got), flat(wanted)):.1e} "
                f"| {worst_leaf(got, wanted):.1e} |",
                flush=True,
            )
            runs += [run] if stages == 4 else []
    return runs


def loss(params: Params, config: TrainingConfig, tokens: np.ndarray, counts: np.ndarray | None) -> jax.Array:
    """Returns the objective of a batch, or of a part of one that has `target_counts`."""
    output = forward(params, config.model, tokens, with_mtp=True, backend=training_backend())
    return objective(output, tokens, config.mtp_weight, counts)[0]


def row_by_row(params: Params, config: TrainingConfig, tokens: np.ndarray) -> Params:
    """Returns the gradient that one device computes row by row: what another order of sums alone changes."""
    counts = target_counts(tokens, config.model.num_nextn_predict_layers)
    row = jax.jit(jax.grad(loss), static_argnums=1)
    parts = [jax.device_get(row(params, config, tokens[i : i + 1], counts)) for i in range(len(tokens))]
    return jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *parts)


def execute(schedule: PipelineSchedule, config: TrainingConfig, params: Params, tokens: np.ndarray) -> StepResult:
    """Runs one step, each rank on a device of its own."""
    programs = stage_programs(config, schedule.stages, len(tokens) // schedule.micro_batches, LENGTH, RankSize())
    meshes = [rank_mesh([device]) for device in jax.devices()[: schedule.ranks]]
    runner = PipelineRunner(schedule, programs, meshes, config.model.num_nextn_predict_layers)
    held = []
    for stage in cut(config.model, schedule.stages):
        table = params.embed if needs_embedding(config.model, stage) else None
        held.append(weights(extract_stage(params, config.model, stage), table, config, stage))
    return runner.run(runner.place_weights(held), tokens)


def gradient(run: StepResult, config: TrainingConfig, schedule: PipelineSchedule) -> Params:
    """Sums what the ranks have, on the host."""
    sums: list[Any] = [None] * schedule.stages
    for (_, stage), part in jax.device_get(dict(run.gradients)).items():
        sums[stage] = part if sums[stage] is None else jax.tree.map(np.add, sums[stage], part)
    whole = join(sums, config.model)
    return dataclasses.replace(whole, embed=whole.embed + sums[-1].ends.embed)


def worst_leaf(got: Params, wanted: Params) -> float:
    """Returns the largest difference of a leaf."""
    return max(jax.tree.leaves(jax.tree.map(difference, got, wanted)))


def flat(tree: Params) -> np.ndarray:
    """Returns all leaves as one vector."""
    return np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the norm of the difference over the norm; 0 where both are 0, as for the router's bias."""
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30))


UNIT, ROW, LEFT, GAP = 18, 20, 60, 34
COLOURS = {
    PassKind.FORWARD: "#f2c75c",
    PassKind.BACKWARD: "#6fa8dc",
    PassKind.INPUT: "#a4d3a2",
    PassKind.WEIGHT: "#c9a0dc",
}
NAMES = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.INPUT: "input gradient",
    PassKind.WEIGHT: "weight gradient",
}


def draw(runs: list[StepResult]) -> str:
    """Returns an SVG: per run a block of rows, one per rank, with a box per operation."""
    parts, top = legend(), 50
    width = LEFT + 20
    for run, algorithm in zip(runs, ALGORITHMS, strict=True):
        ranks = len(run.in_flight)
        title = f"{algorithm}: {ranks} ranks, 4 stages, {MICRO_BATCHES} micro-batches"
        parts.append(f'<text x="4" y="{top - 6}" font-weight="bold">{title}</text>')
        for rank in range(ranks):
            parts.append(f'<text x="4" y="{top + rank * ROW + 14}">rank {rank}</text>')
        for event in run.events:
            share = (event.end - event.start) / len(event.operation)
            for i, part in enumerate(event.operation):
                left = LEFT + (event.start + i * share) * UNIT
                parts.append(box(part, left, top + event.rank * ROW, share * UNIT))
            if len(event.operation) == 2:
                size = f'x="{LEFT + event.start * UNIT:g}" y="{top + event.rank * ROW}" width="{2 * share * UNIT:g}"'
                parts.append(f'<rect {size} height="{ROW - 2}" fill="none" stroke="#000" stroke-width="1.5"/>')
        width = max(width, LEFT + run.events[-1].end * UNIT + 10)
        top += ranks * ROW + GAP
    size = f'width="{width:g}" height="{top - 10}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def legend() -> list[str]:
    """Returns one box per kind with its name."""
    parts = []
    for i, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{4 + i * 130}" y="6" width="14" height="14" fill="{colour}" stroke="#555"/>')
        parts.append(f'<text x="{22 + i * 130}" y="17">{NAMES[kind]}</text>')
    parts.append('<text x="524" y="17">thick frame: an overlapped pair; white numbers: direction 1</text>')
    return parts


def box(part: Pass, left: float, top: int, width: float) -> str:
    """Returns a box with the number of its micro-batch, which is white in direction 1."""
    ink = "#fff" if part.direction else "#000"
    place = f'x="{left:g}" y="{top}" width="{width:g}" height="{ROW - 2}"'
    text = f'<text x="{left + width / 2:g}" y="{top + 13}" text-anchor="middle" fill="{ink}">{part.micro_batch}</text>'
    return f'<rect {place} fill="{COLOURS[part.kind]}" stroke="#555" stroke-width="0.5"/>{text}'


if __name__ == "__main__":
    main()
