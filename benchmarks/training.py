"""Training of the configuration `tiny`: what a step and a checkpoint cost, and losses with FP8 products.

    JAX_PLATFORMS=cpu python -m benchmarks.training
    JAX_PLATFORMS=cpu python -m benchmarks.training --fp8 200 [--rows 2]

Steps alone and steps with a checkpoint take turns. `save` returns when the state is copied and a thread writes it; the
next step runs beside that thread. A save that is waited for is what a trainer without the thread would pay. Figures are
medians. A GPU's step would not share its cores with that thread.

With `--fp8` three runs begin with the same weights and take turns: each makes the step that the others make, on the
same rows. So they can be compared wherever the command stops: after so many steps, or at Ctrl-C or SIGTERM. A line per
ten steps has the mean loss of each run over them, and two differences: of FP8 products from bfloat16, and of bfloat16
from float32, which is what precision does to the curve anyway. Then come the differences over all lines, the losses on
held-out text, which are all measured in float32, and the processor time of a step. On a CPU e4m3 is emulated: that time
says nothing about a GPU.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.record import Cell, Report, run
from configs.tiny import TRAINING
from training import data as training_data
from training.data import Data
from training.loop import Checkpoints, OneDevice, mean_metrics, stop_signal
from training.step import TrainState, initial_state, train_step

REPEATS = 5
WINDOW = 10
RUNS: dict[str, dict[str, Any]] = {
    "float32": {"compute_dtype": "float32"},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "FP8": {"compute_dtype": "bfloat16", "fp8_products": True},
}
PAIRS = (("FP8", "bfloat16"), ("bfloat16", "float32"))


class Runs:
    """The three runs: their states, and the loss and processor seconds of each step made, by the run's name."""

    def __init__(self, data: Data, rows: int):
        self.data = data
        self.configs = {name: dataclasses.replace(TRAINING, batch_size=rows, **run) for name, run in RUNS.items()}
        self.states: dict[str, TrainState] = {name: initial_state(config) for name, config in self.configs.items()}
        self.losses: dict[str, list[float]] = {name: [] for name in RUNS}
        self.seconds: dict[str, list[float]] = {name: [] for name in RUNS}

    @property
    def steps(self) -> int:
        """Steps that all runs have made."""
        return min(map(len, self.losses.values()))

    def step(self) -> None:
        """Makes the next step of each run."""
        tokens = training_data.batch(self.data, self.configs["bfloat16"], self.steps)
        for name, config in self.configs.items():
            start = time.process_time()
            self.states[name], metrics = train_step(self.states[name], tokens, config=config)
            jax.block_until_ready(self.states[name])
            self.losses[name].append(float(metrics["loss"]))
            self.seconds[name].append(time.process_time() - start)

    def means(self) -> dict[str, np.ndarray]:
        """Returns each run's mean loss over whole windows of steps, `[windows]`."""
        whole = self.steps // WINDOW * WINDOW
        return {name: np.reshape(losses[:whole], (-1, WINDOW)).mean(axis=1) for name, losses in self.losses.items()}

    def held_out(self) -> dict[str, dict[str, float]]:
        """Measures each run's weights on held-out text, in float32."""
        config = self.configs["float32"]
        batches = training_data.held_out_batches(self.data, config, config.eval_batches)
        return {name: mean_metrics(state, batches, config) for name, state in self.states.items()}


def difference(means: dict[str, Any], pair: tuple[str, str]) -> Any:
    """Returns how far the first run of a pair is from the second, relative to it."""
    return means[pair[0]] / means[pair[1]] - 1


def main(report: Report) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp8", type=int, metavar="STEPS", help="compare losses of so many steps")
    parser.add_argument("--rows", type=int, default=TRAINING.batch_size, help="of a step with --fp8")
    arguments = parser.parse_args()
    if not arguments.fp8:
        report.table("A step and a checkpoint", ["what", "seconds", "of a step"], costs())
        return
    with tempfile.TemporaryDirectory() as directory:
        runs = Runs(training_data.prepare(Path(directory) / "data", TRAINING), arguments.rows)
        columns = ["steps", *RUNS, *(f"{a} from {b} (%)" for a, b in PAIRS)]
        report.table("Losses", columns, train(runs, arguments.fp8))
        if runs.steps >= WINDOW:
            summarize(report, runs)


def costs() -> Iterator[list[Cell]]:
    """Yields a line per kind of step."""
    trainer, rng = OneDevice(TRAINING), np.random.default_rng(0)
    shape = TRAINING.batch_size, TRAINING.sequence_length
    state = trainer.place(initial_state(TRAINING))
    alone, beside, returned, waited, processor = [], [], [], [], []

    def step() -> float:
        nonlocal state
        shares = rng.random(shape) ** 3  # few words are frequent and most are rare, as in text
        tokens = (TRAINING.model.vocab_size * shares).astype(np.int32)
        start = time.perf_counter()
        state, metrics = trainer.step(state, tokens)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    step()
    for number in range(1, REPEATS + 1):
        before = os.times()
        alone.append(step())
        after = os.times()
        processor.append((after.user - before.user + after.system - before.system, after.system - before.system))
        for wait in (False, True):
            with tempfile.TemporaryDirectory() as directory, Checkpoints(Path(directory), TRAINING) as checkpoints:
                start = time.perf_counter()
                checkpoints.save(number, trainer.saved_state(state))
                if wait:
                    checkpoints.wait()
                (waited if wait else returned).append(time.perf_counter() - start)
                if not wait:
                    beside.append(step())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.saved_state(state))) / 1e6
    both, kernel = (statistics.median(each) for each in zip(*processor, strict=True))
    base = statistics.median(alone)
    for name, seconds in (
        (f"step of {shape[0] * shape[1]:,} tokens", base),
        ("its processor time", both),
        ("of that in the kernel", kernel),
        (f"`save` of {size:.0f} MB, until it returns", statistics.median(returned)),
        ("step beside the thread that writes", statistics.median(beside)),
        ("`save`, until it is written", statistics.median(waited)),
    ):
        yield [name, seconds, seconds / base]


def train(runs: Runs, steps: int) -> Iterator[list[Cell]]:
    """Makes `steps` steps and yields a line per window, the last of which may be shorter; a signal stops it earlier."""
    with stop_signal() as stopped:
        while runs.steps < steps and not stopped:
            first = runs.steps
            while runs.steps < min(steps, first + WINDOW) and not stopped:
                runs.step()
            last = {name: np.mean(losses[first:]) for name, losses in runs.losses.items()}
            differences = (100 * difference(last, pair) for pair in PAIRS)
            yield [f"{first + 1} to {runs.steps}", *last.values(), *differences]


def summarize(report: Report, runs: Runs) -> None:
    """Reports the differences over all windows, the held-out losses, and the processor time of a step."""
    found = {pair: 100 * np.abs(difference(runs.means(), pair)) for pair in PAIRS}
    rows = ([f"{a} from {b}", each.mean(), each.max()] for (a, b), each in found.items())
    report.table(f"{runs.steps} steps: differences of windows", ["runs", "mean (%)", "largest (%)"], rows)
    held_out, base = runs.held_out(), np.median(runs.seconds["bfloat16"])
    rows = (
        [name, each["loss"], each["mtp_loss"], np.median(runs.seconds[name]) / base] for name, each in held_out.items()
    )
    report.table("After them", ["run", "held-out loss", "MTP loss", "processor time of a step, of bfloat16's"], rows)


if __name__ == "__main__":
    run(main)
