"""Measures the processor time of a training step.

    JAX_PLATFORMS=cpu python -m benchmarks.training_step [--config tiny] [--steps 10]

Prints the median processor seconds of a step on random rows, of all threads, the kernel's part of them, and tokens per
second.
"""

import argparse
import importlib
import os
import statistics

import jax
import numpy as np

from training.config import TrainingConfig
from training.step import TrainState, initial_state, train_step

UNTIMED = 2


def seconds(state: TrainState, tokens: np.ndarray, config: TrainingConfig) -> tuple[TrainState, np.ndarray]:
    """Makes a step; returns the state and the processor's seconds in the program and in the kernel, [2]."""
    before = os.times()
    state, metrics = train_step(state, tokens, config=config)
    jax.block_until_ready((state, metrics))
    after = os.times()
    return state, np.array([after.user - before.user, after.system - before.system])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny", help="a module of `configs`")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    base = importlib.import_module(f"configs.{arguments.config}").TRAINING
    state, rng = initial_state(base), np.random.default_rng(0)
    spent = []
    for _ in range(UNTIMED + arguments.steps):
        # Few words are frequent and most are rare, as in text.
        shares = rng.random((base.batch_size, base.sequence_length)) ** 3
        tokens = (base.model.vocab_size * shares).astype(np.int32)
        state, step = seconds(state, tokens, base)
        spent.append(step)
    user, system = (statistics.median(column) for column in zip(*spent[UNTIMED:], strict=True))
    speed = tokens.size / (user + system)
    print(f"{user + system:.3f} s per step, {system:.3f} of it in the kernel, {speed:,.0f} tokens per second")


if __name__ == "__main__":
    main()
