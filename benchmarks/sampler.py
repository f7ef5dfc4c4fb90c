"""The time of the samplers on this machine, and its ratio to another version of them, called in turns.

  git show COMMIT:dsv3/engine/device/sampling.py > before.py
  JAX_PLATFORMS=cpu python -m benchmarks.sampler --against before.py

Prints, for 16 rows of 8,192 logits and 128 rows of 129,280, milliseconds per call of the sampler that only draws, of
the filtered one, and of the one with penalties, biases and forbidden tokens before it: wall and processor time, the
median of the rounds. With `--against` also the medians, over the rounds, of the ratios to that file's sampler, and the
range of the ratios; that file's sampler filters always.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dsv3.engine.device import sampling

SHAPES = ((16, 8192, 20), (128, 129280, 1))  # rows, vocabulary, calls per round
BIASES, FORBIDDEN = 300, 144  # as wide as a slot's


def inputs(rows: int, vocab_size: int) -> tuple[np.ndarray, sampling.Controls, sampling.Adjustments]:
    """Returns logits, and parameters that keep every filter and penalty at work."""
    rng = np.random.default_rng(0)

    def each(value: float, dtype: Any = np.float32) -> np.ndarray:
        return np.full(rows, value, dtype)

    controls = sampling.Controls(
        each(0.7), each(0.95), each(0.001), each(50, np.int32), np.zeros((rows, 2), np.uint32), each(3, np.int32)
    )
    adjustments = sampling.Adjustments(
        repetition=each(1.1),
        presence=each(0.5),
        frequency=each(0.2),
        counts=rng.integers(0, 2, (rows, vocab_size), np.int32),
        in_prompt=rng.random((rows, vocab_size)) < 0.1,
        bias_ids=rng.integers(0, vocab_size, (rows, BIASES), np.int32),
        bias=np.ones((rows, BIASES), np.float32),
        forbidden_ids=rng.integers(0, vocab_size, (rows, FORBIDDEN), np.int32),
    )
    return (rng.standard_normal((rows, vocab_size), np.float32) * 4, controls, adjustments)


def samplers(module: Any, arguments: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    """Returns the compiled samplers of a version of `sampling.py`, by name, with their arguments on the device."""
    logits, controls, adjustments = arguments

    def drawn(logits: Any, controls: Any) -> Any:
        if module is not sampling:
            return apply_filters(logits, controls)
        return module.replace_invalid(logits, module.sample(logits, controls, filters=False), -1)

    def apply_filters(logits: Any, controls: Any) -> Any:
        return module.replace_invalid(logits, module.sample(logits, controls), -1)

    def everything(logits: Any, controls: Any, adjustments: Any) -> Any:
        return module.replace_invalid(
            logits, apply_filters(module.apply_adjustments(logits, adjustments), controls), -1
        )

    calls = {}
    plain = (logits, controls)
    for body, given in ((drawn, plain), (apply_filters, plain), (everything, (*plain, adjustments))):
        placed = jax.device_put(given)
        compiled = jax.jit(body).lower(*placed).compile()
        calls[body.__name__] = lambda compiled=compiled, placed=placed: compiled(*placed).block_until_ready()
    return calls


def timed(call: Callable[[], Any], count: int) -> np.ndarray:
    """Returns milliseconds per call, `[2]`: wall and processor time."""
    started = np.array([time.perf_counter(), time.process_time()])
    for _ in range(count):
        call()
    return 1e3 * (np.array([time.perf_counter(), time.process_time()]) - started) / count


def compare(name: str, now: Callable[[], Any], before: Callable[[], Any] | None, count: int, rounds: int) -> None:
    """Times and prints one sampler; with `before` the first to run alternates."""
    for call in (now, before):
        if call is not None:
            call()
    found: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for i in range(rounds):
        for is_now in (True, False) if i % 2 else (False, True):
            call = now if is_now else before
            if call is not None:
                found[is_now].append(timed(call, count))
    wall, processor = np.median(found[True], axis=0)
    print(f"{name}: {wall:.2f} ms, processor {processor:.2f} ms", flush=True)
    if before is not None:
        ratios = np.array(found[True]) / np.array(found[False])
        for kind, of_kind in zip(("wall", "processor"), ratios.T, strict=True):
            print(f"  {kind}: {statistics.median(of_kind):.3f} times ({of_kind.min():.3f} to {of_kind.max():.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="another version of dsv3/engine/device/sampling.py")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    other = None
    if options.against:
        spec = importlib.util.spec_from_file_location("sampling_against", options.against)
        assert spec is not None and spec.loader is not None
        other = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(other)
    for rows, vocab_size, count in SHAPES:
        arguments = inputs(rows, vocab_size)
        before = samplers(other, arguments) if other else {}
        for name, now in samplers(sampling, arguments).items():
            compare(f"[{rows}, {vocab_size}] {name}", now, before.get(name), count, options.rounds)


if __name__ == "__main__":
    main()
