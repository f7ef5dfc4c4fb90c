import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from sharding.experts.rows import TokenRows, unpacked
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport import Transport, build, choose
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine
from tests.sharding.test_exchange import both_halves

T, K, D, EXPERTS = 32, 2, 128, 16
MACHINE = Machine(2, 4)
SENT_TO_EACH_PEER = {
    "all_to_all": lambda size, peers: size // peers,
    "all_gather": lambda size, peers: size,
    "reduce_scatter": lambda size, peers: size // peers,
}


def sent(jaxpr: Any, sizes: Mapping[str, int]) -> Traffic:
    """Returns what a device sends in the program's collectives; a scan counts as often as it runs."""
    return sum(_collectives(jaxpr, sizes, 1), Traffic())


def _collectives(jaxpr: Any, sizes: Mapping[str, int], times: int) -> Iterator[Traffic]:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        assert name != "while", "a loop runs an unknown number of times"
        if name in SENT_TO_EACH_PEER:
            axes = params["axis_name"] if isinstance(params["axis_name"], tuple) else (params["axis_name"],)
            peers = math.prod(sizes[axis] for axis in axes)
            in_node = peers // sizes["node"] if "node" in axes else peers
            nbytes = [v.aval.size * v.aval.dtype.itemsize for v in equation.invars]
            each = sum(SENT_TO_EACH_PEER[name](size, peers) for size in nbytes)
            yield Traffic((peers - 1) * each, (peers - in_node) * each, peers - 1) * times
        for inner in jax.tree.leaves(list(params.values()), is_leaf=_is_program):
            if _is_program(inner):
                repeated = params["length"] if name == "scan" else 1
                yield from _collectives(getattr(inner, "jaxpr", inner), sizes, times * repeated)


def _is_program(value: Any) -> bool:
    return hasattr(value, "jaxpr") or hasattr(value, "eqns")


def one_layer(transport: Transport, k: int):
    """The jaxpr of one MoE layer with FP8 dispatch and bfloat16 combine."""
    machine = transport.machine
    mesh = AbstractMesh((machine.nodes, machine.gpus), machine.axes, axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(machine.axes)

    def experts(rows: TokenRows) -> tuple[jax.Array, None]:
        payload = unpacked(rows).payload
        return (payload["q"].astype(jnp.float32) * payload["scale"]).astype(jnp.bfloat16), None

    def step(q, scale, ids, weights):
        return both_halves(transport, TokenRows({"q": q, "scale": scale}, ids, weights), experts)[0]

    rows = T * machine.devices
    return jax.make_jaxpr(jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False))(
        jax.ShapeDtypeStruct((rows, D), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((rows, D // 128), jnp.float32),
        jax.ShapeDtypeStruct((rows, k), jnp.int32),
        jax.ShapeDtypeStruct((rows, k), jnp.float32),
    ).jaxpr


@pytest.mark.parametrize(
    ("machine", "experts", "k"), [(MACHINE, 16, 2), (MACHINE, 8, 6), (Machine(1, 8), 16, 2), (Machine(18, 8), 288, 8)]
)
@pytest.mark.parametrize("kind", [TransportKind.RING, TransportKind.ALL_TO_ALL, TransportKind.HIERARCHICAL])
def test_the_program_sends_the_bytes_of_the_formula(
    kind: TransportKind, machine: Machine, experts: int, k: int
) -> None:
    """All collectives are outside of loops: there are no rounds for overflow."""
    if kind is TransportKind.HIERARCHICAL and machine.nodes == 1:
        return
    load = LayerRows.from_widths(T, k, D, fp8_dispatch=True)
    assert load == LayerRows(T, k, D + 4 + 8 * k, 2 * D, packed_bytes=D + 4)
    transport = build(kind, machine, experts, load)
    sizes = dict(zip(machine.axes, (machine.nodes, machine.gpus), strict=True))
    assert sent(one_layer(transport, k), sizes) == transport.traffic(load)


def test_decode_at_144_ranks_stays_within_its_byte_bound() -> None:
    """The wire carries at most 2.9 times the payload with the hierarchical transport, 3.8 times with all-to-all."""
    machine, load = Machine(18, 8), LayerRows.from_widths(128, 8, 7168, fp8_dispatch=True)
    payload = load.tokens * load.experts_per_token * (load.dispatch_bytes + load.combine_bytes)
    for kind, bound in ((TransportKind.ALL_TO_ALL, 3.8), (TransportKind.HIERARCHICAL, 2.9)):
        assert build(kind, machine, 288, load).traffic(load).device_bytes <= bound * payload
    crossing = {kind: build(kind, machine, 288, load).traffic(load).node_bytes for kind in TransportKind}
    assert crossing[TransportKind.HIERARCHICAL] < crossing[TransportKind.ALL_TO_ALL] < crossing[TransportKind.RING]


def test_auto_follows_nodes_and_tokens() -> None:
    def auto(machine: Machine, experts: int, tokens: int) -> TransportKind:
        return choose(machine, experts, LayerRows.from_widths(tokens, 8, 7168, fp8_dispatch=True)).kind

    assert auto(Machine(1, 8), 256, 4) is TransportKind.RING
    assert auto(Machine(1, 8), 256, 4096) is TransportKind.ALL_TO_ALL
    assert auto(Machine(4, 8), 288, 16384) is TransportKind.HIERARCHICAL


def test_devices_must_divide_the_replicas() -> None:
    with pytest.raises(ValueError, match=r"256 expert replicas do not divide over 144 devices: add .* 288"):
        build(TransportKind.RING, Machine(18, 8), 256, LayerRows.from_widths(8, 8, 7168, fp8_dispatch=True))
