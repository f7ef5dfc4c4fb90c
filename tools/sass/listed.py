"""DeepSeek-V4's attention to listed rows, whose kernel is Triton's: what its main loop asks of a multiprocessor.

There are bounds and no modelled cycles: the loop copies rows by `cp.async` and multiplies by single warps, and the
model knows the latency of neither. Bounds are of 64 rows of a query's list and 64 of its heads, all programs together.
"""

from collections.abc import Iterator, Mapping, Sequence

from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.checks import Case
from pallas_kernels.checks.compressed import ENTRIES, attend_case
from pallas_kernels.triton.resources import compile_kernel, traced_kernels
from tools.sass import counts, disassembly, loops
from tools.sass.counts import assumed
from tools.sass.disassembly import SassInstruction
from tools.sass.kernels import program_of
from tools.sass.model import ModelError

HEAD = ("kernel", "products", "KiB from the L2 cache", "tensor core", "shared memory", "issue", "exp2", "L2")
TITLE = "Bounds of 64 rows and 64 heads of attention to listed rows, in cycles"
_SIDE = 64
_THEIRS = "FlashMLA decode"


def cases() -> dict[str, Case]:
    """Returns attention with 64 and 128 heads to the rows of each type, by name."""
    kinds = {"bfloat16": False, "FP8": True}
    return {
        f"window and entries, {heads} heads, {kind} rows": attend_case(entries, heads, fp8)
        for kind, fp8 in kinds.items()
        for entries, heads in ENTRIES[:2]
    }


def rows(cases: Mapping[str, Case], others: dict) -> Iterator[tuple]:
    """Yields a row of the table for each case, compiled for sm_90, and FlashMLA's dense loop at the end.

    Raises:
      ToolMissingError: something of the `aot` extra is missing.
      ModelError: a kernel has not one main loop.
    """
    gpu = gpus.by_number(90)
    for name, case in cases.items():
        attend, arrays = program_of(case, Backend.TRITON)
        (traced,) = traced_kernels(attend, *arrays, gpu=gpu)
        compiled = compile_kernel(traced, gpu)
        paths = loops.main_loops(disassembly.assemble(compiled.ptx))
        if len(paths) != 1:
            raise ModelError(f"{name} has {len(paths)} main loops")
        heads, listed, own = traced.constants["BLOCK_H"], traced.constants["BLOCK_N"], arrays[0]["own"]
        yield (name, *bounds(paths[0], compiled.warps, heads, listed, own.shape[-1] * own.dtype.itemsize))
    theirs = others["loops"][_THEIRS]["bounds"]  # of two pages of 64 tokens
    halves = [theirs[name] / 2 for name in HEAD[3:]]
    fetched = halves[-1] * assumed("L2 to multiprocessor") / 1024
    yield (f"*FlashMLA, dense, 64 tokens, {_SIDE} rows*", None, fetched, *halves)


def bounds(path: Sequence[SassInstruction], warps: int, heads: int, listed: int, row_bytes: int) -> tuple[float, ...]:
    """Returns the cells of a loop of which a pass is `listed` rows for `heads` heads, as `HEAD` names them."""
    passes = _SIDE / heads * _SIDE / listed
    fetched = listed * row_bytes * passes
    products = sum(map(loops.is_product, path)) * warps * passes
    found = counts.resources(path)
    of_groups = (found[name] * warps / counts.WARPS * passes for name in HEAD[3:7])
    return (products, fetched / 1024, *of_groups, fetched / assumed("L2 to multiprocessor"))
