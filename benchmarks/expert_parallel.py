"""Expert parallelism as the mesh grows: work per device, and bytes it sends. Nothing is timed.

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.expert_parallel

Two tables. Work: a small MoE layer of 64 experts runs on 1, 2, 4 and 8 CPU devices, with as many tokens on each; every
device counts the rows that reach it and the products it makes, and the result must be one device's. Bytes: the
exchange of DeepSeek-V3's shape is traced for up to 144 devices, and what its collectives send is set against the
formula by which transports are chosen and served bytes are counted; a difference ends the program.
"""

import argparse
import collections
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from benchmarks.traced import sent
from dsv3.model.layers import experts
from dsv3.model.layers.experts import ExpertLayer
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.router import Routing
from dsv3.model.params import MoeParams
from sharding.experts.kind import Kind
from sharding.experts.rows import TokenRows, unpacked
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport import Transport, build, choose
from sharding.mesh import DEVICES, Machine, rank_mesh

EXPERTS, TOP_K, HIDDEN, WIDTH = 64, 8, 64, 32
TILE = 128
"""Aligned rows per tile of the grouped kernels at these loads; a device computes whole tiles."""
V3_HIDDEN, V3_REPLICAS = 7168, 288
MACHINES = (Machine(1, 8), Machine(2, 8), Machine(4, 8), Machine(18, 8))
PHASES = (("decode", 64), ("decode", 128), ("decode", 256), ("prefill", 4096))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128, help="tokens on each device in the table of work")
    args = parser.parse_args()
    sizes = [n for n in (1, 2, 4, 8) if n <= len(jax.devices())]
    print_table("devices", "experts", "transport", "rows received", "products", "experts read", f"tiles of {TILE}",
                "busiest / mean", rows=[work(n, args.tokens) for n in sizes])  # fmt: skip
    print()
    print_table("phase, tokens", "nodes x GPUs", "transport", "kB out of the device", "kB out of the node",
                "of the payload", "chosen", rows=[line for phase in PHASES for line in wire(*phase)])  # fmt: skip
    return 0


def print_table(*head: str, rows: Sequence[Sequence[str]]) -> None:
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")


