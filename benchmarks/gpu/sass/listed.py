"""DeepSeek-V4's attention to listed rows, whose kernel is Triton's: what its main loop asks of a multiprocessor.

There are bounds and no modelled cycles: the loop copies rows by `cp.async` and multiplies by single warps, and the
model knows the latency of neither. Bounds are of 64 rows of a query's list and 64 of its heads, all programs together.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.children import Program
from benchmarks.gpu.sass import counts, disassembly, loops
from benchmarks.gpu.sass.disassembly import Instruction
from benchmarks.gpu.sass.model import ModelError, assumed
from benchmarks.gpu.triton_kernels import programs
from pallas_kernels import gpus
from pallas_kernels.backend import Backend
from pallas_kernels.triton.resources import compile_kernel, traced_kernels

HEAD = ("kernel", "products", "KiB from the L2 cache", "tensor core", "shared memory", "issue", "exp2", "L2")
TITLE = "Bounds of 64 rows and 64 heads of attention to listed rows, in cycles"
_SIDE = 64
_THEIRS = "FlashMLA decode"


def cases() -> dict[str, Program]:
    """Returns attention with 64 and 128 heads to the rows of each type, by name."""
    found: dict[str, Program] = {}
    for _, attend, arrays in programs("attend_compressed", Backend.TRITON):
        kind = "FP8" if _own(arrays).dtype.itemsize == 1 else "bfloat16"
        heads = next(array.shape[1] for array in jax.tree.leaves(arrays) if array.dtype == jnp.float32)  # the sink
        found.setdefault(f"window and entries, {heads} heads, {kind} rows", (attend, arrays))
    return found


def _own(arrays: Any) -> jax.ShapeDtypeStruct:
    """Returns the rows of the step's own tokens."""
    return next(array for array in jax.tree.leaves(arrays) if array.ndim == 2 and array.dtype.itemsize < 4)


def rows(programs: Mapping[str, Program], others: dict) -> Iterator[tuple]:
    """Yields a row of the table for each program, compiled for sm_90, and FlashMLA's dense loop at the end.

    Raises:
      ToolMissingError: something of the `aot` extra is missing.
      ModelError: a kernel has not one main loop.
    """
    gpu = gpus.by_number(90)
    for name, (attend, arrays) in programs.items():
        (traced,) = traced_kernels(attend, *arrays, gpu=gpu)
        compiled = compile_kernel(traced, gpu)
        paths = loops.main_loops(disassembly.assemble(compiled.ptx))
        if len(paths) != 1:
            raise ModelError(f"{name} has {len(paths)} main loops")
        heads, listed = (traced.constants[block] for block in ("BLOCK_H", "BLOCK_N"))
        row_bytes = _own(arrays).shape[-1] * _own(arrays).dtype.itemsize
        yield (name, *bounds(paths[0], compiled.warps, heads, listed, row_bytes))
    theirs = others["loops"][_THEIRS]["bounds"]  # of two pages of 64 tokens
    halves = [theirs[name] / 2 for name in HEAD[3:]]
    fetched = halves[-1] * assumed("L2 to multiprocessor") / 1024
    yield (f"*FlashMLA, dense, 64 tokens, {_SIDE} rows*", None, fetched, *halves)


def bounds(path: Sequence[Instruction], warps: int, heads: int, listed: int, row_bytes: int) -> tuple[float, ...]:
    """Returns the cells of a loop of which a pass is `listed` rows for `heads` heads, as `HEAD` names them."""
    groups, passes = warps / counts.WARPS, _SIDE / heads * _SIDE / listed
    work = counts.work(path)
    copied = sum(counts.global_bytes(i) for i in path if i.op.startswith("LDGSTS")) * counts.WARPS
    fetched = listed * row_bytes * passes
    products = sum(map(loops.is_product, path)) * warps * passes
    port = (work.operand_bytes + work.shared_bytes + copied) / assumed("shared memory")
    exp2 = work.exp2 * assumed("exp2 per warp")
    of_groups = (each * groups * passes for each in (work.tensor_cycles, port, work.instructions, exp2))
    return (products, fetched / 1024, *of_groups, fetched / assumed("L2 to multiprocessor"))
