"""Measures what a checkpoint costs a training step of the configuration `tiny`, on whatever device is there.

    JAX_PLATFORMS=cpu python -m benchmarks.training_checkpoints

Steps alone and steps with a checkpoint take turns. `save` returns when the state is copied and a thread writes it; the
next step runs beside that thread. A save that is waited for is what a trainer without the thread would pay. Figures are
medians, as shares of a step without a checkpoint.
"""

import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from configs.tiny import TRAINING
from training.loop import Checkpoints, OneDevice
from training.step import initial_state

REPEATS = 5


def main() -> None:
    trainer, rng = OneDevice(TRAINING), np.random.default_rng(0)
    shape = TRAINING.batch_size, TRAINING.sequence_length
    state = trainer.place(initial_state(TRAINING))
    alone, beside, returned, waited = [], [], [], []

    def step() -> float:
        nonlocal state
        tokens = rng.integers(10, TRAINING.model.vocab_size, shape).astype(np.int32)
        start = time.perf_counter()
        state, metrics = trainer.step(state, tokens)
        jax.block_until_ready(metrics)
        return time.perf_counter() - start

    step()
    for number in range(1, REPEATS + 1):
        alone.append(step())
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
    base = statistics.median(alone)
    print(f"{size:.0f} MB per checkpoint, {jax.devices()[0].device_kind}, {REPEATS} of each")
    print("| | share of a step |")
    print("|---|---|")
    print("| step alone | 1.00 |")
    print(f"| `save`, until it returns | {statistics.median(returned) / base:.2f} |")
    print(f"| step beside the thread that writes | {statistics.median(beside) / base:.2f} |")
    print(f"| `save`, until it is written | {statistics.median(waited) / base:.2f} |")


if __name__ == "__main__":
    main()
