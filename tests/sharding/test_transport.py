import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sharding.exchange import Rows
from sharding.transport import Kind, Load, Machine, Transport, build, choose, load_of

T, K, D, EXPERTS = 32, 2, 128, 16
MACHINE = Machine(2, 4)
AXIS_SIZES = dict(zip(MACHINE.axes, (MACHINE.nodes, MACHINE.gpus), strict=True))


def one_layer(transport: Transport):
    """The jaxpr of one MoE layer with FP8 on the way there and bf16 on the way back."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), MACHINE.axes)
    spec = PartitionSpec(MACHINE.axes)

    def experts(rows: Rows) -> jax.Array:
        return (rows.payload["q"].astype(jnp.float32) * rows.payload["scale"]).astype(jnp.bfloat16)

    def step(q, scale, ids, weights):
        return transport(Rows({"q": q, "scale": scale}, ids, weights), experts)[0]

    rows = T * MACHINE.ranks
    return jax.make_jaxpr(jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False))(
        jax.ShapeDtypeStruct((rows, D), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((rows, D // 128), jnp.float32),
        jax.ShapeDtypeStruct((rows, K), jnp.int32),
        jax.ShapeDtypeStruct((rows, K), jnp.float32),
    ).jaxpr


def sent_in_one_round(jaxpr) -> int:
    """Bytes that leave a device: the operands of all-to-alls outside of overflow loops, less the part that stays."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "all_to_all":
            peers = int(np.prod([AXIS_SIZES[axis] for axis in equation.params["axis_name"]]))
            total += sum(v.aval.size * v.aval.dtype.itemsize * (peers - 1) // peers for v in equation.invars)
        elif equation.primitive.name != "while":
            total += sum(sent_in_one_round(getattr(p, "jaxpr", p)) for p in equation.params.values() if is_jaxpr(p))
    return total


def is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.parametrize("kind", [Kind.ALL_TO_ALL, Kind.HIERARCHICAL])
def test_the_program_sends_what_the_formula_says(kind: Kind) -> None:
    load = load_of(T, K, D, fp8_dispatch=True)
    assert load == Load(T, K, D + 4 + 8 * K, 2 * D)
    transport = build(kind, MACHINE, EXPERTS, load)
    assert sent_in_one_round(one_layer(transport)) == transport.traffic(load).device_bytes


def test_decode_at_144_ranks_stays_within_its_byte_bound() -> None:
    """The issue's bound for decode at EP144 with 128 tokens a device: at most 2.5 times the payload on the wire."""
    machine, load = Machine(18, 8), load_of(128, 8, 7168, fp8_dispatch=True)
    payload = load.tokens * load.experts_per_token * (load.dispatch_bytes + load.combine_bytes)
    for kind in (Kind.ALL_TO_ALL, Kind.HIERARCHICAL):
        assert build(kind, machine, 288, load).traffic(load).device_bytes <= 2.5 * payload
    crossing = {kind: build(kind, machine, 288, load).traffic(load).node_bytes for kind in Kind}
    assert crossing[Kind.HIERARCHICAL] < crossing[Kind.ALL_TO_ALL] < crossing[Kind.RING]


def test_choice_follows_nodes_and_tokens() -> None:
    def chosen(machine: Machine, experts: int, tokens: int) -> Kind:
        return choose(machine, experts, load_of(tokens, 8, 7168, fp8_dispatch=True)).kind

    assert chosen(Machine(1, 8), 256, 4) is Kind.RING
    assert chosen(Machine(1, 8), 256, 4096) is Kind.ALL_TO_ALL
    assert chosen(Machine(4, 8), 288, 16384) is Kind.HIERARCHICAL


def test_ranks_must_divide_the_experts() -> None:
    with pytest.raises(ValueError, match=r"256 physical experts do not divide over 144 ranks: add .* 288"):
        build(Kind.RING, Machine(18, 8), 256, load_of(8, 8, 7168, fp8_dispatch=True))
