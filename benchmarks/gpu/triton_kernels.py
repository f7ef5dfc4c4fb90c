"""What the Triton kernels take of each GPU, compiled without one: registers, spills and shared memory.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu.triton_kernels [--gpu 86,120] [--only decode]

Compiles every kernel that the cases of `pallas_kernels.checks` launch, and attention with other widths of heads, for
every compute capability of `pallas_kernels/gpus.py`. A cell has the kernels of an operation, the most registers of a
thread and the most KiB of shared memory. Exits with 1 if a kernel spills, or does not fit the shared memory of a
program. It says nothing of speed: no GPU has run these kernels.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.record import Report, arguments, run
from pallas_kernels import checks, gpus
from pallas_kernels.backend import Backend
from pallas_kernels.mla import mla_prefill, mla_prefill_topk
from pallas_kernels.triton.resources import TracedKernel, TritonResources, compile_kernel, traced_kernels
from tools.sass.kernels import program_of

type Program = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A name, a function, and the shapes of its arguments."""
_TITLE = "Kernels of each operation: most registers, most KiB of shared memory"


def main(report: Report) -> int:
    given = arguments(__doc__, gpu=None, only="")
    kinds = [gpus.by_number(int(each)) for each in (given.gpu or "").split(",") if each] or list(gpus.KINDS)
    names = [name for name in checks.names(Backend.TRITON) if given.only in name]
    with ProcessPoolExecutor() as pool:
        cells = pool.map(_cell, *zip(*itertools.product(names, [kind.number for kind in kinds]), strict=True))
        lines = ([name, *itertools.islice(cells, len(kinds))] for name in names)
        table = report.table(_TITLE, ["kernel", *(kind.architecture for kind in kinds)], lines)
    wrong = sum("**" in str(cell) for row in table.rows for cell in row)
    print(f"{wrong} of {len(names) * len(kinds)} cells have kernels that spill or do not fit", file=sys.stderr)
    return 1 if wrong else 0


def kernels(operation: str, gpu: gpus.GpuKind, few: bool = False) -> Iterator[TritonResources]:
    """Yields the kernels of an operation, each once, compiled for a GPU; if `few` the first and the last two."""
    traced: dict[str, TracedKernel] = {}
    for _, fn, shapes in programs(operation, Backend.TRITON):
        traced |= {repr(kernel): kernel for kernel in traced_kernels(fn, *shapes, gpu=gpu)}
    found = list(traced.values())
    return (compile_kernel(kernel, gpu) for kernel in (found[:1] + found[1:][-2:] if few else found))


def programs(operation: str, backend: Backend) -> Iterator[Program]:
    """Yields the programs of an operation's cases, then attention with widths of heads that no case has."""
    for case in checks.OPERATIONS[operation].cases(backend, False):
        yield case.name, *program_of(case, backend)
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    if operation == "mla_prefill":
        for keys, values in ((256, 256), (128, 128)):
            shapes = *(array((4096, 16, width)) for width in (keys, keys, values)), ints((9,))
            yield f"heads of {keys} and {values}", functools.partial(mla_prefill, scale=0.1, backend=backend), shapes
    if operation == "mla_prefill_topk" and backend is Backend.TRITON:
        T, K = 4096, 12288
        arrays = array((T, 16, 256)), array((K, 16, 192)), array((K, 16, 256)), array((K, 64))

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, shared: jax.Array, *where: jax.Array) -> jax.Array:
            return mla_prefill_topk(q, k, v, *where, scale=0.1, shared_key=shared, backend=backend)

        yield "heads of 256 and 256", attend, (*arrays, ints((K // 32, T)), ints((T,)), ints((T,)))


def _cell(operation: str, number: int) -> str:
    gpu = gpus.by_number(number)
    return written(list(kernels(operation, gpu)), gpu)


def written(found: Sequence[TritonResources], gpu: gpus.GpuKind) -> str:
    """Returns the cell of some kernels, in bold with the bytes of the worst where one spills or does not fit."""
    if not found:
        return ""
    spilled, shared = (max(getattr(each, name) for each in found) for name in ("spilled_bytes", "shared_memory"))
    text = f"{len(found)}: {max(each.registers for each in found)}, {shared / 1024:.0f}"
    text += f", {spilled} B spilled" if spilled else ""
    return f"**{text}**" if spilled or shared > gpu.shared_memory else text


if __name__ == "__main__":
    run(main)
