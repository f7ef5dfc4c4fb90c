"""Every transport of token rows at the shapes of decode and prefill, on the GPUs of one machine, beside `ring`.

    python -m benchmarks.gpu.transports [--only KIND] [--nodes 2]       one process drives all GPUs
    python -m benchmarks.gpu.transports --processes 8                   one process for each GPU

A layer dispatches DeepSeek-V3's rows (FP8 there, bfloat16 back), and computes next to nothing from them; a program runs
layers one after the other. Values are small integers, so sums are exact, and those of each transport must equal ring's
in every bit. `--nodes 2` makes two nodes of the GPUs, for transports with a hop to nodes. Transports are those of
`sharding.experts.transport_kind`; a row says why one was not measured. If nothing happens for `--seconds`, the process
writes its stacks and ends.
"""

import faulthandler
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.instances import free_port
from benchmarks.record import Cell, Report, arguments, elapsed, run
from pallas_kernels.float8 import E4M3
from sharding.collectives import compiler_options, in_program_order, launch_in_order, resolve_overlap
from sharding.experts.library_hop import LibraryHop
from sharding.experts.rows import TokenRows, unpacked
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import Transport, build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import DEVICES, Machine, rank_mesh
from sharding.nccl_ep import library
from sharding.processes import place

HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
PHASES = (("decode", 64), ("decode", 128), ("prefill", 4096))
"""Tokens of a device."""
LAYERS = {"decode": 100, "prefill": 10}
_TIMED = 3
COLUMNS = ["phase", "tokens per device", "nodes x GPUs", "transport", "equals ring", "us per layer",
           "MB out of a device", "GB/s", "why not"]  # fmt: skip
type Arrays = tuple[jax.Array, ...]


def main(report: Report) -> int:
    args = arguments(__doc__, only=None, nodes=1, processes=1, seconds=120.0, process=int, port=int)
    chosen = {TransportKind.RING, TransportKind(args.only)} if args.only else set(TransportKind)
    kinds = sorted(chosen, key=[TransportKind.RING, *TransportKind].index)
    if args.process is not None:
        address = f"127.0.0.1:{args.port}"
        jax.distributed.initialize(address, args.processes, args.process, local_device_ids=[args.process])
        for row in measured(jax.devices(), args.nodes, kinds, args.seconds):
            print(json.dumps(row), flush=True)
        return 0
    if args.processes > 1:
        rows = _by_processes(args.processes, sys.argv[1:])
    else:
        rows = measured(jax.devices(), args.nodes, kinds, args.seconds)
    table = report.table("A layer's dispatch and combine by each transport", COLUMNS, rows)
    equal = [row[4] for row in table.rows if row[4] is not None]
    return 0 if equal and set(equal) == {"yes"} else 1


def measured(
    devices: Sequence[Any], nodes: int, kinds: Sequence[TransportKind], seconds: float
) -> Iterator[list[Cell]]:
    """Yields a row for each phase and transport, of which the first is ring."""
    mesh = rank_mesh(devices, nodes)
    machine = Machine.from_mesh(mesh)
    launch_in_order(devices[0].platform)
    for phase, tokens in PHASES:
        arrays, wanted = batch(mesh, tokens), None
        head: list[Cell] = [phase, tokens, f"{machine.nodes} x {machine.gpus}"]
        for kind in kinds:
            faulthandler.dump_traceback_later(seconds, exit=True)
            try:
                layer = LayerRows.from_widths(tokens, TOP_K, HIDDEN, fp8_dispatch=True)
                transport = build(kind, machine, EXPERTS, layer, resolve_overlap(devices[0].platform))
                took, sums, overflows = timed(transport, mesh, arrays, LAYERS[phase])
            except Exception as error:  # a transport that is not for these devices, or fails, costs its row
                says = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                yield [*head, kind.value, None, None, None, None, says]
                continue
            finally:
                faulthandler.cancel_dump_traceback_later()
            wanted = sums if wanted is None else wanted
            equal = not overflows and bool(jax.jit(jnp.array_equal)(sums, wanted))
            sent = transport.traffic(layer).device_bytes
            says = "a buffer overflowed" if overflows else None
            yield [*head, kind.value, "yes" if equal else "NO", 1e6 * took, sent / 1e6, sent / took / 1e9, says]


