"""Cuts the gradient of a function in three programs: forward, input gradient, weight gradient.

A pipeline schedule wants the two halves of a backward apart: the input gradient is what the stage before waits for,
the weight gradient can fill a bubble. `jax.vjp` cannot give them apart without computing the cotangents inside the
function twice. So one trace of the whole gradient is cut: each equation goes to the first program that needs it, and
a value that a later program needs is handed over. Nothing is computed twice, whatever the function is made of.

What follows from the parameters alone (a layer's slice of a stack, a cast) is the exception: each program takes it
from the parameters again, or every micro-batch in flight would hold a copy of the weights.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

Function = Callable[[Any, Any, Any], tuple[Any, Any]]
"""`(params, x, data) -> (y, extra)`: differentiated in params and x, not in data; extra is returned as it is."""
_CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that only name a part of the program."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The three programs of one function, to be jitted. Lists of arrays pass between them."""

    forward: Callable[[Any, Any, Any], tuple[Any, Any, list[jax.Array]]]
    """`(params, x, data) -> (y, extra, saved)`"""
    input_gradient: Callable[[Any, list[jax.Array], Any], tuple[Any, list[jax.Array]]]
    """`(params, saved, dy) -> (dx, made)`"""
    weight_gradient: Callable[[Any, list[jax.Array]], Any]
    """`(params, kept) -> dparams`"""
    kept: tuple[int, ...]
    """Places in `saved` of what the weight gradient reads; the rest is free after the input gradient."""

    def keep(self, saved: list[jax.Array], made: list[jax.Array]) -> list[jax.Array]:
        """Returns what waits for the weight gradient; in no program, because `jax.jit` copies what it passes on."""
        return [*(saved[i] for i in self.kept), *made]


def split(function: Function, params: Any, x: Any, data: Any) -> Split:
    """Traces `function` at the shapes of its arguments (arrays or `jax.ShapeDtypeStruct`) and cuts its gradient.

    params and x hold floating-point values only.
    """

    def gradient(params: Any, x: Any, data: Any, dy: Any) -> Any:
        y, pullback, extra = jax.vjp(lambda params, x: function(params, x, data), params, x, has_aux=True)
        dparams, dx = pullback(dy)
        return (y, extra), dx, dparams

    dy, _ = jax.eval_shape(function, params, x, data)
    closed, shapes = jax.make_jaxpr(gradient, return_shape=True)(params, x, data, dy)
    return _cut(_Trace(inline(closed), (params, x, data, dy), shapes), shapes)


class _Trace:
    """The equations of a gradient, and which of them each of its results needs."""

    def __init__(self, closed: core.ClosedJaxpr, arguments: tuple[Any, ...], results: tuple[Any, ...]):
        self.closed, self.jaxpr = closed, closed.jaxpr
        self.params, self.x, self.data, self.dy = _share(self.jaxpr.invars, arguments)
        self.results, self.dx, self.dparams = _share(self.jaxpr.outvars, results)
        made = [out for eqn in self.jaxpr.eqns for out in eqn.outvars]
        self.place = {v: i for i, v in enumerate([*self.jaxpr.constvars, *self.jaxpr.invars, *made])}
        self.repeated: set[int] = set()
        """Equations that follow from the parameters alone, which each program has for itself."""
        self.everywhere = {*self.params, *self.jaxpr.constvars}
        for i, eqn in enumerate(self.jaxpr.eqns):
            if not _is_product(eqn) and self.everywhere.issuperset(variables(eqn.invars)):
                self.repeated.add(i)
                self.everywhere.update(eqn.outvars)

    def needed(self, results: Iterable[Any], done: set[int]) -> tuple[list[int], list[Any]]:
        """Returns the equations that give `results` from those of `done`, and the variables they read of the latter."""
        wanted, equations = set(variables(results)), list[int]()
        for i, eqn in reversed(list(enumerate(self.jaxpr.eqns))):
            if i not in done and wanted.intersection(eqn.outvars):
                equations.append(i)
                wanted.update(variables(eqn.invars))
        own = self.everywhere.union(self.made_by(equations))
        return equations[::-1], sorted(wanted - own, key=self.place.__getitem__)

    def made_by(self, equations: Iterable[int]) -> set[Any]:
        """Returns the variables that these equations make."""
        return {out for i in equations for out in self.jaxpr.eqns[i].outvars}

    def program(self, equations: list[int], inputs: list[Any], results: list[Any]) -> Callable[..., list[jax.Array]]:
        """Returns `(*params, *inputs) -> results`, made of some of the equations."""
        jaxpr = self.jaxpr.replace(
            invars=[*self.params, *inputs],
            outvars=results,
            eqns=[self.jaxpr.eqns[i] for i in equations],
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, self.closed.consts))


def _cut(trace: _Trace, shapes: tuple[Any, ...]) -> Split:
    """Gives each equation to the first program that needs it, in the order forward, input and weight gradient."""
    first, _ = trace.needed(trace.results, set())
    done = set(first) - trace.repeated
    second, second_reads = trace.needed(trace.dx, done)
    done |= set(second) - trace.repeated
    third, third_reads = trace.needed(trace.dparams, done)

    of_second = trace.made_by(second) | set(trace.dy)
    kept = [v for v in third_reads if v not in of_second]
    made = [v for v in third_reads if v in of_second]
    saved = sorted({*second_reads, *kept} - of_second, key=trace.place.__getitem__)
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

    places = tuple(saved.index(v) for v in kept)
    return Split(run_forward, run_input_gradient, run_weight_gradient, places)


def _share(flat: Sequence[Any], trees: tuple[Any, ...]) -> list[list[Any]]:
    """Returns the part of `flat` that holds the leaves of each tree."""
    rest = iter(flat)
    return [list(itertools.islice(rest, len(jax.tree.leaves(tree)))) for tree in trees]


def _unflatten(like: tuple[Any, ...], flat: list[jax.Array]) -> Any:
    """Returns `flat` as trees like those of `like`, and the values behind them as a list."""
    parts = _share(flat, like)
    trees = (jax.tree.unflatten(jax.tree.structure(tree), part) for tree, part in zip(like, parts, strict=True))
    return *trees, flat[sum(map(len, parts)) :]


def inline(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns the program without calls of named parts, whose equations may belong to different halves."""
    equations: list[core.JaxprEqn] = []
    constants: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    new_variable = core.gensym()

    def inline(jaxpr: core.Jaxpr, names: dict[Any, Any]) -> list[Any]:
        """Appends the equations of `jaxpr` under new names; returns its results' names."""

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
    """Returns those of an equation's inputs or a program's results that are no literals."""
    return [atom for atom in atoms if isinstance(atom, core.Var)]


def _is_product(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation costs more than reading its inputs: a matrix product, a loop, a kernel."""
    return eqn.primitive.name == "dot_general" or bool(list(core.jaxprs_in_params(eqn.params)))
