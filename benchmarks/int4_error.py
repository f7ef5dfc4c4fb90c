"""What INT4 experts cost in each form they are served in: errors of weights and outputs, memory, time on a CPU.

    JAX_PLATFORMS=cpu python -m benchmarks.int4_error [--rows 16] [--rounds 5]

One expert of Kimi-K2's sizes, of random normal weights, once of one size everywhere and once with scale groups whose
sizes are log-normal (sigma 1). It is quantized to INT4 with a scale per 32 columns; those values are the yardstick, in
float32. Each form of them computes SwiGLU of random rows as `dsv3.model.layers.experts.moe` does when serving. An error
is the root mean square of the differences over that of the yardstick.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.checkpoint.quantize import Int4Mode, convert_int4
from dsv3.model.layers.experts import ExpertLayer, moe
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.router import Routing
from dsv3.model.params import Fp8Weight, Int4Weight, MoeParams
from pallas_kernels.fp8 import dequantize_128x128
from pallas_kernels.grouped import dequantize_int4

HIDDEN, INNER = 7168, 2048
FORMS: dict[str, tuple[Int4Mode, jnp.dtype]] = {
    "float32, the yardstick": ("dequantize", jnp.dtype(jnp.float32)),
    "bfloat16": ("dequantize", jnp.dtype(jnp.bfloat16)),
    "INT4, activations bfloat16": ("keep", jnp.dtype(jnp.bfloat16)),
    "FP8, activations too": ("fp8", jnp.dtype(jnp.bfloat16)),
}


def int4_weight(rng: np.random.Generator, n: int, k: int, sigma: float) -> tuple[Int4Weight, float]:
    """Returns random weights [1, 1, n, k] as INT4, and the error of that."""
    sizes = np.exp(sigma * rng.standard_normal((n, k // 32, 1), np.float32)) * k**-0.5
    groups = rng.standard_normal((n, k // 32, 32), np.float32) * sizes
    scale = jnp.asarray(np.abs(groups).max(-1) / 7.5, jnp.bfloat16)
    values = np.clip(np.round(groups / np.asarray(scale, np.float32)[..., None]), -8, 7)
    error = relative(values * np.asarray(scale, np.float32)[..., None], groups)
    bits = (values.astype(np.int32) + 8).view(np.uint32).reshape(n, -1, 8, 32)  # [n, runs, scale groups, words]
    words = sum(bits[:, :, group] << np.uint32(4 * group) for group in range(8))
    return Int4Weight(jnp.asarray(words.view(np.int32).reshape(1, 1, n, k // 8)), scale.T[None, None]), error


def as_served(weight: Int4Weight, mode: Int4Mode, dtype: jnp.dtype) -> Any:
    """Returns a weight in the form that `mode` says, as loading makes it of a file's."""
    in_a_file = Int4Weight(weight.data, jnp.swapaxes(weight.scale, -1, -2))
    return convert_int4(in_a_file, mode, dtype)


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the root mean square of the differences over that of `wanted`."""
    return float(np.sqrt(np.mean((got - wanted) ** 2) / np.mean(wanted**2)))


def real(weight: jax.Array | Fp8Weight | Int4Weight) -> np.ndarray:
    """Returns the float32 values of a weight in any form."""
    if isinstance(weight, Int4Weight):  # what is multiplied
        return np.asarray(dequantize_int4(weight.data, weight.scale, jnp.bfloat16), np.float32)
    if isinstance(weight, Fp8Weight):
        return np.asarray(dequantize_128x128(weight.data, weight.scale, jnp.float32))
    return np.asarray(weight, np.float32)


def expert(params: MoeParams, rows: int, dtype: jnp.dtype) -> Callable[[], jax.Array]:
    """Returns the expert as a function of nothing, compiled, of the same random rows for all forms."""
    x = jax.random.normal(jax.random.key(0), (rows, HIDDEN)).astype(jnp.bfloat16).astype(dtype)
    routing = Routing(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1)))
    step = jax.jit(lambda params, x: moe(x, routing, ExpertLayer(params, 0, Numerics()))[0])
    jax.block_until_ready(step(params, x))
    return lambda: jax.block_until_ready(step(params, x))


def seconds(call: Callable[[], jax.Array]) -> float:
    """Returns how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(sigma: float, rows: int, rounds: int) -> None:
    """Prints the table for one kind of weights."""
    rng = np.random.default_rng(0)
    gate_up, error = int4_weight(rng, 2 * INNER, HIDDEN, sigma)
    down, _ = int4_weight(rng, HIDDEN, INNER, sigma)
    print(f"\nscale groups of sigma {sigma}; INT4 differs from the weights before it by {error:.2%}\n")
    print("| form | bytes per weight | error of weights | error of outputs | time on a CPU, of bfloat16's |")
    print("|---|---|---|---|---|")
    forms = {
        name: MoeParams(None, None, *(as_served(w, mode, dtype) for w in (gate_up, down)), None)
        for name, (mode, dtype) in FORMS.items()
    }
    calls = {name: expert(params, rows, FORMS[name][1]) for name, params in forms.items()}
    taken = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    outputs = {name: np.asarray(call(), np.float32) for name, call in calls.items()}
    (first, wanted), *_ = outputs.items()
    for name, params in forms.items():
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / (3 * HIDDEN * INNER)
        weights = relative(real(params.gate_up), real(forms[first].gate_up))
        ratio = statistics.median(one[name] / one["bfloat16"] for one in taken)
        print(f"| {name} | {nbytes:.4g} | {weights:.2%} | {relative(outputs[name], wanted):.2%} | {ratio:.2g} |")


def main() -> None:
    """Compares the forms for both kinds of weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for sigma in (0.0, 1.0):
        compare(sigma, args.rows, args.rounds)


if __name__ == "__main__":
    main()
