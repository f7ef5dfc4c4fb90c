"""Chooses what a forward saves for its backward: as few bytes as possible. The backward computes the rest again.

Only cheap equations run twice: those on elements, broadcasts and reductions, as of norms and SwiGLU, and products whose
result is several times larger than what they multiply by a weight. In DeepSeek-V3 these are the up-projections of
attention, as in the report (arXiv:2412.19437, 3.2.3), and the last product of routed experts, which the gradient of
their weights reads: a ninth more arithmetic of the experts.

The saved values are a minimum cut of the graph of cheap equations, between what must be saved if anything is, and what
the backward reads (as in PyTorch's `min_cut_rematerialization_partition`).
"""

import collections
import math
from collections.abc import Iterable, Sequence, Set
from typing import Any

import jax.numpy as jnp
from jax.extend import core

EXPANDS = 3
"""A product is cheap if its result has at least so many times the bytes of what it multiplies by a weight."""
_EXPENSIVE = ("gather", "sort", "top_k", "scatter", "cum", "reduce_window", "conv_", "psum", "pmax", "all_", "ppermute")
_SOURCE, _SINK = "source", "sink"


def choose_saved(equations: Sequence[core.JaxprEqn], needed: Iterable[Any], weights: Set[Any]) -> set[Any]:
    """Returns the values to save.

    Args:
      equations: the forward's, in order.
      needed: its inputs and results that the backward reads.
      weights: values that follow from the parameters alone, which need no saving.
    """
    maker = {v: eqn for eqn in equations for v in eqn.outvars if is_cheap(eqn, weights)}
    room: dict[Any, dict[Any, float]] = collections.defaultdict(dict)  # the residual graph; a value has two ends

    def connect(start: Any, end: Any, capacity: float) -> None:
        room[start][end] = capacity
        room[end].setdefault(start, 0)

    waiting, seen = list(needed), set[Any]()
    for v in waiting:
        connect((v, 1), _SINK, math.inf)
    while waiting:
        if (v := waiting.pop()) in seen:
            continue
        seen.add(v)
        connect((v, 0), (v, 1), size(v))
        inputs = [u for u in maker[v].invars if isinstance(u, core.Var) and u not in weights] if v in maker else []
        if not inputs:
            connect(_SOURCE, (v, 0), math.inf)
        for u in inputs:
            connect((u, 1), (v, 0), math.inf)
        waiting += inputs
    while path := _augmenting(room):
        most = min(room[start][end] for start, end in path)
        for start, end in path:
            room[start][end] -= most
            room[end][start] += most
    # Of all minimum cuts, the one next to the backward computes least again.
    behind = _reaching_sink(room)
    return {v for v in seen if (v, 1) in behind and (v, 0) not in behind}


def is_cheap(eqn: core.JaxprEqn, weights: Set[Any]) -> bool:
    """Returns whether an equation may run twice."""
    name, inputs = eqn.primitive.name, {v for v in eqn.invars if isinstance(v, core.Var)}
    if eqn.effects or name.startswith(_EXPENSIVE):
        return False
    others = inputs - weights
    if others and others != inputs and EXPANDS * sum(map(size, others)) <= sum(map(size, eqn.outvars)):
        return True  # a product, or a loop or a kernel that makes it
    return name != "dot_general" and "call" not in name and not list(core.jaxprs_in_params(eqn.params))


def size(v: Any) -> int:
    """Returns the bytes of a value."""
    return math.prod(v.aval.shape) * jnp.dtype(v.aval.dtype).itemsize


def _augmenting(room: dict[Any, dict[Any, float]]) -> list[tuple[Any, Any]]:
    """Returns the edges of a shortest path with room from source to sink, or none."""
    came: dict[Any, Any] = {_SOURCE: None}
    queue = collections.deque([_SOURCE])
    while queue and _SINK not in came:
        node = queue.popleft()
        for end, capacity in room[node].items():
            if capacity > 0 and end not in came:
                came[end] = node
                queue.append(end)
    path, node = [], _SINK
    while came.get(node) is not None:
        path.append((came[node], node))
        node = came[node]
    return path


def _reaching_sink(room: dict[Any, dict[Any, float]]) -> set[Any]:
    """Returns the nodes from which a path with room leads to the sink."""
    found, waiting = {_SINK}, [_SINK]
    while waiting:
        node = waiting.pop()
        before = [start for start in room[node] if room[start][node] > 0 and start not in found]
        found.update(before)
        waiting += before
    return found
