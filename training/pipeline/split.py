"""Splits the gradient of a function into three programs: forward, input gradient, weight gradient.

Pipeline schedules run the two halves of a backward apart: the previous stage waits for the input gradient, the weight
gradient can fill a bubble. Two calls of `jax.vjp` would compute the inner cotangents twice. So one trace of the whole
gradient is cut: each equation goes to the first program that needs it, which passes values on to later ones.

Some equations are repeated by each program that needs them: those of parameters alone (a layer's slice of a stack, a
cast), or every micro-batch in flight would keep a copy of the weights, and cheap ones whose results would take more
memory than what they are computed from (`recompute`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import jax
from jax.extend import core

from training.pipeline.recompute import choose_saved

Function = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`(params, x, data) -> (y, extra)`: differentiated with respect to params and x; extra is not differentiated."""
_CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that call a part of the program."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The three programs of one function, which pass lists of arrays to each other; the caller jits them."""

    forward: Callable[[Any, Any, Any], tuple[Any, Any, list[jax.Array]]]
    """`(params, x, data) -> (y, extra, saved)`"""
    input_gradient: Callable[[Any, list[jax.Array], Any], tuple[Any, list[jax.Array]]]
    """`(params, saved, dy) -> (dx, made)`"""
    weight_gradient: Callable[[Any, list[jax.Array]], Any]
    """`(params, kept) -> dparams`"""
    kept: tuple[int, ...]
    """Indices in `saved` of the values that the weight gradient reads; the input gradient frees the others."""

    def keep(self, saved: list[jax.Array], made: list[jax.Array]) -> list[jax.Array]:
        """Returns the values to keep until the weight gradient; outside of `jax.jit`, which would copy them."""
        return [*(saved[i] for i in self.kept), *made]


def split(function: Function, params: Any, x: Any, data: Any) -> Split:
    """Traces the gradient of `function` at the shapes of its arguments (arrays or `jax.ShapeDtypeStruct`), and cuts it.

    params and x must be floating-point values.
    """

    def gradient(params: Any, x: Any, data: Any, dy: Any) -> Any:
        y, pullback, extra = jax.vjp(lambda params, x: function(params, x, data), params, x, has_aux=True)
        dparams, dx = pullback(dy)
        return (y, extra), dx, dparams

    dy, _ = jax.eval_shape(function, params, x, data)
    closed, shapes = jax.make_jaxpr(gradient, return_shape=True)(params, x, data, dy)
    return _cut(_Trace(inline(closed), (params, x, data, dy), shapes), shapes)


class _Trace:
    """The traced equations of a gradient and their dependencies."""

    def __init__(self, closed: core.ClosedJaxpr, arguments: tuple[Any, ...], results: tuple[Any, ...]):
        self.closed, self.jaxpr = closed, closed.jaxpr
        self.params, self.x, self.data, self.dy = _split_leaves(self.jaxpr.invars, arguments)
        self.results, self.dx, self.dparams = _split_leaves(self.jaxpr.outvars, results)
        made = [out for eqn in self.jaxpr.eqns for out in eqn.outvars]
        self.position = {v: i for i, v in enumerate([*self.jaxpr.constvars, *self.jaxpr.invars, *made])}
        self.repeated: set[int] = set()
        """Equations of parameters alone, which each program repeats."""
        self.everywhere = {*self.params, *self.jaxpr.constvars}
        for i, eqn in enumerate(self.jaxpr.eqns):
            if not _is_product(eqn) and self.everywhere.issuperset(variables(eqn.invars)):
                self.repeated.add(i)
                self.everywhere.update(eqn.outvars)

    def needed(
        self, results: Iterable[Any], done: set[int], saved: Set[Any] = frozenset()
    ) -> tuple[list[int], list[Any]]:
        """Returns the equations besides `done` that compute `results` from `saved`, and the variables they read."""
        wanted, equations = set(variables(results)), list[int]()
        for i, eqn in reversed(list(enumerate(self.jaxpr.eqns))):
            if i not in done and not wanted.isdisjoint(v for v in eqn.outvars if v not in saved):
                equations.append(i)
                wanted.update(variables(eqn.invars))
        own = self.everywhere.union(self.made_by(equations)) - saved
        return equations[::-1], sorted(wanted - own, key=self.position.__getitem__)

    def made_by(self, equations: Iterable[int]) -> set[Any]:
        """Returns the results of these equations."""
        return {out for i in equations for out in self.jaxpr.eqns[i].outvars}

    def program(self, equations: list[int], inputs: list[Any], results: list[Any]) -> Callable[..., list[jax.Array]]:
        """Returns `(*params, *inputs) -> results`, a program of some of the equations."""
        jaxpr = self.jaxpr.replace(
            invars=[*self.params, *inputs],
            outvars=results,
            eqns=[self.jaxpr.eqns[i] for i in equations],
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, self.closed.consts))