@dataclasses.dataclass
class Work:
    """What the devices count while a layer runs."""

    rows: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    products: collections.Counter[tuple[int, int]] = dataclasses.field(default_factory=collections.Counter)
    tiles: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def add(self, device: np.ndarray, rows: np.ndarray, counts: np.ndarray) -> None:
        """`rows` arrived at `device`, and `counts` [Ed] of each of its experts' products were made."""
        self.rows[int(device)] += int(rows)
        self.tiles[int(device)] += int(-(-counts // TILE).sum())
        for expert, count in enumerate(counts.tolist()):
            self.products[int(device), expert] += count


def work(devices: int, tokens: int) -> list[str]:
    """A row of the table of work; even routing, drawn at random."""
    mesh = rank_mesh(jax.devices()[:devices])
    machine = Machine.from_mesh(mesh)
    rows = LayerRows.from_widths(tokens, TOP_K, HIDDEN, fp8_dispatch=False)
    transport = choose(machine, EXPERTS, rows)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(devices * tokens, HIDDEN)).astype(np.float32)
    ids = np.argsort(rng.random((devices * tokens, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    weights = rng.random(ids.shape, np.float32)
    done = Work()
    y = run_layer(mesh, transport, done, (x, ids, weights))
    check_result(y, x, ids, weights)
    products = np.array([[done.products[d, e] for e in range(transport.replicas_per_device)] for d in range(devices)])
    assert products.sum() == ids.size, "every product is made once"
    per_device = products.sum(axis=1)
    return [
        str(devices), str(transport.replicas_per_device), transport.kind.value,
        f"{np.mean([done.rows[d] for d in range(devices)]):.0f}", f"{per_device.mean():.0f}",
        f"{(products > 0).sum(axis=1).mean():.0f}", f"{np.mean([done.tiles[d] for d in range(devices)]):.0f}",
        f"{per_device.max() / per_device.mean():.2f}",
    ]  # fmt: skip


def run_layer(mesh: jax.sharding.Mesh, transport: Transport, done: Work, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    """The layer's result [tokens, HIDDEN]; `done` receives what each device counts."""

    def one_device(x: jax.Array, ids: jax.Array, topk: jax.Array, params: MoeParams) -> jax.Array:
        device, layer = jax.lax.axis_index(DEVICES), ExpertLayer(params, 0, Numerics())

        def local(rows: TokenRows) -> tuple[jax.Array, None]:
            y, router_stats = experts.moe(rows.payload, Routing(rows.ids, rows.weights), layer)
            jax.debug.callback(done.add, device, (rows.ids >= 0).any(axis=1).sum(), router_stats.counts)
            return y, None

        return transport.finish(transport.start(TokenRows(x, ids, topk), local))[0]

    spread, stacked = PartitionSpec(DEVICES), PartitionSpec(None, DEVICES)
    params = parameters()
    where = MoeParams(router=None, router_bias=None, gate_up=stacked, down=stacked, shared=None)
    mapped = jax.shard_map(one_device, mesh=mesh, in_specs=(*[spread] * 3, where), out_specs=spread, check_vma=False)
    y = jax.block_until_ready(jax.jit(mapped)(*inputs, params))
    jax.effects_barrier()
    return np.asarray(y)


@functools.cache
def parameters() -> MoeParams:
    rng = np.random.default_rng(1)
    gate_up = rng.normal(size=(1, EXPERTS, 2 * WIDTH, HIDDEN), scale=HIDDEN**-0.5).astype(np.float32)
    down = rng.normal(size=(1, EXPERTS, HIDDEN, WIDTH), scale=WIDTH**-0.5).astype(np.float32)
    return MoeParams(router=None, router_bias=None, gate_up=gate_up, down=down, shared=None)


def check_result(y: np.ndarray, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> None:
    routing = Routing(jnp.asarray(ids), jnp.asarray(weights))
    expected = experts.moe(jnp.asarray(x), routing, ExpertLayer(parameters(), 0, Numerics()))[0]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def wire(phase: str, tokens: int) -> Iterator[list[str]]:
    """Rows of the table of bytes: a layer of DeepSeek-V3, FP8 there and bf16 back."""
    rows = LayerRows.from_widths(tokens, TOP_K, V3_HIDDEN, fp8_dispatch=True)
    payload = tokens * TOP_K * rows.row_bytes(TOP_K)
    for machine in MACHINES:
        chosen = choose(machine, V3_REPLICAS, rows).kind
        for kind in (Kind.RING, Kind.ALL_TO_ALL, Kind.HIERARCHICAL):
            if kind is Kind.HIERARCHICAL and machine.nodes == 1:
                continue
            transport = build(kind, machine, V3_REPLICAS, rows)
            measured, formula = traced(transport, rows), transport.traffic(rows)
            if dataclasses.replace(measured, messages=0) != dataclasses.replace(formula, messages=0):
                sys.exit(f"{kind} over {machine}: the program sends {measured}, the formula says {formula}")
            yield [
                f"{phase}, {tokens:,}", f"{machine.nodes} x {machine.gpus}", kind.value,
                f"{measured.device_bytes / 1e3:,.0f}", f"{measured.node_bytes / 1e3:,.0f}",
                f"{measured.device_bytes / payload:.2f}", "yes" if kind is chosen else "",
            ]  # fmt: skip


def traced(transport: Transport, rows: LayerRows) -> Traffic:
    """What the collectives of the exchange send, read from its jaxpr."""
    machine = transport.machine
    mesh = AbstractMesh((machine.nodes, machine.gpus), machine.axes, axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(machine.axes)

    def layer(values: jax.Array, scale: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        sent = TokenRows({"values": values, "scale": scale}, ids, weights)
        handle = transport.start(sent, lambda rows: (unpacked(rows).payload["values"].astype(jnp.bfloat16), None))
        return transport.finish(handle)[0]

    def array(width: int, dtype: jnp.dtype | type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows.tokens * machine.devices, width), dtype)

    K = rows.experts_per_token
    arrays = (array(V3_HIDDEN, jnp.float8_e4m3fn), array(V3_HIDDEN // 128, jnp.float32), array(K, jnp.int32))
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(*arrays, array(K, jnp.float32)).jaxpr
    return sent(jaxpr, dict(zip(machine.axes, (machine.nodes, machine.gpus), strict=True)), machine.axes[0])[0]


if __name__ == "__main__":
    sys.exit(main())
