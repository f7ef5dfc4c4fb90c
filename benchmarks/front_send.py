"""Processor time that sending a step's results to its fronts takes of the engine's thread.

python -m benchmarks.front_send [--rows 18432]
"""

import statistics
import time

import numpy as np
from absl import flags as absl_flags

from dsv3.processes import frames
from dsv3.scheduler.request import StepOutputs, Tokens, first_id
from dsv3.server.engine.api_servers import split
from dsv3.server.engine.messages import Outputs
from launch import flags

_ROWS = absl_flags.DEFINE_integer("rows", 18432, "Send the tokens of this many requests.", 1)
_STEPS = absl_flags.DEFINE_integer("steps", 200, "Measure this many steps.", 1)


def main() -> None:
    """Prints the median for one, two, four and sixteen fronts."""
    for fronts in (1, 2, 4, 16):
        ids = np.array([first_id(i % fronts) + i for i in range(_ROWS.value)], np.int64)
        rows = Tokens(ids, np.ones(len(ids), np.int64), np.arange(len(ids), dtype=np.int32))
        times = [_send(StepOutputs([rows], []), fronts) for _ in range(_STEPS.value)]
        print(f"{fronts} fronts: {statistics.median(times) * 1e6:.0f} us")


def _send(outputs: StepOutputs, fronts: int) -> float:
    """Encodes a step's frames as `Fronts.deliver` does; returns the thread's seconds."""
    started = time.thread_time()
    for part in split(outputs).values() if fronts > 1 else [outputs]:
        frames.encode(Outputs.from_outputs(part, None))
    return time.thread_time() - started


if __name__ == "__main__":
    flags.run(main)
