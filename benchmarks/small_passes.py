"""Two passes of a step on a CPU, each in the form that is served and in another: processor time, and its ratio.

    JAX_PLATFORMS=cpu python -m benchmarks.small_passes [--rounds=7]

The weighted sum of a token's experts: each row weighted as it is read, or rows gathered first and multiplied with the
weights. The rotation of queries: neighbours as pairs, as checkpoints have them, or halves, as a permutation of the
weights' rows would make of them. The forms take turns; a figure is the median of the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.model.layers.experts import ExpertActivations, weighted_sum
from dsv3.model.layers.rope import Rotation, rotate, rotate_halves
from pallas_kernels.grouped import GroupAlignment

CALLS_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds, rng = parser.parse_args().rounds, np.random.default_rng(0)
    for T, dtype in ((1, jnp.float32), (32, jnp.float32), (32, jnp.bfloat16), (512, jnp.bfloat16)):
        out, gated = gathered(rng, T, 8, 2048, dtype)
        report(f"sum of 8 experts, {T} x 2048 {dtype.__name__}", rounds, weighted_sum, after_gather, out, gated)
    for T, dtype in ((16, jnp.bfloat16), (512, jnp.bfloat16), (512, jnp.float32)):
        x = jnp.asarray(rng.normal(size=(T, 16, 64)), dtype)
        by = Rotation(*(jnp.asarray(rng.normal(size=(T, 32)), jnp.float32) for _ in range(2)))
        report(f"rotation of {T} x 16 x 64 {dtype.__name__}", rounds, rotate, rotate_halves, x, by)


def gathered(rng: np.random.Generator, T: int, K: int, D: int, dtype: jnp.dtype) -> tuple[jax.Array, ExpertActivations]:
    """Returns aligned rows of experts' outputs, and what says whose they are."""
    none = jnp.zeros(0, jnp.int32)
    order = GroupAlignment(none, jnp.asarray(rng.permutation(T * K), jnp.int32), none, none, none)
    weights = jnp.asarray(rng.random((T, K)), jnp.float32)
    return jnp.asarray(rng.normal(size=(T * K, D)), dtype), ExpertActivations(
        none, None, order, None, weights, jnp.dtype(dtype)
    )


def after_gather(out: jax.Array, gated: ExpertActivations) -> jax.Array:
    """Computes the sums as a product of the weights with gathered rows."""
    picked = out.at[gated.order.aligned_row].get(mode="fill", fill_value=0).reshape(*gated.weights.shape, -1)
    return jnp.einsum("tk,tkd->td", gated.weights, picked.astype(jnp.float32))


def report(name: str, rounds: int, served: Callable, other: Callable, *args: object) -> None:
    """Prints the processor time of both forms per call."""
    forms = [jax.jit(served), jax.jit(other)]
    calls = [max(1, int(CALLS_S / seconds(form, args, 3))) for form in forms]
    times = [[seconds(form, args, n) for form, n in zip(forms, calls, strict=True)] for _ in range(rounds)]
    own, others = (statistics.median(each) for each in zip(*times, strict=True))
    print(f"{name:<42} served {own * 1e6:>8,.0f} us, other {others * 1e6:>8,.0f} us, ratio {others / own:.2f}")


def seconds(form: Callable, args: tuple[object, ...], calls: int) -> float:
    """Returns the processor time of one of `calls` calls, all threads together."""
    form(*args).block_until_ready()
    start = time.process_time()
    for _ in range(calls):
        form(*args).block_until_ready()
    return (time.process_time() - start) / calls


if __name__ == "__main__":
    main()
