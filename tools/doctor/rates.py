"""Measures what a device does per second, and the time of an operation beside it, in one process on one device.

The roof of an operation is the time that its device needs for as many bytes in a copy, or for as many operations in a
large product of XLA's, whichever is longer. The doctor and `benchmarks/gpu` measure alike: with the code below.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import checks
from pallas_kernels.backend import Backend
from pallas_kernels.checks import Case, Row
from pallas_kernels.float8 import E4M3

type Roofs = Mapping[str, float]
"""What `measure_roofs` returns."""

COPY, BFLOAT16, FP8 = "copy B/s", "bfloat16 flop/s", "FP8 flop/s"
SHARE = "share of the roof"
_LOOPS = 3
_LOOP_SECONDS = 0.02
_MAX_CALLS = 500
_ROOF_CALLS = 20


def measure_roofs(
    products: Iterable[str] = (BFLOAT16, FP8), *, floats: int = 1 << 28, side: int = 8192
) -> dict[str, float]:
    """Returns bytes per second of a copy of `floats` float32 values, read and written, and flop/s of `products`.

    A product has `side` rows, columns and terms.
    """
    x = jnp.zeros(floats, jnp.float32)
    found = {COPY: 2 * x.nbytes / seconds_per_call(lambda i, x: x + 1, x, _ROOF_CALLS)}
    square = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    scale = 1 / math.sqrt(side)  # keeps a chain of products near unit variance

    def bfloat16(i: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ weight

    def fp8(i: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
        product = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return (product * scale).astype(E4M3)

    chains = {BFLOAT16: (bfloat16, square, square * scale), FP8: (fp8, *2 * (square.astype(E4M3),))}
    for name in products:
        step, first, weight = chains[name]
        found[name] = 2 * side**3 / seconds_per_call(step, first, _ROOF_CALLS, weight)
    return found


def roof_seconds(roofs: Roofs, flops: float, size: float, *, bfloat16: bool) -> float:
    """Returns the longer of `flops` at the product's rate and `size` bytes at the copy's rate."""
    return max(flops / roofs[BFLOAT16 if bfloat16 else FP8], size / roofs[COPY])


def seconds_per_call(step: Callable, init: Any, calls: int, *operands: Any) -> float:
    """Returns the best of three loops of `calls` calls of `step(i, carry, *operands)` in one program."""
    timed = compiled_loop(step, init, calls, *operands)
    return min(timed() for _ in range(_LOOPS))


def compiled_loop(step: Callable, init: Any, calls: int, *operands: Any) -> Callable[[], float]:
    """Compiles a loop of `calls` calls of `step(i, carry, *operands)`; returns what runs it: seconds per call."""
    loop = jax.jit(lambda init, *operands: lax.fori_loop(0, calls, lambda i, x: step(i, x, *operands), init))
    jax.block_until_ready(loop(init, *operands))

    def timed() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(loop(init, *operands))
        return (time.perf_counter() - begin) / calls

    return timed


def time_call(call: Callable[..., Any], operands: Any, roof: float) -> float:
    """Returns seconds per `call(operands, i)`, the best of three loops of `timer`."""
    timed = timer(call, operands, roof)
    return min(timed() for _ in range(_LOOPS))


def timer(call: Callable[..., Any], operands: Any, roof: float) -> Callable[[], float]:
    """Returns what times `call(operands, i)` in a loop that lasts at least as long as its roof says: seconds per call.

    A call depends on the one before, so that no compiler moves what does not depend on `i` out of the loop.
    """
    calls = int(min(_MAX_CALLS, max(5, _LOOP_SECONDS / roof)))
    result = jax.eval_shape(call, operands, 0)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result)

    def step(i: Any, last: Any, operands: Any) -> Any:
        operands, _ = lax.optimization_barrier((operands, last))
        return call(operands, i)

    return compiled_loop(step, nothing, calls, operands)


def measure_case(case: Case, roofs: Roofs, backend: Backend) -> Row:
    """Returns the row of a case: correct, and then timed beside its roof. What is wrong is not timed.

    A call takes weight number i of a stack, or layer i of a pool, that the L2 cache cannot hold.

    Raises `pallas_kernels.checks.case.ContextLostError` where the device computes nothing any more.
    """
    row = checks.check(case, backend)
    if not row.passed:
        return row
    operands = jax.jit(case.operands)(jax.random.key(0))
    roof = roof_seconds(roofs, case.flops, case.bytes, bfloat16="bfloat16" in case.key)
    seconds = time_call(lambda o, i: case.call(o, i, backend), operands, roof)
    rates = {"TFLOP/s": case.flops / seconds / 1e12, "GB/s": case.bytes / seconds / 1e9}
    worst = {name: value for name, value in row.figures.items() if name.endswith(".diff")}
    return dataclasses.replace(row, figures={"us": seconds * 1e6, **rates, SHARE: roof / seconds} | worst)
