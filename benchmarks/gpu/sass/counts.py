"""What a loop consists of: instructions by class, and what they ask of each resource of a multiprocessor."""

import collections
import dataclasses
import re
from collections.abc import Sequence

from benchmarks.gpu.sass.disassembly import Instruction
from benchmarks.gpu.sass.loops import is_product

CLASSES = (
    ("wgmma", r"[HQI]GMMA"),
    ("mma", r"HMMA"),
    ("exp2", r"MUFU"),
    ("FFMA", r"FFMA"),
    ("FMUL", r"FMUL"),
    ("FADD", r"FADD"),
    ("max", r"FMNMX"),
    ("convert", r"F2F|HADD2\.F32|I2F|F2I"),
    ("half", r"H(FMA|MUL|ADD|MNMX)2"),
    ("select", r"FSEL|FSET|SEL"),
    ("shuffle", r"SHFL|VOTE|ELECT"),
    ("matrix store", r"STSM"),
    ("shared", r"LDS|STS|LDSM"),
    ("global", r"LDG|LD\.|STG|ATOM|RED"),
    ("constant", r"LDC|ULDC"),
    ("spill", r"LDL|STL"),
    ("TMA", r"UTMA|UBLKCP"),
    ("mbarrier", r"SYNCS"),
    ("fence", r"BAR|MEMBAR|FENCE|ERRBAR|CCTL"),
    ("warpgroup", r"WARPGROUP|WARPSYNC|DEPBAR"),
    ("branch", r"BRA|EXIT|RET|CALL|BRX|BSSY|BSYNC|NANOSLEEP|YIELD"),
    ("uniform", r"U[A-Z]|R2UR|S2UR"),
    ("move", r"MOV|IMAD\.MOV|CS2R"),
    ("integer", r"I[A-Z]|LOP|SHF|LEA|PRMT|PLOP|VI|SGXT|P2R|R2P|S2R|BREV|FLO|POPC|NOP"),
)
"""Classes in the order in which they are tried; what fits none is `other`."""
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in CLASSES)

_SHAPE = re.compile(r"\.64x(\d+)x(\d+)")
_STEP_BYTES = 32
"""Bytes along K of one wgmma: 16 values of 16 bits or 32 of 8."""
_ROWS = 64
_OF_A_WARP = "HMMA.16816"
"""16 x 8 values of K 16, all operands in registers."""
WARPS = 4
"""Warps of a warpgroup, each on a sub-partition of its own."""


def class_of(instruction: Instruction) -> str:
    """Names the first class that the opcode fits."""
    return next((name for name, pattern in _PATTERNS if pattern.match(instruction.op)), "other")


@dataclasses.dataclass(frozen=True)
class Work:
    """One warp's pass through a loop, or several added up.

    Attributes:
      instructions: issued by the warp.
      stalls: sum of the stall counts that the assembler wrote: cycles it takes with nothing else to wait for.
      classes: instructions by class.
      tensor_cycles: of the tensor core, for the warpgroup's products.
      operand_bytes: shared memory that the warpgroup's products read.
      shared_bytes: what the four warps load from shared memory and store to it otherwise.
      global_bytes: what the four warps load from global memory to registers.
    """

    instructions: int
    stalls: int
    classes: dict[str, int]
    tensor_cycles: float
    operand_bytes: int
    shared_bytes: int
    global_bytes: int

    def __add__(self, other: "Work") -> "Work":
        both = collections.Counter(self.classes) + collections.Counter(other.classes)
        numbers = (getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)[3:])
        return Work(self.instructions + other.instructions, self.stalls + other.stalls, dict(both), *numbers)


def work(path: Sequence[Instruction]) -> Work:
    """Adds up one pass along a path."""
    return Work(
        instructions=len(path),
        stalls=sum(instruction.stall for instruction in path),
        classes=dict(collections.Counter(map(class_of, path))),
        tensor_cycles=sum(tensor_cycles(i) for i in path if is_product(i)),
        operand_bytes=sum(_operand_bytes(i) for i in path if is_product(i)),
        shared_bytes=WARPS * sum(_shared_bytes(i) for i in path),
        global_bytes=WARPS * sum(global_bytes(i) for i in path if class_of(i) == "global"),
    )


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
    left = 0 if left_in_registers(product) else _ROWS * _STEP_BYTES
    return left + columns(product) * _STEP_BYTES


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
