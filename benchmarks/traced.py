"""Reads from the jaxpr of a program what it sends: the check of every formula for bytes on the wire."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharding.experts.traffic import Traffic


def sent(jaxpr: Any, axis_sizes: Mapping[str, int], node_axis: str) -> list[Traffic]:
    """What a device sends in all-to-alls, all-gathers and reduce-scatters, by the number of while loops around them.

    Element 0 is sent once, 1 in each pass of a loop, 2 in each pass of a loop in a loop. A scan counts as often as it
    runs; all branches of a condition count; all-reduces do not. `axis_sizes` is the shape of the mesh, `node_axis` the
    axis along which devices are in different nodes.
    """
    total: list[Traffic] = []
    for depth, traffic in _collectives(jaxpr, axis_sizes, node_axis, 0, 1):
        total += [Traffic()] * (depth + 1 - len(total))
        total[depth] += traffic
    return total


def _collectives(
    jaxpr: Any, sizes: Mapping[str, int], node_axis: str, depth: int, times: int
) -> Iterator[tuple[int, Traffic]]:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in _SENT_TO_EACH_PEER:
            axes = params["axis_name"]
            axes = axes if isinstance(axes, Sequence) and not isinstance(axes, str) else (axes,)
            per_peer = sum(_SENT_TO_EACH_PEER[name](_bytes(v), _peers(axes, sizes)) for v in equation.invars)
            yield depth, _traffic(per_peer, axes, sizes, node_axis) * times
        inner_depth = depth + (name == "while")
        inner_times = times * (params["length"] if name == "scan" else 1)
        for inner in _jaxprs(list(params.values())):
            yield from _collectives(inner, sizes, node_axis, inner_depth, inner_times)


_SENT_TO_EACH_PEER = {
    "all_to_all": lambda size, peers: size // peers,
    "all_gather": lambda size, peers: size,
    "reduce_scatter": lambda size, peers: size // peers,
}


def _traffic(per_peer: int, axes: Sequence[str], sizes: Mapping[str, int], node_axis: str) -> Traffic:
    peers = _peers(axes, sizes)
    in_node = peers // sizes[node_axis] if node_axis in axes else peers
    return Traffic((peers - 1) * per_peer, (peers - in_node) * per_peer, peers - 1)


def _peers(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _bytes(variable: Any) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize


def _jaxprs(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _jaxprs(value)
        elif hasattr(value, "jaxpr") or hasattr(value, "eqns"):
            yield getattr(value, "jaxpr", value)
