"""Runs a compiled kernel's PTX on this machine: a block of straight-line code on 32-bit integers, all threads at once.

It shows which value each thread of a GPU would hold, and where it would store it; the interpreter of jax knows no
threads. A register is a numpy array with an element per thread. An instruction that is not listed raises KeyError.
"""

import re
from collections.abc import Callable

import numpy as np

_IGNORED = re.compile(r"//|\.|\$|elect\.sync|shfl\.sync|fence\.|bar\.sync|mov\.b32")
"""Labels, and how threads wait for each other. No value of a block without shared memory depends on it."""
_BUFFER = 40
"""An address is a buffer's number at this bit, and bytes from its start."""


def _bytes_selected(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Does `prmt`: nibble i of the selector names byte i of the result. One above 7 would replicate a sign."""
    both, nibbles = low | high << 32, [selector >> 4 * i & 15 for i in range(4)]
    assert max(nibble.max() for nibble in nibbles) < 8
    return sum(((both >> 8 * nibble & 255) << 8 * i for i, nibble in enumerate(nibbles)), np.zeros_like(both))


_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add.s64": np.add,
    "and.b32": np.bitwise_and,
    "cvta.to.global.u64": np.asarray,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "mov.u32": np.asarray,
    "mul.wide.u32": np.multiply,
    "or.b32": np.bitwise_or,
    "prmt.b32": _bytes_selected,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
}


def run(ptx: str, threads: int, buffers: tuple[np.ndarray, ...]) -> None:
    """Runs a kernel of `threads` threads whose parameters point to `buffers`, of 32-bit words; writes them in place."""
    memory = [buffer.reshape(-1).view(np.uint32) for buffer in buffers]
    registers = {"%tid.x": np.arange(threads, dtype=np.uint64)}

    def value(operand: str) -> np.ndarray:
        return registers[operand] if operand.startswith("%") else np.uint64(int(operand) % 2**32)

    def place(operand: str) -> tuple[int, np.ndarray]:
        base, _, offset = operand.strip("[]").partition("+")
        address = registers[base] + np.uint64(offset or 0)
        return int(address[0] >> _BUFFER), (address % 2**_BUFFER // 4).astype(int)

    for line in ptx[ptx.index("{", ptx.index(".entry")) + 1 : ptx.index("ret;")].split("\n"):
        name, *operands = re.sub(r"[,;{}]", " ", line).split() or ["//"]
        if _IGNORED.match(name):
            continue
        if name.startswith("ld.param"):
            number = int(operands[1].strip("[]").rsplit("_", 1)[1])
            registers[operands[0]] = np.full(threads, number << _BUFFER, np.uint64)
        elif name.startswith("ld.global"):
            buffer, index = place(operands.pop())
            for i, register in enumerate(operands):
                registers[register] = memory[buffer][index + i].astype(np.uint64)
        elif name.startswith("st.global"):
            buffer, index = place(operands[0])
            memory[buffer][index] = value(operands[1])
        else:
            found = _OPERATIONS[name](*map(value, operands[1:]))
            registers[operands[0]] = found if "64" in name or "wide" in name else found % 2**32
