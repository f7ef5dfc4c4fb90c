"""Training of the configuration `tiny`: what a step and a checkpoint cost.

    JAX_PLATFORMS=cpu python -m benchmarks.training

Steps alone and steps with a checkpoint take turns. `save` returns when the state is copied and a thread writes it; the
next step runs beside that thread. A save that is waited for is what a trainer without the thread would pay. Figures are
medians. A GPU's step would not share its cores with that thread.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from benchmarks.record import Cell, Report, arguments, elapsed, run
from configs.tiny import TRAINING
from training.loop import Checkpoints, OneDevice
from training.step import initial_state

REPEATS = 5


def main(report: Report) -> None:
    arguments(__doc__)
    report.table("A step and a checkpoint", ["what", "seconds", "of a step"], costs())


def costs() -> Iterator[list[Cell]]:
    """Yields a line per kind of step."""
    trainer, rng = OneDevice(TRAINING), np.random.default_rng(0)
    shape = TRAINING.batch_size, TRAINING.sequence_length
    state = trainer.place(initial_state(TRAINING))
    alone, beside, returned, waited, processor = [], [], [], [], []

    def step() -> None:
        nonlocal state
        shares = rng.random(shape) ** 3  # few words are frequent and most are rare, as in text
        tokens = (TRAINING.model.vocab_size * shares).astype(np.int32)
        state, metrics = trainer.step(state, tokens)
        jax.block_until_ready((state, metrics))

    def save(checkpoints: Checkpoints, number: int, wait: bool) -> None:
        checkpoints.save(number, trainer.saved_state(state))
        if wait:
            checkpoints.wait()

    step()
    for number in range(1, REPEATS + 1):
        before = os.times()
        alone.append(elapsed(step))
        after = os.times()
        processor.append((after.user - before.user + after.system - before.system, after.system - before.system))
        for wait, taken in ((False, returned), (True, waited)):
            with tempfile.TemporaryDirectory() as directory, Checkpoints(Path(directory), TRAINING) as checkpoints:
                taken.append(elapsed(lambda: save(checkpoints, number, wait)))  # noqa: B023
                if not wait:
                    beside.append(elapsed(step))
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


if __name__ == "__main__":
    run(main)
