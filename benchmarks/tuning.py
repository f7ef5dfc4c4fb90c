"""What `launch.tune` chooses on this machine for the bundled model, and an engine with its file beside one without.

    JAX_PLATFORMS=cpu python -m benchmarks.tuning [--budget_seconds 500] [--rounds 7]

Both engines answer the same prompts of random tokens in turns, 64 tokens each, at several numbers of requests at once;
each round has new prompts. "Speed" is the time with the defaults over that with the file. The first table has the
choices, kernels by how many.
"""

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.engines import answer, bundled_engine
from benchmarks.record import Cell, Report, arguments, run, spread
from dsv3 import SamplingParams
from dsv3.config.options import EngineOptions
from dsv3.engine.build import bundled_model
from dsv3.engine.engine import Engine
from dsv3.engine.tuning import Tuning
from tools.tune.run import tune

LIMITS = {"max_num_seqs": 32}
SIZES, PROMPTS, ANSWER = (1, 6, 20, 32), (20, 100, 300), 64


def main(report: Report) -> None:
    given = arguments(__doc__, budget_seconds=500.0, rounds=7)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuning.json"
        tuning = tune(bundled_model(), EngineOptions(**LIMITS), path, given.budget_seconds)
        columns = ["choice", "default", "chosen", "times as fast"]
        report.table("What was chosen", columns, _choices(tuning))
        engines = [bundled_engine(tuning=file, **LIMITS) for file in (None, str(path))]
    columns = ["requests at once", "prompt (tokens)", "answer (tokens)", "speed"]
    report.table("Tuned over defaults", columns, _rows(engines, given.rounds))


def _choices(tuning: Tuning) -> Iterator[list[Cell]]:
    """Yields a row per choice of the engine, and one per kernel, default and chosen plan."""
    plans = Counter[tuple[str, str, str]]()
    gains: dict[tuple[str, str, str], list[float]] = {}
    for row in tuning.measured:
        if row["choice"].split()[-1] not in ("alone", "stack"):
            yield [row["choice"], row["default"], row["chosen"], row["gain"]]
            continue
        case = (f"products {row['choice'].rpartition('x')[2].strip()}", row["default"], row["chosen"])
        plans[case] += 1
        gains.setdefault(case, []).append(row["gain"])
    for (name, default, chosen), count in sorted(plans.items()):
        yield [f"{count} {name}", default, chosen, float(np.median(gains[name, default, chosen]))]


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
