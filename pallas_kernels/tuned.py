"""Plans of kernels that were measured on this device, in place of what a planner estimates.

Each planner passes its choice through `choose`. `launch.tune` records the choices that a model's programs make, times
the legal plans of each, and writes those that are faster to a file; an engine that starts with this file sets them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from pallas_kernels import invariance


@dataclasses.dataclass(frozen=True)
class PlanChoice:
    """A planner's choice for a kernel at a shape: `default` is its own, `legal` are all, the likeliest first.

    A plan is anything whose `str` identifies it.
    """

    kernel: str
    shape: tuple[int | str, ...]
    default: Any
    legal: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The key of the choice in a table of plans."""
        return _name(self.kernel, self.shape)


_plans: dict[str, str] = {}
_recordings: list[dict[str, PlanChoice]] = []


def choose[Plan](kernel: str, shape: tuple[int | str, ...], default: Plan, legal: Callable[[], Iterable[Plan]]) -> Plan:
    """Returns the measured plan of a kernel at a shape if it is among the `legal` ones, else `default`.

    A program that must be batch-invariant has the default: it is one for all numbers of rows.
    """
    if invariance.required() or not (_plans or _recordings):
        return default
    name = _name(kernel, shape)
    for recording in _recordings:
        recording[name] = PlanChoice(kernel, shape, default, tuple(legal()))
    if (wanted := _plans.get(name)) is None:
        return default
    return next((plan for plan in legal() if str(plan) == wanted), default)


def set_plans(table: Mapping[str, str]) -> None:
    """Sets the plans of this process: by the name of a `PlanChoice`, the `str` of a plan.

    Call it before programs are traced: compiled ones do not change.
    """
    if table == _plans:
        return
    _plans.clear()
    _plans.update(table)
    jax.clear_caches()  # traced functions must be traced again


def plans() -> dict[str, str]:
    """Returns the table of `set_plans`, sorted by name."""
    return dict(sorted(_plans.items()))


@contextlib.contextmanager
def recording() -> Iterator[dict[str, PlanChoice]]:
    """Yields a table by name that gets each choice that is made in the block, in any thread."""
    found: dict[str, PlanChoice] = {}
    _recordings.append(found)
    jax.clear_caches()  # a function that has been traced would make no choice
    try:
        yield found
    finally:
        _recordings.remove(found)


def _name(kernel: str, shape: tuple[int | str, ...]) -> str:
    return f"{kernel} {' x '.join(map(str, shape))}"
