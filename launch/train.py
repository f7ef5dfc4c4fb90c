"""Trains a small model of DeepSeek-V3's architecture on the text of Python's standard library.

    python -m launch.train --config=tiny
    python -m launch.train --config=tiny --resume --steps=20000
    python -m launch.train --config=tiny --mesh=stage=2,data=2 --pipeline=DualPipe
    python -m launch.serve --model runs/tiny/model-20000

The output directory gets checkpoints, a log and a picture of the loss, and at the end the model as a Hugging Face
directory. SIGTERM or Ctrl-C saves and stops. `--resume` continues; `--steps` may then be larger.

Several processes train together if each is started with --coordinator, --num_processes, --process_id and
--cluster_key_file, or by Slurm. --output must then be a shared directory.
"""

import json
import os
import shutil
from pathlib import Path

import jax
from absl import flags as absl_flags
from rich.console import Console

from dsv3.config.options import ClusterOptions
from dsv3.engine.device.driver import started_devices
from launch import cli, flags, training
from launch.cluster import cluster_options
from training import data as training_data
from training.config import TrainingConfig
from training.loop import OneDevice, Trainer, export, final_figures, plot_losses, train
from training.pipeline import simulator
from training.pipeline.ranks import rank_meshes
from training.pipeline.schedules import RankSize
from training.pipeline.trainer import PipelineTrainer
from training.step import TrainState

OUTPUT = absl_flags.DEFINE_string("output", None, "Write the run to this directory; default: runs/CONFIG.")
STEPS = absl_flags.DEFINE_integer(
    "steps", None, "Train this many steps in total, including those before a resume.", lower_bound=1
)
RESUME = absl_flags.DEFINE_bool("resume", False, "Continue from the newest checkpoint in the output directory.")
cli.define(ClusterOptions)
absl_flags.adopt_module_key_flags(training)


def main() -> int:
    """Trains, and exports the model after the last step; returns the exit status."""
    config, output = training.config(STEPS.value), Path(OUTPUT.value or f"runs/{training.CONFIG.value}")
    mesh, cluster = training.mesh(), cluster_options(os.environ)
    try:
        if cluster is not None:
            from dsv3.engine.cluster.start import start_jax

            start_jax(cluster)
        started_devices()
    except ValueError as error:
        raise flags.UsageError(str(error)) from error
    first = jax.process_index() == 0
    console = Console(quiet=not first)
    try:
        trainer = _trainer(config, *mesh, console)
        state = train(config, output, resume=RESUME.value, console=console, trainer=trainer)
    except (FileExistsError, FileNotFoundError, ValueError) as error:
        raise flags.UsageError(str(error)) from error
    if not first:
        return 0
    if not plot_losses(output / "log.jsonl", output / "loss.png"):
        console.print("no picture of the loss: matplotlib is missing (pip install 'dsv3[plots]')")
    if int(state.step) >= config.steps:
        _finish(state, config, output, console)
    return 0


def _finish(state: TrainState, config: TrainingConfig, output: Path, console: Console) -> None:
    figures = final_figures(state, training_data.prepare(output / "data", config), config)
    console.print(f"held-out text: {json.dumps(figures)}", highlight=False)
    model = output / f"model-{int(state.step)}"
    if not model.exists():
        unfinished = model.with_name(f"unfinished-{model.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        export(unfinished, state, config, output / "data")
        unfinished.rename(model)
        console.print(f"model written to {model}", highlight=False)


def _trainer(config: TrainingConfig, ranks: int, size: RankSize, console: Console) -> Trainer:
    devices = ranks * size.devices
    if devices == jax.process_count() == 1:
        return OneDevice(config)
    if devices > jax.device_count():
        raise flags.UsageError(
            f"--mesh={training.MESH.value}: this machine has {jax.device_count()} device(s), not {devices}; on a CPU "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={devices}"
        )
    schedule = training.schedule(ranks)
    trainer = PipelineTrainer(config, schedule, rank_meshes(jax.devices(), ranks, size))
    timeline = simulator.simulate(schedule)
    idle = max(timeline.bubbles()) / timeline.makespan
    console.print(
        f"{schedule.algorithm} over {ranks} ranks, {schedule.micro_batches} micro-batches: each rank is idle for "
        f"{idle:.0%} of a step if a backward takes as long as two forwards, and keeps activations of at most "
        f"{max(timeline.in_flight())} micro-batches",
        highlight=False,
        soft_wrap=True,
    )
    return trainer


if __name__ == "__main__":
    flags.run(main)
