"""Orders an overlapped pair: beside each transfer of one direction stand matrix products of the other.

A forward and a backward of other micro-batches share no value, so any order of their parts is right. The published one
takes them by turns, per layer:

    compute  | attention F | MLP B and W | MLP F      | attention B and W |
    network  | combine B   | dispatch F  | dispatch B | combine F         |

The two programs are traced and cut where a transfer's result is needed. The parts are compiled as units in that order,
and each transfer in two halves, around the unit of the other direction (`sharding.wire.collectives`).
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from sharding.wire.collectives import Overlap, Transfer, in_program_order, start_all_gather, start_reduce_scatter
from training.pipeline.split import inline, variables

Inputs = tuple[Any, ...]


def woven(
    forward: Callable[..., Any], backward: Callable[..., Any], overlap: Overlap
) -> Callable[[Inputs, Inputs], tuple[Any, Any]]:
    """Returns a program of both, for `shard_map`: it takes the arguments of each, and returns the results of each.

    Transfers are the all-gathers and reduce-scatters of the leading axis.
    """

    def both(inputs: Inputs, other_inputs: Inputs) -> tuple[Any, Any]:
        first = _Direction("forward", forward, inputs, overlap)
        second = _Direction("backward", backward, other_inputs, overlap)
        _take_turns(first, second)
        return first.results(), second.results()

    return in_program_order(both, overlap)


class _Direction:
    """One program on its way. A value's level is the number of transfers, one after the other, that it needs."""

    def __init__(self, name: str, function: Callable[..., Any], inputs: Inputs, overlap: Overlap):
        closed, self._shapes = jax.make_jaxpr(function, return_shape=True)(*inputs)
        closed = inline(closed)
        self._name, self._jaxpr, self._overlap = name, closed.jaxpr, overlap
        self._values: dict[Any, Any] = dict(zip(self._jaxpr.invars, jax.tree.leaves(inputs), strict=True))
        self._values |= dict(zip(self._jaxpr.constvars, closed.consts, strict=True))
        self._equations: dict[int, list[core.JaxprEqn]] = defaultdict(list)
        self._transfers: dict[int, list[core.JaxprEqn]] = defaultdict(list)
        self._under_way: dict[Any, Transfer] = {}
        self.depth = self._sort()

    def _sort(self) -> int:
        """Gives each equation to its level; returns the last one."""
        level = dict.fromkeys(self._values, 0)
        for eqn in self._jaxpr.eqns:
            at = max((level[v] for v in variables(eqn.invars)), default=0)
            moves = eqn.primitive.name in _STARTS
            (self._transfers if moves else self._equations)[at].append(eqn)
            level |= dict.fromkeys(eqn.outvars, at + moves)
        return max(level.values(), default=0)

    def compute(self, level: int) -> None:
        """Runs what needs the transfers before this level and no later ones, as one unit."""
        equations = self._equations.pop(level, [])
        if not equations:
            return
        made = dict.fromkeys(v for eqn in equations for v in eqn.outvars)
        reads = list(dict.fromkeys(v for eqn in equations for v in variables(eqn.invars) if v not in made))
        later = self._needed_later()
        gives = [v for v in made if v in later]
        info = self._jaxpr.debug_info.with_unknown_names()
        unit = self._jaxpr.replace(constvars=[], invars=reads, outvars=gives, eqns=equations, debug_info=info)
        with jax.named_scope(self._name):
            results = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(unit, [])))(*(self._values[v] for v in reads))
        self._values |= dict(zip(gives, results, strict=True))

    def _needed_later(self) -> set[Any]:
        rest = [eqn for group in (self._equations, self._transfers) for eqns in group.values() for eqn in eqns]
        return {v for eqn in rest for v in variables(eqn.invars)} | set(variables(self._jaxpr.outvars))

    def start(self, level: int) -> None:
        """Starts the transfers of what this level has computed."""
        for eqn in self._transfers.pop(level, []):
            (source,), (result,) = eqn.invars, eqn.outvars
            with jax.named_scope(self._name):
                start = _STARTS[eqn.primitive.name]
                self._under_way[result] = start(self._values[source], eqn.params["axis_name"], self._overlap)

    def finish(self) -> None:
        """Waits for the transfers under way."""
        self._values |= {result: transfer.finish() for result, transfer in self._under_way.items()}
        self._under_way.clear()

    def results(self) -> Any:
        """Returns what the program returns."""
        values = [self._values[v] if isinstance(v, core.Var) else v.val for v in self._jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(self._shapes), values)


def _take_turns(forward: _Direction, backward: _Direction) -> None:
    """Runs both so that each transfer is under way while the other direction computes."""
    backward.compute(0)
    for level in range(max(forward.depth, backward.depth) + 1):
        backward.start(level)
        forward.compute(level)
        backward.finish()
        forward.start(level)
        backward.compute(level + 1)
        forward.finish()


_STARTS: dict[str, Callable[[jax.Array, tuple[str, ...], Overlap], Transfer]] = {
    "all_gather": start_all_gather,
    "reduce_scatter": start_reduce_scatter,
}
