"""Runs a compiled kernel's PTX on this machine: a block of straight-line code on integers, all threads at once.

It shows which value each thread of a GPU would hold, and where it would store it; the interpreter of jax knows no
threads. A register is a numpy array with an element per thread. An instruction that is not listed raises KeyError.
"""

import re
from collections.abc import Callable

import numpy as np

_IGNORED = re.compile(r"//|\.|\$|elect\.sync|fence\.|bar\.sync|cp\.async\.(commit|wait)")
"""Labels, and how threads wait for each other: here an instruction ends in all threads before the next begins."""
_BUFFER = 40
"""An address is a buffer's number at this bit, and bytes from its start."""


def _bytes_selected(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Does `prmt`: nibble i of the selector names byte i of the result. One above 7 would replicate a sign."""
    both, nibbles = low | high << 32, [selector >> 4 * i & 15 for i in range(4)]
    assert max(nibble.max() for nibble in nibbles) < 8
    return sum(((both >> 8 * nibble & 255) << 8 * i for i, nibble in enumerate(nibbles)), np.zeros_like(both))


def _upper_half(a: np.ndarray) -> np.ndarray:
    """Returns the bfloat16 of a float32 that it has room for."""
    assert not (a % 2**16).any()
    return a >> 16


def _signed(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.uint32).view(np.int32).astype(np.int64)


_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add.s32": np.add,
    "add.s64": np.add,
    "and.b32": np.bitwise_and,
    "cvt.rn.bf16.f32": _upper_half,
    "cvt.u64.u32": np.asarray,
    "bfe.u32": lambda a, first, count: a >> first & (1 << count) - 1,
    "cvta.to.global.u64": np.asarray,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "mov.u32": np.asarray,
    "mul.wide.u16": np.multiply,
    "mul.wide.s32": lambda a, b: (_signed(a) * _signed(b)).astype(np.uint64),
    "mul.wide.u32": np.multiply,
    "not.b32": np.bitwise_not,
    "or.b32": np.bitwise_or,
    "prmt.b32": _bytes_selected,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
    "selp.b64": lambda a, b, p: np.where(p, a, b),
    "setp.eq.b32": np.equal,
    "setp.lt.s32": lambda a, b: _signed(a) < _signed(b),
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "xor.b32": np.bitwise_xor,
}


def run(ptx: str, threads: int, buffers: tuple[np.ndarray, ...], shared_words: int = 0) -> None:
    """Runs a kernel of `threads` threads whose parameters point to `buffers`; writes them in place.

    A block may have shared memory, of which bytes that nobody has written are 255.
    """
    memory = [buffer.reshape(-1).view(np.uint8) for buffer in buffers]
    memory.append(np.full(4 * shared_words, 255, np.uint8))
    registers = {"%tid.x": np.arange(threads, dtype=np.uint64)}

    def address_of(name: str) -> np.ndarray:
        """Returns the address of shared memory, or of what a parameter points to, in all threads."""
        number = int(name.rsplit("_", 1)[1]) if "param" in name else len(buffers)
        return np.full(threads, number << _BUFFER, np.uint64)

    def value(operand: str) -> np.ndarray:
        return registers[operand] if operand.startswith("%") else np.uint64(int(operand, 0) % 2**32)

    def place(operand: str) -> tuple[np.ndarray, np.ndarray]:
        base, _, offset = operand.strip("[]").partition("+")
        address = registers[base] + np.uint64(offset or 0)
        return (address >> _BUFFER).astype(int), (address % 2**_BUFFER).astype(int)

    def load(number: np.ndarray, first: np.ndarray, size: int) -> np.ndarray:
        found = np.zeros(threads, np.uint64)
        for buffer in np.unique(number):
            of = number == buffer
            read = memory[buffer][first[of][:, None] + np.arange(size)].astype(np.uint64)
            found[of] = (read << np.arange(0, 8 * size, 8, dtype=np.uint64)).sum(1, dtype=np.uint64)
        return found

    def store(number: np.ndarray, first: np.ndarray, size: int, values: np.ndarray) -> None:
        for buffer in np.unique(number):
            of = number == buffer
            split = np.broadcast_to(values, threads)[of][:, None] >> np.arange(0, 8 * size, 8, dtype=np.uint64)
            memory[buffer][first[of][:, None] + np.arange(size)] = split % 256

    for line in ptx[ptx.index("{", ptx.index(".entry")) + 1 : ptx.index("ret;")].split("\n"):
        name, *operands = re.sub(r"[,;{}]", " ", line).split() or ["//"]
        if _IGNORED.match(name):
            continue
        if name.startswith("ld.param") or name == "mov.b64":
            source = operands[1].strip("[]")
            registers[operands[0]] = registers[source] if source.startswith("%") else address_of(source)
        elif name.startswith("ld."):
            (number, first), size = place(operands.pop()), int(name[-2:].strip("bus")) // 8
            for i, register in enumerate(operands):
                registers[register] = load(number, first + size * i, size)
        elif name.startswith("st."):
            (number, first), size = place(operands.pop(0)), int(name[-2:].strip("bus")) // 8
            for i, operand in enumerate(operands):
                store(number, first + size * i, size, value(operand))
        elif name == "mov.b32":
            if "{" in line.partition(",")[2]:  # of two halves; what others write is not read
                registers[operands[0]] = value(operands[1]) | value(operands[2]) << 16
        elif name == "shfl.sync.idx.b32":
            lanes = np.arange(threads)
            segment = int(value(operands[3])) >> 8  # bits of a lane's number that its source shares
            registers[operands[0]] = np.broadcast_to(value(operands[1]), threads)[
                lanes & ~31 | lanes & segment | int(value(operands[2])) & ~segment & 31
            ]
        elif name.startswith("cp.async"):
            for to, start, index, first, size in zip(
                *place(operands[0]), *place(operands[1]), value(operands[3]), strict=True
            ):
                memory[to][start : start + int(operands[2])] = 0
                memory[to][start : start + int(size)] = memory[index][first : first + int(size)]
        else:
            found = _OPERATIONS[name](*map(value, operands[1:]))
            whole = found.dtype == bool or "64" in name or "wide" in name
            registers[operands[0]] = found if whole else found % 2**32
