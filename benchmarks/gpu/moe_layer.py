"""One rank's MoE layer at DeepSeek-V3's decode deployment, EP144, on one GPU: routed experts, shared expert, both.

    python -m benchmarks.gpu.moe_layer --out DIR                       on a Hopper GPU; under three minutes
    JAX_PLATFORMS=cpu python -m benchmarks.gpu.moe_layer --compile     without one: registers, spills and memory

A rank of 144 holds 2 of 288 expert replicas of 7168 x 2048 in FP8 and has 128 tokens of its own. To it come the
buffers of the all-to-all transport, 27 rows from each rank; with even routing each expert has 512 live rows. What is
timed is what the rank computes: the routed experts on what arrived, the shared expert on its own tokens. Nothing is
sent.

Writes DIR/moe_layer.md and DIR/moe_layer.json. A figure is the best of three loops of calls, each with another layer of
a stack that the L2 cache cannot hold, next to what the same run measured for a copy and for cuBLAS FP8 products.
"""

import argparse
import datetime
import functools
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import fp8_gemm
from benchmarks.gpu.fp8_cases import Case
from dsv3.model.layers import experts
from dsv3.model.layers.experts import ExpertLayer
from dsv3.model.layers.linear import Numerics, mlp
from dsv3.model.layers.router import Routing
from dsv3.model.params import Fp8Weight, MlpParams, MoeParams
from pallas_kernels import aot
from pallas_kernels.backend import Backend, is_hopper
from pallas_kernels.fp8 import quantize_1x128, quantize_128x128
from sharding.experts.capacity import expected_capacity

RANKS, TOKENS, TOP_K = 144, 128, 8
LOCAL, HIDDEN, WIDTH = 2, 7168, 2048
LAYERS = 4
"""88 MB of routed and 44 MB of shared experts each: together ten times the L2 cache of an H200."""
ROWS = RANKS * expected_capacity(TOKENS, RANKS, TOP_K, RANKS * RANKS, LOCAL)
PAIRS = RANKS * TOKENS * TOP_K // (RANKS * LOCAL) * LOCAL
"""(token, expert) pairs that even routing brings to a rank."""


def main() -> int:
    args = _arguments()
    if args.compile:
        return compile_all()
    device = jax.devices()[0]
    if not is_hopper(device):
        print(
            f"This benchmark needs a Hopper GPU (sm_90); the device here is {device.device_kind!r}. Nothing was run.\n"
            "Without a GPU, --compile checks registers, spills and memory.",
            file=sys.stderr,
        )
        return 2
    roofs = fp8_gemm.Run(device, deadline=time.monotonic() + 180, out=args.out)
    roofs.roofs()
    rows = [check_and_measure(case, roofs) for case in all_cases(Backend.MOSAIC)]
    write(args.out, device, roofs, rows)
    return 0 if all(row["right"] for row in rows) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/moe_layer"), help="folder for the tables")
    parser.add_argument("--compile", action="store_true", help="compile for an H200 and gate its kernels' resources")
    return parser.parse_args()


def all_cases(backend: Backend) -> Iterator[Case]:
    """Routed experts, shared expert, and the layer."""
    product = 2 * HIDDEN * WIDTH * 3  # flop of a row through gate, up and down
    weights = 3 * HIDDEN * WIDTH
    routed = (PAIRS * product, LOCAL * weights + PAIRS * (HIDDEN + 2 * HIDDEN))
    shared = (TOKENS * product, weights + TOKENS * (2 * HIDDEN + 2 * HIDDEN))
    both = tuple(np.add(routed, shared).tolist())
    for name, parts, (flops, size) in (
        ("routed", ("routed",), routed),
        ("shared", ("shared",), shared),
        ("layer", ("routed", "shared"), both),
    ):
        yield _case(name, parts, flops, size, backend)


def _case(name: str, parts: tuple[str, ...], flops: float, size: float, backend: Backend) -> Case:
    def call(operands: dict, i: Any, backend: Backend = backend) -> tuple[jax.Array, ...]:
        return tuple(_COMPUTE[part](operands, i % LAYERS, Numerics(backend, expert_pairs=PAIRS)) for part in parts)

    def valid_rows(operands: dict, i: Any) -> tuple[jax.Array, jax.Array]:
        return tuple(
            jnp.concatenate(call(operands, i, backend)).astype(jnp.float32) for backend in (backend, Backend.REFERENCE)
        )  # type: ignore[return-value]  # two of them

    label = f"{name}: {', '.join(_LABELS[part] for part in parts)}"
    return Case("EP144 decode", label, (name,), operands, call, valid_rows, flops, size, 1e-3)


def _routed(operands: dict, layer: Any, numerics: Numerics) -> jax.Array:
    routing = Routing(operands["ids"], operands["weights"])
    return experts.moe(operands["arrived"], routing, ExpertLayer(operands["moe"], layer, numerics))[0]


def _shared(operands: dict, layer: Any, numerics: Numerics) -> jax.Array:
    return mlp(operands["own"], operands["moe"].shared, layer, numerics)


_COMPUTE = {"routed": _routed, "shared": _shared}
_LABELS = {
    "routed": f"{PAIRS} pairs in {ROWS} rows, {LOCAL} experts",
    "shared": f"{TOKENS} tokens",
}


