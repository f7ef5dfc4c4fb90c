"""One rank's MoE layer at DeepSeek-V3's decode deployment, EP144, on one GPU: routed experts, shared expert, both.

    python -m benchmarks.gpu.moe_layer --out DIR                       on a Hopper GPU; under three minutes
    JAX_PLATFORMS=cpu python -m benchmarks.gpu.moe_layer --compile     without one: registers, spills and memory

`tools/doctor/moe_layer.py` says what is computed. Writes DIR/moe_layer.md and DIR/moe_layer.json, anew after each child
process (`children.py`). A time is the best of three loops of calls, each with another layer of a stack that the L2
cache cannot hold, next to what the same run measured for a copy and for cuBLAS FP8 products.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu import children
from benchmarks.record import Report, run
from pallas_kernels.backend import Backend
from tools.doctor.moe_layer import all_cases, operands
from tools.doctor.rates import measure_case


def main(report: Report) -> int:
    title = (__doc__ or "").split("\n")[0]
    cases = {("EP144 decode", case.name): case for case in all_cases()}
    return children.main(
        report,
        "benchmarks.gpu.moe_layer",
        title,
        list(cases),
        lambda k, r: measure_case(cases[k], r, Backend.MOSAIC),
        programs,
    )


def programs() -> Iterator[tuple[str, Callable[..., Any], tuple]]:
    """Yields the program of every case."""
    shapes = jax.eval_shape(operands, jax.random.key(0))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    for case in all_cases():
        yield case.name, functools.partial(case.call, backend=Backend.MOSAIC), (shapes, number)


if __name__ == "__main__":
    run(main)
