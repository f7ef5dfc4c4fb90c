"""The ragged exchange on a CPU, with an emulation of the collective, which XLA supports only on other platforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels import aot
from sharding.collectives import check_ragged
from sharding.experts.ragged import MAX_BUFFER_BYTES, slices_of
from sharding.experts.rows import TokenRows
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine
from tests.sharding.test_exchange import ALL, AXES, EXPERTS, D, K, T, both_halves, dense, local_experts, route

MACHINE = Machine(2, 4)


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` out of gathers, by its documentation; all bits set (NaN) where sizes disagree."""
    me = lax.axis_index(axis_name)
    everything = [lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
    wrong = jnp.bool(False)
    for source, (data, starts, sizes, ends) in enumerate(zip(*everything, strict=True)):
        row = jnp.arange(data.shape[0])
        mine = (row >= starts[me]) & (row < starts[me] + sizes[me])
        target = jnp.where(mine, ends[me] + row - starts[me], output.shape[0])
        output = output.at[target].set(data, mode="drop", unique_indices=True)
        wrong |= sizes[me] != recv_sizes[source]
        wrong |= (sizes[me] > 0) & (ends[me] + sizes[me] > output.shape[0])
    return jnp.where(wrong, jnp.array(0xFFFFFFFF, jnp.uint32).view(output.dtype), output)


@functools.cache
def program():
    mesh = Mesh(np.array(jax.devices()).reshape(MACHINE.nodes, MACHINE.gpus), AXES)
    ragged = build(TransportKind.RAGGED, MACHINE, EXPERTS, LayerRows.from_widths(T, K, D, fp8_dispatch=False))

    def step(x, ids, weights, w):
        rows = TokenRows({"x": x / 2, "scale": jnp.full((T, 1), 2.0)}, ids, weights)
        return both_halves(ragged, rows, functools.partial(local_experts, w))

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(ALL,) * 4, out_specs=(ALL, ALL), check_vma=False))


@pytest.mark.parametrize("routing", ["random", "some unset", "one expert for all", "one busy rank", "none"])
def test_equals_a_single_device(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
    rng = np.random.default_rng(0)
    tokens = T * MACHINE.devices
    x, w = rng.normal(size=(tokens, D)).astype(np.float32), rng.normal(size=(EXPERTS, D, D)).astype(np.float32)
    ids, weights = route(routing, tokens, rng).astype(np.int32), rng.random((tokens, K)).astype(np.float32)
    y, overflows = program()(x, ids, weights, w)
    np.testing.assert_allclose(y, dense(x, ids, weights, w), rtol=2e-5, atol=2e-5)
    assert not np.asarray(overflows).any(), "exact sizes never overflow"


def test_slices_equal_a_recount() -> None:
    """Offsets and sizes on every rank, from a matrix of row counts."""
    length = np.random.default_rng(0).integers(0, 5, (8, 8)).astype(np.int32)  # [from, to]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), AXES)
    mapped = jax.shard_map(
        lambda n: jax.tree.map(lambda a: a[None], slices_of(n[0], AXES)), mesh=mesh, in_specs=ALL, out_specs=ALL
    )
    slices = jax.jit(mapped)(length)
    before_sent = np.cumsum(length, axis=1) - length  # [from, to]: where the slice begins at its sender
    before_received = np.cumsum(length, axis=0) - length  # [from, to]: and at its receiver
    expected = (before_sent, length, before_received.T, length.T, before_received, before_sent.T)
    for name, found, wanted in zip(slices._fields, slices, expected, strict=True):
        np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.aot
def test_compiles_for_eight_gpus_and_sends_by_exact_sizes() -> None:
    """Rows are dispatched in one ragged collective, sums are combined in another."""
    mesh = aot.gpu_mesh({"node": 2, "gpu": 4}, per_host=4)
    ragged = build(TransportKind.RAGGED, MACHINE, EXPERTS, LayerRows.from_widths(T, K, 128, fp8_dispatch=True))
    spec = PartitionSpec(AXES)

    def step(q, scale, ids, weights):
        def experts(rows: TokenRows) -> tuple[jax.Array, None]:
            return (rows.payload["q"].astype(jnp.float32) * rows.payload["scale"]).astype(jnp.bfloat16), None

        return both_halves(ragged, TokenRows({"q": q, "scale": scale}, ids, weights), experts)[0]

    def array(width: int, dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((T * 8, width), dtype, sharding=jax.NamedSharding(mesh, spec))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    arrays = (array(128, jnp.float8_e4m3fn), array(1, jnp.float32), array(K, jnp.int32), array(K, jnp.float32))
    assert str(jax.make_jaxpr(mapped)(*arrays)).count(" ragged_all_to_all[") == 2, "one for dispatch, one for combine"
    assert " ragged-all-to-all(" in aot.compile_for(mapped, *arrays, mesh=mesh).as_text()


def test_errors_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"does not support on cpu: use expert_transport=auto"):
        check_ragged("cpu")
    check_ragged("cuda")
    with pytest.raises(ValueError, match=r"16384 tokens from each of 144 devices, .* lower max_num_batched_tokens"):
        build(TransportKind.RAGGED, Machine(18, 8), 288, LayerRows.from_widths(16384, 8, 7168, fp8_dispatch=True))
    with pytest.raises(ValueError, match="'deepep' is not one of auto, ring, all_to_all, hierarchical, ragged"):
        TransportKind.from_name("deepep")
    with pytest.raises(ValueError, match="needs 2 or more nodes"):
        build(TransportKind.HIERARCHICAL, Machine(1, 8), 288, LayerRows.from_widths(8, 8, 7168, fp8_dispatch=True))


def test_decode_at_144_ranks_fits_the_ragged_buffers_and_sends_less() -> None:
    machine, load = Machine(18, 8), LayerRows.from_widths(128, 8, 7168, fp8_dispatch=True)
    ragged, padded = (
        build(kind, machine, 288, load).traffic(load) for kind in (TransportKind.RAGGED, TransportKind.ALL_TO_ALL)
    )
    assert ragged.device_bytes < padded.device_bytes / 2 < MAX_BUFFER_BYTES
