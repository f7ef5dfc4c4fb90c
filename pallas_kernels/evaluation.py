"""Evaluates programs operation by operation with numpy, without XLA.

The Mosaic interpreter turns each kernel into a program with some hundred Python callbacks, and runs it once per thread.
XLA compiles it for a second, and it runs for a fraction of one. Threads that wait for each other inside XLA would also
occupy its thread pool, and deadlock where that is small.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

Values = list[Any]
Rule = Callable[[Any, Values], Values]


def evaluate(jaxpr: Any, consts: Sequence[Any], *arguments: Any) -> Values:
    """Returns the results of `jaxpr` (`jax.make_jaxpr`) for flat `arguments`; `consts` are its closed-over values.

    Loops and branches run in Python, callbacks are direct calls. An operation without a numpy rule here runs in XLA.
    """
    with np.errstate(all="ignore"):
        return _evaluate(jaxpr, map(np.asarray, consts), *map(np.asarray, arguments))


def _run(jaxpr: Any, *arguments: Any) -> Values:
    return _evaluate(jaxpr, jaxpr.consts, *arguments)


def _evaluate(jaxpr: Any, consts: Any, *arguments: Any) -> Values:
    jaxpr = jaxpr.jaxpr
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        given: Any = atom
        return np.asarray(given.val, given.aval.dtype) if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        rule = _RULES.get(eqn.primitive.name, _other)
        values.update(zip(eqn.outvars, rule(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _other(eqn: Any, operands: Values) -> Values:
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return [*map(np.asarray, results if eqn.primitive.multiple_results else [results])]


def _callback(eqn: Any, operands: Values) -> Values:
    """Copies arguments and results, as XLA does: the callee keeps arrays and writes to them."""
    results = eqn.params["callback"](*map(_given, operands))
    return [np.array(each, var.aval.dtype) for each, var in zip(results, eqn.outvars, strict=True)]


def _given(value: Any) -> Any:
    value = np.array(value)
    return int(value) if value.ndim == 0 and value.dtype.kind in "iu" else value


def _call(eqn: Any, operands: Values) -> Values:
    return _run(eqn.params["jaxpr"], *operands)


def _cond(eqn: Any, operands: Values) -> Values:
    branches = eqn.params["branches"]
    return _run(branches[min(max(int(operands[0]), 0), len(branches) - 1)], *operands[1:])


def _while(eqn: Any, operands: Values) -> Values:
    of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = operands[:of_cond], operands[of_cond : of_cond + of_body]
    carry = operands[of_cond + of_body :]
    while _run(eqn.params["cond_jaxpr"], *cond_consts, *carry)[0]:
        carry = _run(eqn.params["body_jaxpr"], *body_consts, *carry)
    return carry


def _parts_of_scan(params: dict[str, Any], operands: Values) -> tuple[Values, Values, Values]:
    """Returns constants, carry and scanned inputs; jax 0.12 keeps them as a tree."""
    if "ft_in" in params:
        return tuple(map(list, params["ft_in"].update(operands).unpack()))  # type: ignore[return-value]
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    return operands[:first], operands[first:last], operands[last:]


def _scan(eqn: Any, operands: Values) -> Values:
    """Runs a loop with a static number of iterations."""
    consts, carry, xs = _parts_of_scan(eqn.params, operands)
    ys: list[Values] = []
    turns = range(eqn.params["length"])
    for i in reversed(turns) if eqn.params["reverse"] else turns:
        results = _run(eqn.params["jaxpr"], *consts, *carry, *(x[i] for x in xs))
        carry, y = results[: len(carry)], results[len(carry) :]
        ys.append(y)
    ordered = ys[::-1] if eqn.params["reverse"] else ys
    empty = [np.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars[len(carry) :]]
    return [*carry, *(map(np.stack, zip(*ordered, strict=True)) if ordered else empty)]


def _plain(function: Callable[..., Any]) -> Rule:
    """Returns the rule of an operation without parameters."""
    return lambda eqn, operands: [function(*operands)]


def _divided(x: Any, y: Any) -> Any:
    """Rounds integers towards zero."""
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    return (np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))).astype(x.dtype)


def _shifted(x: Any, y: Any) -> Any:
    """Shifts right and fills with zeros, signed numbers too."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.right_shift(np.asarray(x).view(unsigned), np.asarray(y).view(unsigned)).view(x.dtype)


def _selected(which: Any, *cases: Any) -> Any:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)


def _broadcast(eqn: Any, operands: Values) -> Values:
    shape = eqn.params["shape"]
    at = eqn.params["broadcast_dimensions"]
    own = dict(zip(at, operands[0].shape, strict=True))
    return [np.broadcast_to(operands[0].reshape([own.get(i, 1) for i in range(len(shape))]), shape)]


def _slice(eqn: Any, operands: Values) -> Values:
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    return [operands[0][tuple(map(slice, start, limit, strides))]]


def _dynamic_slice(eqn: Any, operands: Values) -> Values:
    x, sizes = operands[0], eqn.params["slice_sizes"]
    found = [min(max(int(i), 0), n - k) for i, n, k in zip(operands[1:], x.shape, sizes, strict=True)]
    return [x[tuple(slice(i, i + k) for i, k in zip(found, sizes, strict=True))]]


def _iota(eqn: Any, operands: Values) -> Values:
    shape, dimension = eqn.params["shape"], eqn.params["dimension"]
    counted = np.arange(shape[dimension]).astype(eqn.params["dtype"])
    return [np.broadcast_to(counted.reshape([-1 if i == dimension else 1 for i in range(len(shape))]), shape)]


def _of_shape(eqn: Any, operands: Values) -> Values:
    return [operands[0].reshape(eqn.outvars[0].aval.shape)]


def _bits(eqn: Any, operands: Values) -> Values:
    found = np.ascontiguousarray(operands[0])
    return [found.reshape(-1).view(eqn.params["new_dtype"]).reshape(eqn.outvars[0].aval.shape)]


def _reduced(function: Any) -> Rule:
    def rule(eqn: Any, operands: Values) -> Values:  # numpy would widen sums of integers
        return [function.reduce(operands[0], axis=tuple(eqn.params["axes"]), dtype=operands[0].dtype)]

    return rule


_PLAIN: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal},
    **{"ne": np.not_equal, "rem": np.fmod, "div": _divided, "copy": np.array},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not},
    **{"exp2": np.exp2, "exp": np.exp, "log": np.log, "abs": np.abs, "sign": np.sign, "sqrt": np.sqrt},
    **{"select_n": _selected, "shift_left": np.left_shift, "shift_right_logical": _shifted},
    **{"shift_right_arithmetic": np.right_shift},
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}
_RULES: dict[str, Rule] = {
    **{"io_callback": _callback, "jit": _call, "pjit": _call, "cond": _cond, "while": _while, "scan": _scan},
    **{name: _plain(function) for name, function in _PLAIN.items()},
    **{"reshape": _of_shape, "squeeze": _of_shape, "broadcast_in_dim": _broadcast, "iota": _iota},
    **{"slice": _slice, "dynamic_slice": _dynamic_slice, "bitcast_convert_type": _bits},
    **{"reduce_max": _reduced(np.maximum), "reduce_min": _reduced(np.minimum), "reduce_sum": _reduced(np.add)},
    "convert_element_type": lambda eqn, operands: [operands[0].astype(eqn.params["new_dtype"])],
    "transpose": lambda eqn, operands: [operands[0].transpose(eqn.params["permutation"])],
    "concatenate": lambda eqn, operands: [np.concatenate(operands, eqn.params["dimension"])],
}
