"""The cases of one rank's MoE layer at DeepSeek-V3's decode deployment, EP144: routed experts, shared expert, both.

A rank of 144 holds 2 of 288 expert replicas of 7168 x 2048 in FP8 and has 128 tokens of its own. To it come the
buffers of the all-to-all transport, 27 rows from each rank; with even routing each expert has 512 live rows. What is
computed is what the rank computes: the routed experts on what arrived, the shared expert on its own tokens. Nothing is
sent.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.model.layers import experts
from dsv3.model.layers.experts import ExpertLayer
from dsv3.model.layers.linear import Numerics, mlp
from dsv3.model.layers.router import Routing
from dsv3.model.params import Fp8Weight, MlpParams, MoeParams
from pallas_kernels.backend import Backend
from pallas_kernels.checks import Case, Tolerance
from pallas_kernels.fp8 import quantize_1x128, quantize_128x128
from sharding.experts.capacity import expected_capacity

RANKS, TOKENS, TOP_K = 144, 128, 8
LOCAL, HIDDEN, WIDTH = 2, 7168, 2048
LAYERS = 4
"""88 MB of routed and 44 MB of shared experts each: together ten times the L2 cache of an H200."""
ROWS = RANKS * expected_capacity(TOKENS, RANKS, TOP_K, RANKS * RANKS, LOCAL)
PAIRS = RANKS * TOKENS * TOP_K // (RANKS * LOCAL) * LOCAL
"""(token, expert) pairs that even routing brings to a rank."""
_LAYER = Tolerance(1e-3, 2**-4, 2**-2, "few values between the products are rounded to another e4m3 neighbor")


def all_cases() -> Iterator[Case]:
    """Yields routed experts, shared expert, and the layer."""
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
        yield _case(name, parts, flops, size)


def _case(name: str, parts: tuple[str, ...], flops: float, size: float) -> Case:
    def call(operands: dict, i: Any, backend: Backend) -> dict[str, jax.Array]:
        return {part: _COMPUTE[part](operands, i % LAYERS, Numerics(backend, expert_pairs=PAIRS)) for part in parts}

    return Case(
        f"{name}: {', '.join(_LABELS[part] for part in parts)}", operands, call, dict.fromkeys(parts, _LAYER),
        counted=lambda operands, result: result, exact=lambda operands: operands, flops=flops, bytes=size,
    )  # fmt: skip


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
        "arrived": experts.Quantized(values, scale.T, jnp.dtype(jnp.bfloat16)),
        "ids": jnp.asarray(ids),
        "weights": jnp.asarray(weights),
        "moe": MoeParams(router=None, router_bias=None, gate_up=gate_up, down=down, shared=shared),
    }


def arrivals() -> tuple[np.ndarray, np.ndarray]:
    """Ids `[ROWS, LOCAL]` as a rank finds them: from each peer the first rows of its buffer, one expert in each.

    3 % of the rows need two experts of the rank; this is not modeled.
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
    """Returns `stack` random weights, drawn one by one to need no float32 stack; products keep about unit variance."""

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return quantize_128x128(jax.random.normal(key, (n, k), jnp.bfloat16) / np.sqrt(k).astype(jnp.bfloat16))

    return Fp8Weight(*jax.lax.map(one, jax.random.split(key, stack)))
