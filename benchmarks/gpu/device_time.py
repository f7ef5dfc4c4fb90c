"""Milliseconds of an operation on a GPU, the L2 cache flushed before each run, by CUPTI or else by the host's clock."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

RUNS = 20
FLUSH_BYTES = 256 << 20  # five L2 caches


_flushed_alone = jax.jit(lambda flush: flush + 1)


class Flushed:
    """A function compiled together with a flush of the L2 cache before it; the flush's own time is taken off.

    With `donate`, the function's first argument is donated and its result takes that argument's place in the next run.
    """

    def __init__(self, fn: Callable, *, donate: bool = False):
        def flushed(flush, *arrays):
            flush, arrays = lax.optimization_barrier((flush + 1, arrays))
            return flush, fn(*arrays)

        self._donate = donate
        self._with_flush = jax.jit(flushed, donate_argnums=(1,) if donate else ())

    def median_ms(self, *arrays, runs: int | None = None) -> float:
        """Median over `runs` (RUNS where None). A donated array is copied first."""
        runs, flush = runs or RUNS, jnp.zeros(FLUSH_BYTES // 4, jnp.float32)
        if self._donate:  # a donated array cannot be passed twice, so each run gets what the last one returned
            return _clocked_in_place(self._with_flush, _flushed_alone, flush, arrays, runs)
        return max(_device_ms(self._with_flush, runs, flush, *arrays) - _device_ms(_flushed_alone, runs, flush), 1e-6)


def median_ms(fn: Callable, *arrays, runs: int | None = None, donate: bool = False) -> float:
    """`Flushed.median_ms` of a function that is timed once."""
    return Flushed(fn, donate=donate).median_ms(*arrays, runs=runs)


def _device_ms(fn: Callable, runs: int, *arrays) -> float:
    try:
        from jax.experimental.mosaic.gpu import profiler

        times: Any = profiler.measure(fn, aggregate=True, iterations=runs)(*arrays)[1]
        return statistics.median(times)
    except (ImportError, RuntimeError, TypeError, AttributeError) as error:
        print(f"no CUPTI ({error}); the host's clock instead, launches included", file=sys.stderr)
        return statistics.median(_clock(lambda: jax.block_until_ready(fn(*arrays))) for _ in range(runs + 1))


def _clocked_in_place(with_flush, alone, flush, arrays, runs: int) -> float:
    pages, rest = jnp.copy(arrays[0]), arrays[1:]
    calls = 50

    def loop() -> None:
        nonlocal pages
        for _ in range(calls):
            _, pages = with_flush(flush, pages, *rest)
        jax.block_until_ready(pages)

    def loop_alone() -> None:
        jax.block_until_ready([alone(flush) for _ in range(calls)][-1])

    loop()
    loop_alone()
    repeats = max(runs // 4, 1)
    both = statistics.median(_clock(loop) for _ in range(repeats))
    return max(both - statistics.median(_clock(loop_alone) for _ in range(repeats)), 1e-6) / calls


def _clock(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3
