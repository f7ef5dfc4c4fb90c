"""What the Triton kernels take of each GPU, compiled without one: registers, spills and shared memory.

    JAX_PLATFORMS=cpu python -m benchmarks.gpu.triton_kernels [--gpu 86,120] [--only decode]

Compiles every kernel that the cases of `pallas_kernels.checks` launch, for every compute capability of
`pallas_kernels/gpus.py`. A cell has the kernels of an operation, the most registers of a thread and the most KiB of
shared memory. Exits with 1 if a kernel spills, or does not fit the shared memory of a program. It says nothing of
speed: no GPU has run these kernels.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.gpu.children import program_of
from benchmarks.record import Report, arguments, run
from pallas_kernels import checks, gpus
from pallas_kernels.backend import Backend
from pallas_kernels.triton.resources import TracedKernel, TritonResources, compile_kernel, traced_kernels

_TITLE = "Kernels of each operation: most registers, most KiB of shared memory"


def main(report: Report) -> int:
    given = arguments(__doc__, gpu=None, only="", processes=2)
    kinds = [gpus.by_number(int(each)) for each in (given.gpu or "").split(",") if each] or list(gpus.KINDS)
    names = [name for name in checks.names(Backend.TRITON) if given.only in name]
    with ProcessPoolExecutor(given.processes) as pool:
        cells = pool.map(_cell, *zip(*itertools.product(names, [kind.number for kind in kinds]), strict=True))
        lines = ([name, *itertools.islice(cells, len(kinds))] for name in names)
        table = report.table(_TITLE, ["kernel", *(kind.architecture for kind in kinds)], lines)
    wrong = sum("**" in str(cell) for row in table.rows for cell in row)
    print(f"{wrong} of {len(names) * len(kinds)} cells have kernels that spill or do not fit", file=sys.stderr)
    return 1 if wrong else 0


def kernels(operation: str, gpu: gpus.GpuKind) -> Iterator[TritonResources]:
    """Yields the kernels of an operation's cases, each once, compiled for a GPU."""
    found: dict[str, TracedKernel] = {}
    for case in checks.OPERATIONS[operation].cases(Backend.TRITON, False):
        fn, shapes = program_of(case, Backend.TRITON)
        found |= {repr(kernel): kernel for kernel in traced_kernels(fn, *shapes, gpu=gpu)}
    return (compile_kernel(kernel, gpu) for kernel in found.values())


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
