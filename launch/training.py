"""Flags of model, mesh and pipeline schedule, for `launch.train` and `launch.plan train`. Imports no jax."""

import dataclasses
import importlib
from typing import Any

from absl import flags as absl_flags

from launch import flags
from training.config import TrainingConfig
from training.pipeline import schedules
from training.pipeline.schedules import RankSize, read_mesh

CONFIG = absl_flags.DEFINE_string("config", "tiny", "Train with the configuration in this module of `configs`.")
MESH = absl_flags.DEFINE_string(
    "mesh",
    "stage=1",
    "Train over stage x data x expert devices. stage=N spreads the layers over N pipeline ranks; data=N gives each "
    "rank N teams of devices, which split the rows of a micro-batch; expert=N gives each team N devices, which split "
    "the experts, and the team's rows. Example: stage=4,data=2,expert=2.",
)
PIPELINE = absl_flags.DEFINE_enum(
    "pipeline", "DualPipe", list(schedules.ALGORITHMS), "Run the ranks of --mesh in this order."
)
MICRO_BATCHES = absl_flags.DEFINE_integer(
    "micro_batches", None, "Cut each batch into this many for the pipeline; default: twice the ranks.", lower_bound=1
)
FP8_PRODUCTS = absl_flags.DEFINE_bool(
    "fp8_products",
    None,
    "Multiply e4m3 values in linear layers and experts, forward and backward; default: as the configuration.",
)
FLAGS = (CONFIG, MESH, PIPELINE, MICRO_BATCHES, FP8_PRODUCTS)


def config(steps: int | None = None) -> TrainingConfig:
    """Returns the configuration with the changes of the flags, and of `steps`.

    Raises UsageError if it does not exist, or a change is invalid.
    """
    try:
        found = importlib.import_module(f"configs.{CONFIG.value}").TRAINING
    except (ModuleNotFoundError, AttributeError) as error:
        raise flags.UsageError(f"--config={CONFIG.value}: no training configuration there ({error})") from error
    given = {"steps": steps, FP8_PRODUCTS.name: FP8_PRODUCTS.value}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        return dataclasses.replace(found, **changes)
    except ValueError as error:
        spelled = " ".join(f"--{name}={value}" for name, value in changes.items())
        raise flags.UsageError(f"{spelled}: {error}") from error


def mesh() -> tuple[int, RankSize]:
    """Returns the number of pipeline ranks and the devices of each. Raises UsageError for an invalid mesh."""
    try:
        return read_mesh(MESH.value)
    except ValueError as error:
        raise flags.UsageError(f"--mesh={MESH.value}: {error}") from error


def schedule(ranks: int) -> schedules.PipelineSchedule:
    """Returns the schedule of `ranks`. Raises ValueError as `schedules.build` does."""
    return schedules.build(PIPELINE.value, ranks, MICRO_BATCHES.value or 2 * ranks)
