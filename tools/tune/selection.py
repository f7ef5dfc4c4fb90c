"""Which of several candidates is faster, from times that were measured in turns. Imports no jax.

All candidates run once in each round, so that what slows the machine down for a while slows all of them down. A default
is replaced only by what was faster by `GAIN` in three rounds of four.
"""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

GAIN = 1.03


class Outcome(NamedTuple):
    """A choice, as it is shown and kept: its default, what was chosen, and the speed of that over the default's."""

    choice: str
    default: str
    chosen: str
    gain: float


def timed_in_turns(timers: Sequence[Callable[[], float]], rounds: int) -> np.ndarray:
    """Returns the times `[rounds, timers]` of functions that return seconds; each round begins with another one."""
    times = np.empty((rounds, len(timers)))
    for number in range(rounds):
        for i in range(len(timers)):
            at = (number + i) % len(timers)
            times[number, at] = timers[at]()
    return times


def speed(before: np.ndarray, after: np.ndarray) -> float:
    """Returns the speed-up `before / after` that three rounds of four reached at least."""
    return float(np.quantile(np.asarray(before) / np.asarray(after), 0.25, method="lower"))


def fastest(times: np.ndarray, default: int) -> tuple[int, float]:
    """Returns the column of the fastest candidate and its speed over the default's, which stays unless it is slower."""
    speeds = [speed(times[:, default], times[:, at]) for at in range(times.shape[1])]
    best = int(np.argmax(speeds))
    return (best, speeds[best]) if speeds[best] > GAIN else (default, 1.0)


def smallest_as_fast(times: np.ndarray) -> tuple[int, float]:
    """Returns the last column that is about as fast as the first one, or the fastest if that gains; and its speed."""
    best, gained = fastest(times, 0)
    as_fast = [at for at in range(times.shape[1]) if speed(times[:, best], times[:, at]) > 1 / GAIN]
    at = max([best, *as_fast])
    return at, (gained if at == best else speed(times[:, 0], times[:, at]))


def padding_loss(sizes: Collection[int], candidates: Sequence[int], seconds: np.ndarray) -> float:
    """Returns the mean time of work of each candidate size over the time without padding.

    Work is padded to the next of `sizes`; candidates are equally likely. `seconds` are their times.
    """
    padded = {n: next(at for at in range(i, len(candidates)) if candidates[at] in sizes)
              for i, n in enumerate(candidates)}  # fmt: skip
    logs = [math.log(seconds[padded[n]] / seconds[i]) for i, n in enumerate(candidates)]
    return math.exp(sum(logs) / len(logs))


def choose_sizes(
    candidates: Sequence[int], times: np.ndarray, default: Collection[int], required: Collection[int]
) -> tuple[tuple[int, ...], float]:
    """Returns the sizes to compile, ascending, and the mean speed with them over that with the default ones.

    Each size beyond the `required` ones shortens the mean time by `GAIN`; a size is a program, which takes time to
    compile and memory. The default stays unless the speed gains as much.

    Args:
      candidates: all sizes, ascending; they include the last of `default` and all `required` ones.
      times: `[rounds, candidates]` seconds of a step of each size.
    """
    seconds = np.median(times, axis=0)
    free = [size for size in candidates if size not in required]
    chosen = tuple(sorted(required))
    loss = padding_loss(chosen, candidates, seconds)
    for count in range(1, len(free) + 1):
        sets = (tuple(sorted({*required, *more})) for more in itertools.combinations(free, count))
        best = min(sets, key=lambda sizes: padding_loss(sizes, candidates, seconds))
        lower = padding_loss(best, candidates, seconds)
        if loss / lower <= GAIN:
            break
        chosen, loss = best, lower
    losses = np.array([[padding_loss(sizes, candidates, row) for sizes in (default, chosen)] for row in times])
    gained = speed(losses[:, 0], losses[:, 1])
    return (chosen, gained) if gained > GAIN else (tuple(sorted(default)), 1.0)
