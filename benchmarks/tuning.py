"""What `launch.tune` gains on this machine for the bundled model: an engine with its file beside one without.

    JAX_PLATFORMS=cpu python -m benchmarks.tuning [--budget_seconds 500] [--rounds 7]

Both engines answer the same prompts of random tokens in turns, 64 tokens each, at several numbers of requests at once;
each round has new prompts. "Speed" is the time with the defaults over that with the file.
"""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.engines import answer, bundled_engine
from benchmarks.record import Cell, Report, arguments, run, spread
from dsv3 import SamplingParams
from dsv3.config.options import EngineOptions
from dsv3.engine.build import bundled_model
from dsv3.engine.engine import Engine
from tools.tune.run import tune

LIMITS = {"max_num_seqs": 32}
SIZES, PROMPTS, ANSWER = (1, 6, 20, 32), (20, 100, 300), 64


def main(report: Report) -> None:
    given = arguments(__doc__, budget_seconds=500.0, rounds=7)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuning.json"
        tune(bundled_model(), EngineOptions(**LIMITS), path, given.budget_seconds)
        engines = [bundled_engine(tuning=file, **LIMITS) for file in (None, str(path))]
    columns = ["requests at once", "prompt (tokens)", "answer (tokens)", "speed"]
    report.table("Tuned over defaults", columns, _rows(engines, given.rounds))


def _rows(engines: list[Engine], rounds: int) -> Iterator[list[Cell]]:
    random, sampling = np.random.default_rng(0), SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    for size, length in itertools.product(SIZES, PROMPTS):
        speeds = []
        for number in range(rounds + 1):
            prompts = random.integers(0, engines[0].model_cfg.vocab_size, (size, length)).tolist()
            order = engines if number % 2 else engines[::-1]
            seconds = {id(engine): answer(engine, prompts, sampling).seconds for engine in order}
            speeds.append(seconds[id(engines[0])] / seconds[id(engines[1])])
        yield [size, length, ANSWER, spread(speeds[1:])]  # what runs first is slower


if __name__ == "__main__":
    run(main)