def _cut(trace: _Trace, shapes: tuple[Any, ...]) -> Split:
    """Assigns each equation to the first program that needs it: forward, input gradient, weight gradient."""
    first, _ = trace.needed(trace.results, set())
    done = set(first) - trace.repeated
    of_first = trace.made_by(done).union(trace.x, trace.data)
    second, second_reads = trace.needed(trace.dx, done)
    _, third_reads = trace.needed(trace.dparams, done.union(second) - trace.repeated)
    read = of_first.intersection([*second_reads, *third_reads])
    chosen = choose_saved([trace.jaxpr.eqns[i] for i in sorted(done)], read, trace.everywhere)

    second, second_reads = trace.needed(trace.dx, set(), chosen)
    of_second = trace.made_by(set(second) - done).union(trace.dy)
    third, third_reads = trace.needed(trace.dparams, set(second) - done - trace.repeated, chosen)
    kept = [v for v in third_reads if v not in of_second]
    made = [v for v in third_reads if v in of_second]
    saved = sorted({*second_reads, *kept} - of_second, key=trace.position.__getitem__)
    forward = trace.program(first, trace.x + trace.data, trace.results + saved)
    inputs = trace.program(second, saved + trace.dy, trace.dx + made)
    weights = trace.program(third, kept + made, trace.dparams)
    (y, extra), dx, dparams = shapes

    def run_forward(params: Any, x: Any, data: Any) -> tuple[Any, Any, list[jax.Array]]:
        return _unflatten((y, extra), forward(*jax.tree.leaves((params, x, data))))

    def run_input_gradient(params: Any, saved: list[jax.Array], dy: Any) -> tuple[Any, list[jax.Array]]:
        return _unflatten((dx,), inputs(*jax.tree.leaves((params, saved, dy))))

    def run_weight_gradient(params: Any, kept: list[jax.Array]) -> Any:
        return _unflatten((dparams,), weights(*jax.tree.leaves((params, kept))))[0]

    positions = tuple(saved.index(v) for v in kept)
    return Split(run_forward, run_input_gradient, run_weight_gradient, positions)


def _split_leaves(flat: Sequence[Any], trees: tuple[Any, ...]) -> list[list[Any]]:
    """Returns the leaves of each tree from the list of all."""
    rest = iter(flat)
    return [list(itertools.islice(rest, len(jax.tree.leaves(tree)))) for tree in trees]


def _unflatten(like: tuple[Any, ...], flat: list[jax.Array]) -> Any:
    """Returns `flat` as trees like those of `like`, and the remaining values as a list."""
    parts = _split_leaves(flat, like)
    trees = (jax.tree.unflatten(jax.tree.structure(tree), part) for tree, part in zip(like, parts, strict=True))
    return *trees, flat[sum(map(len, parts)) :]


def inline(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns the program with all calls inlined, as their equations may belong to different halves."""
    equations: list[core.JaxprEqn] = []
    constants: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    new_variable = core.gensym()

    def inline(jaxpr: core.Jaxpr, names: dict[Any, Any]) -> list[Any]:
        """Appends the equations of `jaxpr` with new variables; returns those of its results."""

        def rename(atom: Any) -> Any:
            return names[atom] if isinstance(atom, core.Var) else atom

        for eqn in jaxpr.eqns:
            inputs = [rename(atom) for atom in eqn.invars]
            if eqn.primitive.name in _CALLS:
                inner = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
                inside = [new_variable(v.aval) for v in inner.jaxpr.constvars]
                constants.update(zip(inside, inner.consts, strict=True))
                own = dict(zip([*inner.jaxpr.constvars, *inner.jaxpr.invars], [*inside, *inputs], strict=True))
                names.update(zip(eqn.outvars, inline(inner.jaxpr, own), strict=True))
            else:
                outputs = [new_variable(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(invars=inputs, outvars=outputs))
                names.update(zip(eqn.outvars, outputs, strict=True))
        return [rename(atom) for atom in jaxpr.outvars]

    top = closed.jaxpr
    results = inline(top, {v: v for v in [*top.constvars, *top.invars]})
    info = top.debug_info.with_unknown_names()
    flat = top.replace(constvars=list(constants), outvars=results, eqns=equations, debug_info=info)
    return core.ClosedJaxpr(flat, list(constants.values()))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the variables among an equation's inputs or a program's results, without literals."""
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def _is_product(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is expensive: a matrix product, a loop, a kernel."""
    return eqn.primitive.name == "dot_general" or bool(list(core.jaxprs_in_params(eqn.params)))
