"""The cost per step of fewer samplers: each that a CPU compiles, over the one that a GPU has for the same rows.

  JAX_PLATFORMS=cpu python -m benchmarks.sampler_programs

Prints for batches of 1, 16 and 64 rows of 8,192 logits milliseconds of processor time per step of both, in turns, and
the median of the ratios with their range. All rows of a batch ask for the same.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.engine.device import state as device_state
from dsv3.engine.device.sampling import num_words
from dsv3.engine.device.state import NUM_FIELDS, Field
from dsv3.engine.jobs.sample import Sampler, sample_body
from dsv3.scheduler.sequence import DRAWN, FILTERED, FULL
from dsv3.scheduler.structured_output import ALL

_VOCAB_SIZE = 8192
ROWS = (1, 16, 64)
_LOOKING = Sampler(FILTERED, looks=True)
_EVERYTHING = Sampler(FULL, is_held=True, looks=True)
# What the rows ask for: the sampler of a CPU, that of a GPU.
CASES: dict[str, tuple[dict[Field, float], Sampler, Sampler]] = {
    "temperature": ({}, _LOOKING, Sampler(DRAWN)),
    "top_p": ({Field.TOP_P: 0.95}, _LOOKING, Sampler(FILTERED)),
    "top_p and top_k": ({Field.TOP_P: 0.95, Field.TOP_K: 50}, _LOOKING, Sampler(FILTERED)),
    "penalties": ({Field.PRESENCE: 0.5}, _EVERYTHING, Sampler(FULL)),
    "penalties and top_p": ({Field.PRESENCE: 0.5, Field.TOP_P: 0.95}, _EVERYTHING, Sampler(FULL)),
    "a grammar": ({}, _EVERYTHING, Sampler(DRAWN, is_held=True)),
    "a grammar and top_p": ({Field.TOP_P: 0.95}, _EVERYTHING, Sampler(FILTERED, is_held=True)),
}


def controls(rows: int, asked: dict[Field, float]) -> np.ndarray:
    """Returns sampling parameters of temperature 0.7 and what is `asked`, `[rows, NUM_FIELDS]` int32."""
    found = np.zeros((rows, NUM_FIELDS), np.int32)
    neutral = {Field.TEMPERATURE: 0.7, Field.TOP_P: 1.0, Field.REPETITION: 1.0}
    for field, value in (neutral | asked).items():
        found[:, field] = value if field >= Field.TOP_K else np.float32(value).view(np.int32)
    found[:, Field.SEED_LOW] = np.arange(rows)
    found[:, Field.ADJUSTED] = Field.PRESENCE in asked
    return found


def step(sampler: Sampler, rows: int, asked: dict[Field, float], logits: jax.Array) -> Callable[[], Any]:
    """Returns a compiled step of a sampler."""
    cfg = EngineConfig(max_model_len=2048, num_pages=64 * 32, max_num_seqs=64)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), device_state.decode_state_shapes(cfg, {}))
    table = jnp.asarray(controls(cfg.max_num_seqs, asked))
    state = type(empty)(empty.tokens, empty.lengths, empty.page_table, table, {})
    shapes = device_state.adjust_state_shapes(cfg, _VOCAB_SIZE)
    adjust = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), shapes) if sampler.variant == FULL else None
    masks = [jnp.full((rows, 1, num_words(_VOCAB_SIZE)), ALL, jnp.uint32)] if sampler.is_held else []
    body = functools.partial(sample_body, sampler.variant, looks=sampler.looks)
    given = (logits, jnp.arange(rows, dtype=jnp.int32), *masks)
    program = jax.jit(body, donate_argnums=(0, 1)).lower(state, adjust, *given).compile()
    held: list[Any] = [state, adjust]

    def run() -> np.ndarray:
        held[0], held[1], tokens = program(*held, *given)
        return np.asarray(tokens)

    return run


def timed(run: Callable[[], Any], count: int) -> float:
    """Returns milliseconds of processor time per call."""
    started = time.process_time()
    for _ in range(count):
        run()
    return 1e3 * (time.process_time() - started) / count


def compare(name: str, runs: tuple[Callable[[], Any], Callable[[], Any]], rounds: int, count: int) -> None:
    """Checks that both give the same tokens; times and prints them."""
    for _ in range(3):
        np.testing.assert_array_equal(runs[0](), runs[1]())
    found = []
    for i in range(rounds):
        order = (0, 1) if i % 2 else (1, 0)
        found.append([took for _, took in sorted((each, timed(runs[each], count)) for each in order)])
    now, before = np.median(found, axis=0)
    ratios = [a / b for a, b in found]
    print(
        f"{name:40} {now:6.2f} ms, apart {before:6.2f} ms, "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for rows in ROWS:
        logits = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 1, _VOCAB_SIZE), np.float32) * 4)
        for name, (asked, now, before) in CASES.items():
            runs = step(now, rows, asked, logits), step(before, rows, asked, logits)
            compare(f"{rows} rows, {name}", runs, options.rounds, max(2, 64 // rows))


if __name__ == "__main__":
    main()
