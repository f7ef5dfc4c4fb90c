"""What a loop asks of each resource of a multiprocessor."""

import dataclasses
import re
from collections.abc import Sequence

from benchmarks.gpu.sass.disassembly import Instruction
from benchmarks.gpu.sass.loops import is_product

_SHAPE = re.compile(r"\.64x(\d+)x\d+")
_STEP_BYTES = 32
"""Bytes along K of one wgmma: 16 values of 16 bits or 32 of 8."""
_ROWS = 64
_OF_A_WARP = "HMMA.16816"
"""16 x 8 values of K 16, all operands in registers."""
WARPS = 4
"""Warps of a warpgroup, each on a sub-partition of its own."""
_GLOBAL = re.compile(r"LDG|LD\.|STG|ATOM|RED")


@dataclasses.dataclass(frozen=True)
class Work:
    """One warp's pass through a loop, or several added up.

    Attributes:
      instructions: issued by the warp.
      exp2: of these, exponentials.
      tensor_cycles: of the tensor core, for the warpgroup's products.
      operand_bytes: shared memory that the warpgroup's products read.
      shared_bytes: what the four warps load from shared memory and store to it otherwise.
      global_bytes: what the four warps load from global memory to registers.
    """

    instructions: int
    exp2: int
    tensor_cycles: float
    operand_bytes: int
    shared_bytes: int
    global_bytes: int

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def work(path: Sequence[Instruction]) -> Work:
    """Adds up one pass along a path."""
    products = list(filter(is_product, path))
    return Work(
        instructions=len(path),
        exp2=sum(instruction.op.startswith("MUFU") for instruction in path),
        tensor_cycles=sum(map(tensor_cycles, products)),
        operand_bytes=sum(map(_operand_bytes, products)),
        shared_bytes=WARPS * sum(map(_shared_bytes, path)),
        global_bytes=WARPS * sum(map(global_bytes, filter(is_global, path))),
    )


def is_global(instruction: Instruction) -> bool:
    """Whether this reads or writes global memory from registers."""
    return _GLOBAL.match(instruction.op) is not None


def columns(product: Instruction) -> int:
    """Returns N of a wgmma."""
    shape = _SHAPE.search(product.op)
    if shape is None:
        raise ValueError(f"no shape in the opcode {product.op!r}")
    return int(shape[1])


def tensor_cycles(product: Instruction) -> float:
    """Returns the cycles that a product of four warps keeps the tensor cores.

    64 x N values of K 16 (8 bits: 32) take N / 2 in a wgmma. For the products of single warps, which do not reach that
    rate on Hopper, it is assumed too.
    """
    return 4.0 if product.op.startswith(_OF_A_WARP) else columns(product) / 2


def left_in_registers(product: Instruction) -> bool:
    """Whether the left operand comes from registers; else it is a descriptor of shared memory."""
    return re.match(r"R\d+, R\d+", product.args) is not None


def _operand_bytes(product: Instruction) -> int:
    if product.op.startswith(_OF_A_WARP):
        return 0
    return (columns(product) + (0 if left_in_registers(product) else _ROWS)) * _STEP_BYTES


def global_bytes(instruction: Instruction) -> int:
    """Returns the bytes that a warp's load from global memory brings.

    Lanes that load 4 bytes read page numbers and scales, many the same: that is taken to be one sector.
    """
    return 32 * next((size // 8 for size in (128, 64) if f".{size}" in instruction.op), 1)


def _shared_bytes(instruction: Instruction) -> int:
    """Counts the bytes that a warp's load or store moves; a matrix store of x4 moves 512."""
    op = instruction.op
    if op.startswith(("STSM", "LDSM")):
        return 128 * next((n for n in (4, 2) if f".{n}" in op or f"x{n}" in op), 1)
    if op.startswith(("LDS", "STS")):
        return 32 * next((size // 8 for size in (128, 64) if f".{size}" in op), 4)
    return 0
