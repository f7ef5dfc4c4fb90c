"""What a loop asks of each resource of a multiprocessor, and what is assumed of these."""

import re
from collections.abc import Mapping, Sequence

from tools.sass.disassembly import SassInstruction
from tools.sass.loops import is_product, is_wait

_GUIDE = "CUDA programming guide, throughput of cc 9.0"
ASSUMPTIONS: Mapping[str, tuple[float, str, str]] = {
    "SHFL": (23, "cycles", "assumed"),
    "LDSM": (33, "cycles", "assumed"),
    "LDS": (29, "cycles", "assumed"),
    "STSM": (18, "cycles", "assumed"),
    "STS": (14, "cycles", "assumed"),
    "MUFU": (18, "cycles", "assumed"),
    "LDG": (280, "cycles", "assumed: a hit in the L2 cache, as pages asked for ahead are; 38 in the L1 cache"),
    "LDC": (30, "cycles", "assumed"),
    "MEMBAR": (30, "cycles", "assumed"),
    "FENCE": (30, "cycles", "assumed"),
    "R2UR": (12, "cycles", "assumed"),
    "UTMA": (20, "cycles", "assumed"),
    "other": (14, "cycles", "assumed: any other instruction with a scoreboard"),
    "operands read": (10, "cycles", "assumed: until an instruction's operands may be overwritten"),
    "barrier of a warpgroup": (20, "cycles", "assumed"),
    "mbarrier": (22, "cycles", "assumed: a successful try"),
    "wgmma drain": (30, "cycles", "assumed: from the last product to its result"),
    "producer": (60, "cycles", "assumed: from a stage's release to the TMA instruction"),
    "another block": (260, "cycles", "180 to 213 are published; and the producer of the other block"),
    "exp2 per warp": (8, "cycles", f"{_GUIDE}: 16 per cycle"),
    "shared memory": (128, "bytes per cycle", f"{_GUIDE}; one port for operands, TMA and stores"),
    "TMA latency": (700, "cycles", "calibrated with FlashMLA's published rate"),
    "L2 to multiprocessor": (40, "bytes per cycle", "as above; DeepGEMM's heuristic says 46.6"),
    "memory of an H200": (19.9, "bytes per cycle", "4.8 TB/s, 132 multiprocessors at 1.83 GHz"),
    "latency of memory": (900, "cycles", "assumed"),
}
"""What the model takes as given: value, unit and source. Names in capitals begin opcodes."""

_SHAPE = re.compile(r"\.64x(\d+)x\d+")
_STEP_BYTES = 32
"""Bytes along K of one wgmma: 16 values of 16 bits or 32 of 8."""
_ROWS = 64
_OF_A_WARP = "HMMA.16816"
"""16 x 8 values of K 16, all operands in registers."""
WARPS = 4
"""Warps of a warpgroup, each on a sub-partition of its own."""
_GLOBAL = re.compile(r"LDG|LD\.|STG|ATOM|RED")


def assumed(name: str) -> float:
    """Returns the value of an assumption."""
    return ASSUMPTIONS[name][0]


def resources(path: Sequence[SassInstruction]) -> dict[str, float]:
    """Returns the cycles that one pass of a warpgroup along a path takes of each resource at least."""
    products = list(filter(is_product, path))
    port = sum(map(_operand_bytes, products)) + WARPS * sum(map(_shared_bytes, path))
    return {
        "tensor core": sum(map(tensor_cycles, products)),
        "shared memory": port / assumed("shared memory"),
        "issue": len(path),
        "exp2": assumed("exp2 per warp") * sum(instruction.op.startswith("MUFU") for instruction in path),
    }


def is_global(instruction: SassInstruction) -> bool:
    """Returns whether this reads or writes global memory from registers."""
    return _GLOBAL.match(instruction.op) is not None


def columns(product: SassInstruction) -> int:
    """Returns N of a wgmma."""
    shape = _SHAPE.search(product.op)
    if shape is None:
        raise ValueError(f"no shape in the opcode {product.op!r}")
    return int(shape[1])


def tensor_cycles(product: SassInstruction) -> float:
    """Returns the cycles that a product of four warps keeps the tensor cores.

    64 x N values of K 16 (8 bits: 32) take N / 2 in a wgmma. For the products of single warps, which do not reach that
    rate on Hopper, it is assumed too.
    """
    return 4.0 if product.op.startswith(_OF_A_WARP) else columns(product) / 2


def left_in_registers(product: SassInstruction) -> bool:
    """Returns whether the left operand comes from registers; else it is a descriptor of shared memory."""
    return re.match(r"R\d+, R\d+", product.args) is not None


def _operand_bytes(product: SassInstruction) -> int:
    if product.op.startswith(_OF_A_WARP):
        return 0
    return (columns(product) + (0 if left_in_registers(product) else _ROWS)) * _STEP_BYTES


def global_bytes(instruction: SassInstruction) -> int:
    """Returns the bytes that a load of four warps from global memory brings.

    Lanes that load 4 bytes read page numbers and scales, many the same: that is taken to be one sector.
    """
    return WARPS * 32 * next((size // 8 for size in (128, 64) if f".{size}" in instruction.op), 1)


def _shared_bytes(instruction: SassInstruction) -> int:
    """Counts the bytes that a warp's load, store or copy moves; a matrix store of x4 moves 512."""
    op = instruction.op
    if op.startswith(("STSM", "LDSM")):
        return 128 * next((n for n in (4, 2) if f".{n}" in op or f"x{n}" in op), 1)
    if op.startswith("LDGSTS"):
        return global_bytes(instruction) // WARPS
    if op.startswith(("LDS", "STS")):
        return 32 * next((size // 8 for size in (128, 64) if f".{size}" in op), 4)
    return 0


def product_cycles(product: SassInstruction) -> float:
    """Returns the tensor core's cycles, or those of reading operands from shared memory where that takes longer."""
    n = columns(product)
    return tensor_cycles(product) if left_in_registers(product) else max(n / 2, 16 + n / 4)


def latency(instruction: SassInstruction) -> float:
    """Returns the cycles until an instruction's scoreboard is released, where nothing else is in the way."""
    name = "mbarrier" if is_wait(instruction) else "LDG" if is_global(instruction) else instruction.op
    return next((value for known, (value, _, _) in ASSUMPTIONS.items() if name.startswith(known)), assumed("other"))