def operands(key: jax.Array) -> dict:
    """Weights of `LAYERS` layers, the buffers that arrived with `PAIRS` live pairs in them, and the rank's tokens."""
    keys = jax.random.split(key, 4)
    own = jax.random.normal(keys[0], (TOKENS, HIDDEN), jnp.bfloat16)
    values, scale = quantize_1x128(jax.random.normal(keys[1], (ROWS, HIDDEN), jnp.bfloat16), backend=Backend.REFERENCE)
    ids, weights = arrivals()
    shared = MlpParams(_weights(keys[2], LAYERS, 2 * WIDTH, HIDDEN), _weights(keys[2], LAYERS, HIDDEN, WIDTH))
    gate_up, down = (
        jax.tree.map(lambda w: w.reshape(LAYERS, LOCAL, *w.shape[1:]), _weights(keys[3], LAYERS * LOCAL, *shape))
        for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    return {
        "own": own,
        "arrived": experts.Quantized(values, scale.T, jnp.bfloat16),
        "ids": jnp.asarray(ids),
        "weights": jnp.asarray(weights),
        "moe": MoeParams(router=None, router_bias=None, gate_up=gate_up, down=down, shared=shared),
    }


def arrivals() -> tuple[np.ndarray, np.ndarray]:
    """Ids `[ROWS, LOCAL]` as a rank finds them: from each peer the first rows of its buffer, one expert in each.

    Two experts of a token meet on a rank in 3 % of the rows that come there, which is left out.
    """
    capacity, per_peer = ROWS // RANKS, PAIRS / RANKS
    ids = np.full((RANKS, capacity, LOCAL), -1, np.int32)
    counts = np.diff(np.round(np.arange(RANKS + 1) * per_peer).astype(int))
    for peer, count in enumerate(counts):
        ids[peer, :count, 0] = (np.arange(count) + peer) % LOCAL
    rng = np.random.default_rng(0)
    weights = np.where(ids >= 0, rng.random(ids.shape, np.float32), 0)
    return ids.reshape(ROWS, LOCAL), weights.reshape(ROWS, LOCAL).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _weights(key: jax.Array, stack: int, n: int, k: int) -> Fp8Weight:
    """Drawn one by one, so that no float32 stack is needed; products keep about unit variance."""

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return quantize_128x128(jax.random.normal(key, (n, k), jnp.bfloat16) / np.sqrt(k).astype(jnp.bfloat16))

    return Fp8Weight(*jax.lax.map(one, jax.random.split(key, stack)))


def check_and_measure(case: Case, roofs: fp8_gemm.Run) -> dict:
    """Correctness first, against the reference backend; a wrong case is not timed."""
    arrays = jax.jit(case.operands)(jax.random.key(0))
    diff = fp8_gemm.difference(case, arrays)
    row: dict = {"label": case.label, "calc_diff": diff, "right": diff < case.tolerance}
    if row["right"]:
        roof = max(case.flops / roofs.fp8_rate, case.bytes / roofs.copy_rate)
        seconds = fp8_gemm.time_case(case, arrays, roof)
        row |= {
            "microseconds": seconds * 1e6,
            "tflops": case.flops / seconds / 1e12,
            "terabytes_per_second": case.bytes / seconds / 1e12,
            "share_of_roof": roof / seconds,
        }
    print(table_line(row), flush=True)
    return row


TABLE_HEAD = ("| what | us | TFLOP/s | TB/s | of the roof | calc_diff |", "|---|---|---|---|---|---|")


def table_line(row: dict) -> str:
    if not row["right"]:
        return f"| {row['label']} | WRONG | | | | {row['calc_diff']:.1e} |"
    return (
        f"| {row['label']} | {row['microseconds']:.1f} | {row['tflops']:.0f} | {row['terabytes_per_second']:.2f} | "
        f"{row['share_of_roof']:.0%} | {row['calc_diff']:.1e} |"
    )


def write(out: Path, device: jax.Device, roofs: fp8_gemm.Run, rows: list[dict]) -> None:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    header = (
        f"{now}; {device.device_kind}; jax {jax.__version__}; {device.client.platform_version!r}\n"
        f"command: python -m benchmarks.gpu.moe_layer {shlex.join(sys.argv[1:])}\n\n"
        f"Measured in this run: copy {roofs.copy_rate / 1e12:.2f} TB/s; cuBLAS through XLA, 8192^3: FP8 "
        f"{roofs.fp8_rate / 1e12:.0f} TFLOP/s. The roof is the longer of flop and bytes at these rates."
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "moe_layer.md").write_text("\n".join([header, "", *TABLE_HEAD, *map(table_line, rows)]) + "\n")
    (out / "moe_layer.json").write_text(json.dumps({"header": header, "rows": rows}, indent=1))


def compile_all() -> int:
    """Compiles every case for an H200 and prints its kernels' registers and spills, and its memory; 1 if one spills."""
    spilled = 0
    shapes = jax.eval_shape(operands, jax.random.key(0))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    for case in all_cases(Backend.MOSAIC):
        compiled, kernels = aot.compile_with_resources(case.call, shapes, number)
        for kernel in kernels:
            spilled += kernel.spill_bytes > 0
            print(f"{case.label}: {kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled")
        memory = compiled.memory_analysis()
        print(f"{case.label}: {memory.temp_size_in_bytes / 1e6:.0f} MB of temporaries", flush=True)
    print(f"{spilled} kernels spill")
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
