"""Bytes that a device sends in a MoE layer as the mesh grows. Nothing is timed, and nothing runs.

    JAX_PLATFORMS=cpu python -m benchmarks.expert_parallel

The exchange of DeepSeek-V3's shape is traced for up to 144 devices. What its collectives send, read from the jaxpr, is
set against the formula by which transports are chosen and served bytes are counted; a difference ends the program.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from benchmarks.record import Cell, Report, run
from sharding.experts.rows import TokenRows, unpacked
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport import Transport, build, choose
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine

V3_HIDDEN, V3_REPLICAS, TOP_K = 7168, 288, 8
MACHINES = (Machine(1, 8), Machine(2, 8), Machine(4, 8), Machine(18, 8))
PHASES = (("decode", 128), ("prefill", 4096))


def main(report: Report) -> None:
    columns = ["phase", "tokens per device", "nodes x GPUs", "transport", "out of the device (MB)",
               "out of the node (MB)", "of the payload", "chosen"]  # fmt: skip
    lines = (line for phase in PHASES for line in wire(*phase))
    report.table("Bytes that a device sends in a layer", columns, lines)


def wire(phase: str, tokens: int) -> Iterator[list[Cell]]:
    """Rows of the table of bytes: a layer of DeepSeek-V3, FP8 there and bf16 back."""
    rows = LayerRows.from_widths(tokens, TOP_K, V3_HIDDEN, fp8_dispatch=True)
    payload = tokens * TOP_K * rows.row_bytes(TOP_K)
    for machine in MACHINES:
        chosen = choose(machine, V3_REPLICAS, rows).kind
        for kind in (TransportKind.RING, TransportKind.ALL_TO_ALL, TransportKind.HIERARCHICAL):
            if kind is TransportKind.HIERARCHICAL and machine.nodes == 1:
                continue
            transport = build(kind, machine, V3_REPLICAS, rows)
            measured, formula = traced(transport, rows), transport.traffic(rows)
            if dataclasses.replace(measured, messages=0) != dataclasses.replace(formula, messages=0):
                sys.exit(f"{kind} over {machine}: the program sends {measured}, the formula says {formula}")
            yield [phase, tokens, f"{machine.nodes} x {machine.gpus}", kind.value, measured.device_bytes / 1e6,
                   measured.node_bytes / 1e6, measured.device_bytes / payload,
                   "yes" if kind is chosen else None]  # fmt: skip


def traced(transport: Transport, rows: LayerRows) -> Traffic:
    """What the collectives of the exchange send, read from its jaxpr."""
    machine = transport.machine
    mesh = AbstractMesh((machine.nodes, machine.gpus), machine.axes, axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(machine.axes)

    def layer(values: jax.Array, scale: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        token_rows = TokenRows({"values": values, "scale": scale}, ids, weights)
        handle = transport.start(token_rows, lambda rows: (unpacked(rows).payload["values"].astype(jnp.bfloat16), None))
        return transport.finish(handle)[0]

    def array(width: int, dtype: jnp.dtype | type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows.tokens * machine.devices, width), dtype)

    K = rows.experts_per_token
    arrays = (array(V3_HIDDEN, jnp.float8_e4m3fn), array(V3_HIDDEN // 128, jnp.float32), array(K, jnp.int32))
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(*arrays, array(K, jnp.float32)).jaxpr
    return sent(jaxpr, dict(zip(machine.axes, (machine.nodes, machine.gpus), strict=True)), machine.axes[0])[0]


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


if __name__ == "__main__":
    run(main)
