"""Compares the losses of training with FP8 products to those with bfloat16 and with float32.

    JAX_PLATFORMS=cpu python -m benchmarks.training_fp8 --steps 200

Three runs of the configuration `tiny` begin with the same weights and take turns: each makes the step that the others
make, on the same rows. So they can be compared wherever the command stops: at --steps, after --minutes, or at Ctrl-C
or SIGTERM. Every --window steps a line gives the mean loss of each run over them, and two differences: of FP8 products
from bfloat16, and of bfloat16 from float32, which is what precision does to the curve anyway. The last lines have the
mean and the largest of the differences, the losses on held-out text, which are all measured in float32, and the
processor time of a step. On a CPU e4m3 is emulated: that time says nothing about a GPU.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.tiny import TRAINING
from training import data as training_data
from training.data import Data
from training.loop import mean_metrics, stop_signal
from training.step import TrainState, initial_state, train_step

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

    def means(self, window: int) -> dict[str, np.ndarray]:
        """Returns each run's mean loss over whole windows of steps, `[windows]`."""
        whole = self.steps // window * window
        return {name: np.reshape(losses[:whole], (-1, window)).mean(axis=1) for name, losses in self.losses.items()}

    def held_out(self) -> dict[str, dict[str, float]]:
        """Measures each run's weights on held-out text, in float32."""
        config = self.configs["float32"]
        batches = training_data.held_out_batches(self.data, config, config.eval_batches)
        return {name: mean_metrics(state, batches, config) for name, state in self.states.items()}


def difference(means: dict[str, Any], pair: tuple[str, str]) -> Any:
    """Returns how far the first run of a pair is from the second, relative to it."""
    return means[pair[0]] / means[pair[1]] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each run, of the configuration's 4000")
    parser.add_argument("--rows", type=int, default=TRAINING.batch_size, help="rows of a step; default: as configured")
    parser.add_argument("--minutes", type=float, default=np.inf, help="begin no step after so long")
    parser.add_argument("--window", type=int, default=10, help="steps of a line")
    parser.add_argument("--directory", type=Path, help="keep the tokens here; default: a temporary directory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        data = training_data.prepare((arguments.directory or Path(temporary)) / "data", TRAINING)
        runs = Runs(data, arguments.rows)
        train(runs, arguments.steps, arguments.window, time.monotonic() + 60 * arguments.minutes)
        if runs.steps >= arguments.window:
            summarize(runs, arguments.window)


def train(runs: Runs, steps: int, window: int, end: float) -> None:
    """Makes `steps` steps and prints a line per window; a signal, or the time `end`, stops it earlier."""
    print("| steps | " + " | ".join(RUNS) + " | " + " | ".join(f"{a} from {b}" for a, b in PAIRS) + " |")
    print("|---" * (1 + len(RUNS) + len(PAIRS)) + "|", flush=True)
    with stop_signal() as stopped:
        while runs.steps < steps and not stopped and time.monotonic() < end:
            runs.step()
            if runs.steps % window == 0:
                last = {name: values[-1] for name, values in runs.means(window).items()}
                losses = " | ".join(f"{value:.4f}" for value in last.values())
                differences = " | ".join(f"{difference(last, pair):+.2%}" for pair in PAIRS)
                print(f"| {runs.steps - window + 1} to {runs.steps} | {losses} | {differences} |", flush=True)


def summarize(runs: Runs, window: int) -> None:
    """Prints the differences over all windows, the held-out losses, and the processor time of a step."""
    print(f"\n{runs.steps} steps of each run, {jax.devices()[0].device_kind}")
    means = runs.means(window)
    for pair in PAIRS:
        found = np.abs(difference(means, pair))
        print(f"{pair[0]} from {pair[1]}: {found.mean():.3%} in the mean of the windows, {found.max():.3%} at most")
    held_out = runs.held_out()
    for name, metrics in held_out.items():
        seconds = np.median(runs.seconds[name]) / np.median(runs.seconds["bfloat16"])
        print(
            f"{name}: held-out loss {metrics['loss']:.4f}, MTP {metrics['mtp_loss']:.4f}; "
            f"a step takes {seconds:.2f} of bfloat16's processor time"
        )


if __name__ == "__main__":
    main()
