import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from benchmarks.expert_parallel import sent
from sharding.experts.kind import Kind
from sharding.experts.rows import TokenRows, unpacked
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import Transport, build, choose
from sharding.mesh import Machine
from tests.sharding.test_exchange import both_halves

T, K, D, EXPERTS = 32, 2, 128, 16
MACHINE = Machine(2, 4)
AXIS_SIZES = dict(zip(MACHINE.axes, (MACHINE.nodes, MACHINE.gpus), strict=True))


def one_layer(transport: Transport, k: int):
    """The jaxpr of one MoE layer with FP8 on the way there and bf16 on the way back."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), MACHINE.axes)
    spec = PartitionSpec(MACHINE.axes)

    def experts(rows: TokenRows) -> tuple[jax.Array, None]:
        payload = unpacked(rows).payload
        return (payload["q"].astype(jnp.float32) * payload["scale"]).astype(jnp.bfloat16), None

    def step(q, scale, ids, weights):
        return both_halves(transport, TokenRows({"q": q, "scale": scale}, ids, weights), experts)[0]

    rows = T * MACHINE.devices
    return jax.make_jaxpr(jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False))(
        jax.ShapeDtypeStruct((rows, D), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((rows, D // 128), jnp.float32),
        jax.ShapeDtypeStruct((rows, k), jnp.int32),
        jax.ShapeDtypeStruct((rows, k), jnp.float32),
    ).jaxpr


@pytest.mark.parametrize(("experts", "k"), [(16, 2), (8, 6)])
@pytest.mark.parametrize("kind", [Kind.RING, Kind.ALL_TO_ALL, Kind.HIERARCHICAL])
def test_the_program_sends_what_the_formula_says(kind: Kind, experts: int, k: int) -> None:
    """All of it is outside of loops: no device asks whether there is more to send."""
    load = LayerRows.from_widths(T, k, D, fp8_dispatch=True)
    assert load == LayerRows(T, k, D + 4 + 8 * k, 2 * D, packed_bytes=D + 4)
    transport = build(kind, MACHINE, experts, load)
    assert sent(one_layer(transport, k), AXIS_SIZES, "node") == [transport.traffic(load)]


def test_decode_at_144_ranks_stays_within_its_byte_bound() -> None:
    """The wire carries 2.9 times the payload at most where nodes are limited; 3.8 in the flat form, not chosen."""
    machine, load = Machine(18, 8), LayerRows.from_widths(128, 8, 7168, fp8_dispatch=True)
    payload = load.tokens * load.experts_per_token * (load.dispatch_bytes + load.combine_bytes)
    for kind, bound in ((Kind.ALL_TO_ALL, 3.8), (Kind.HIERARCHICAL, 2.9)):
        assert build(kind, machine, 288, load).traffic(load).device_bytes <= bound * payload
    crossing = {kind: build(kind, machine, 288, load).traffic(load).node_bytes for kind in Kind}
    assert crossing[Kind.HIERARCHICAL] < crossing[Kind.ALL_TO_ALL] < crossing[Kind.RING]


def test_choice_follows_nodes_and_tokens() -> None:
    def chosen(machine: Machine, experts: int, tokens: int) -> Kind:
        return choose(machine, experts, LayerRows.from_widths(tokens, 8, 7168, fp8_dispatch=True)).kind

    assert chosen(Machine(1, 8), 256, 4) is Kind.RING
    assert chosen(Machine(1, 8), 256, 4096) is Kind.ALL_TO_ALL
    assert chosen(Machine(4, 8), 288, 16384) is Kind.HIERARCHICAL


def test_devices_must_divide_the_replicas() -> None:
    with pytest.raises(ValueError, match=r"256 expert replicas do not divide over 144 devices: add .* 288"):
        build(Kind.RING, Machine(18, 8), 256, LayerRows.from_widths(8, 8, 7168, fp8_dispatch=True))