def batch(mesh: Mesh, tokens: int) -> Arrays:
    """Returns values, scales, ids and weights of `tokens` on each device: integers whose sums bfloat16 holds exactly.

    A sum is at most 8 experts x 2 (weight) x 2 (factor) x 3 (value) in steps of 1.
    """
    rng, count = np.random.default_rng(0), mesh.size * tokens
    values = rng.integers(0, 4, (count, HIDDEN)).astype(E4M3)
    scale = np.ones((count, -(-HIDDEN // 128)), np.float32)
    ids = rng.random((count, EXPERTS)).argpartition(TOP_K, axis=1)[:, :TOP_K].astype(np.int32)
    weights = rng.integers(1, 3, (count, TOP_K)).astype(np.float32)
    return place((values, scale, ids, weights), NamedSharding(mesh, PartitionSpec(DEVICES)))


def experts(axes: tuple[str, ...], replicas: int, rows: TokenRows) -> tuple[jax.Array, None]:
    """Returns weighted sums of what each of a device's experts makes of a row: the row, or twice the row."""
    rows = unpacked(rows)
    factor = 1 + (rows.ids + jax.lax.axis_index(axes) * replicas) % 2
    weight = jnp.where(rows.ids >= 0, rows.weights * factor, 0).sum(axis=1)
    values, scale = rows.payload["values"], rows.payload["scale"]
    x = values.astype(jnp.float32).reshape(*scale.shape, -1) * scale[:, :, None]
    return (x.reshape(values.shape) * weight[:, None]).astype(jnp.bfloat16), None


def timed(transport: Transport[Any], mesh: Mesh, arrays: Arrays, layers: int) -> tuple[float, jax.Array, int]:
    """Returns seconds per layer, the sums of the last layer, and how many buffers overflowed in it."""
    if keys := [hop.key(TOP_K) for hop in transport.hops if isinstance(hop, LibraryHop)]:
        library.create_groups(mesh, keys)
    program = jax.jit(layers_program(transport, mesh, layers)).lower(*arrays)
    compiled = program.compile(compiler_options(mesh.devices.flat[0].platform))
    sums, overflows = jax.block_until_ready(compiled(*arrays))
    best = min(elapsed(lambda: jax.block_until_ready(compiled(*arrays))) for _ in range(_TIMED))
    return best / layers, sums, int(jax.jit(jnp.sum)(overflows))


def layers_program(transport: Transport[Any], mesh: Mesh, layers: int) -> Callable[..., Any]:
    """Returns a program of `layers`, each of which needs the sums of the one before."""

    @jax.jit
    def token_rows(values: jax.Array, scale: jax.Array, ids: jax.Array, weights: jax.Array, y: jax.Array) -> TokenRows:
        weights, _ = jax.lax.optimization_barrier((weights, y))
        return TokenRows({"values": values, "scale": scale}, ids, weights)

    def body(carry: Any, _: Any) -> Any:
        arrays, y, lost = carry
        y, overflows = transport.finish(transport.start(token_rows(*arrays, y), of_rows))
        return (arrays, y, lost if overflows is None else jax.jit(jnp.add)(lost, overflows)), None

    of_rows = functools.partial(experts, transport.machine.axes, transport.replicas_per_device)

    def of_device(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.zeros(arrays[0].shape, jnp.bfloat16)
        start = arrays, y, jnp.zeros((), jnp.int32)
        (_, y, lost), _ = jax.lax.scan(in_program_order(body, transport.overlap), start, length=layers)
        return y, lost[None]

    spec = PartitionSpec(DEVICES)
    return jax.shard_map(of_device, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, spec), check_vma=False)


def _by_processes(count: int, words: Sequence[str]) -> Iterator[list[Cell]]:
    """Yields the rows that process 0 of `count` prints, until it ends. Each process ends where a row takes too long."""
    command = [sys.executable, "-m", "benchmarks.gpu.transports", *words, f"--port={free_port()}"]
    children = [
        subprocess.Popen([*command, f"--process={i}"], stdout=subprocess.DEVNULL if i else subprocess.PIPE, text=True)
        for i in range(count)
    ]
    try:
        assert children[0].stdout is not None
        yield from (json.loads(line) for line in children[0].stdout if line.startswith('["'))
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    run(main)
