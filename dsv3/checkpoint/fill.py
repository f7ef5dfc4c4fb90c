"""Reads boxes of arrays from files: bytes go straight to their place, or through a few MiB of scratch to be converted.

An `Array` is one array to be built (a stack, or the scales of one). Its `Source`s say which part of which tensor in
which file fills which box. `Files.fill` reads any box of it with several threads, each block of a tensor once; memory
beyond the destination is bounded by the number of threads times `BLOCK_BYTES`, times six where values are converted.
"""

import dataclasses
import functools
import itertools
import math
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from dsv3.checkpoint.checksum import checksum
from dsv3.checkpoint.errors import CheckpointError
from dsv3.checkpoint.layout import Box, full_box
from dsv3.checkpoint.safetensors_file import Tensor
from pallas_kernels.float8 import BLOCK, E4M3

# Large enough that a read costs more than its bookkeeping, small enough that scratch does not count.
BLOCK_BYTES = 4 << 20
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Source:
    """Tensor `tensor`, seen under shape `view`, whose box `take` fills the box `put` of an array.

    `scale`: block scales to multiply (the tensor is FP8). `checksums`: of the blocks of `view`, in order, which
    are `block_bytes` at most.
    """

    tensor: Tensor
    view: tuple[int, ...]
    take: Box
    put: Box
    scale: "Source | None" = None
    checksums: tuple[int, ...] | None = None
    block_bytes: int = BLOCK_BYTES


@dataclasses.dataclass(frozen=True)
class Array:
    """One array to be read. Its sources tile it, or what this process needs of it; several belong to one index of the
    first axis each, and are ordered by it, then by where they begin and end on the second axis.

    `positive`: the array holds scales, which must be finite and above zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: tuple[Source, ...]
    positive: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_to_read(self, box: Box) -> int:
        """Bytes in files behind a box, those of scales to multiply not counted."""
        return sum(source.tensor.dtype.itemsize * math.prod(extents(part)) for source, part in self.meeting(box))

    def meeting(self, box: Box) -> Iterator[tuple[Source, Box]]:
        """Sources that fill some of a box, each with the part that it fills, which lies in the array's coordinates."""
        for source in self._near(box):
            if (part := intersection(source.put, box)) is not None:
                yield source, part

    def _near(self, box: Box) -> Iterator[Source]:
        """Sources whose extents on the first two axes meet the box: an expert's share has thousands beside them."""
        if len(self.sources) == 1:
            yield self.sources[0]
            return
        starts, stops = self._order
        for i in range(box[0].start, box[0].stop):
            yield from self.sources[bisect_right(stops, (i, box[1].start)) : bisect_left(starts, (i, box[1].stop))]

    @functools.cached_property
    def _order(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Where the sources begin, and where they end, on the second axis, each after their index of the first."""
        boxes = [source.put for source in self.sources]
        return [(b[0].start, b[1].start) for b in boxes], [(b[0].start, b[1].stop) for b in boxes]


@dataclasses.dataclass(frozen=True)
class Read:
    """One contiguous block of a source, of which each part `inner` (relative to the block) goes to an `out`."""

    source: Source
    number: int
    block: Box
    parts: tuple[tuple[Box, np.ndarray], ...]
    positive: bool

    @property
    def first(self) -> int:
        """Elements of the tensor before the block."""
        view = self.source.view
        return sum(s.start * math.prod(view[axis + 1 :]) for axis, s in enumerate(self.block))

    @property
    def direct(self) -> bool:
        """Whether the block's bytes are the bytes of its one destination."""
        out = self.parts[0][1]
        whole = len(self.parts) == 1 and out.size == math.prod(extents(self.block))
        same = self.source.tensor.dtype == out.dtype and self.source.scale is None
        return whole and same and out.flags.c_contiguous


def extents(box: Box) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(s.stop - s.start for s in box)


def split(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, int]:
    """Axis and count such that `count` indices of that axis, all before it fixed, are contiguous and within `limit`."""
    for axis in range(len(shape)):
        unit = math.prod(shape[axis + 1 :]) * itemsize
        if unit <= limit:
            return axis, max(1, min(shape[axis], limit // unit))
    raise ValueError(f"no block of {limit} bytes fits an array of shape {shape} with {itemsize}-byte elements")


def blocks(shape: tuple[int, ...], itemsize: int, inside: Box, limit: int) -> Iterator[tuple[int, Box]]:
    """Number and box of the contiguous blocks that partition an array, those that meet the box `inside` only."""
    yield from grid(shape, *split(shape, itemsize, limit), inside)


def grid(shape: tuple[int, ...], axis: int, count: int, inside: Box) -> Iterator[tuple[int, Box]]:
    """Number and box of the blocks of `count` indices of an axis, all axes before it fixed, that meet `inside`."""
    per_prefix = -(-shape[axis] // count)
    for prefix in itertools.product(*(range(s.start, s.stop) for s in inside[:axis])):
        before = sum(i * math.prod(shape[a + 1 : axis]) for a, i in enumerate(prefix)) * per_prefix
        fixed = tuple(slice(i, i + 1) for i in prefix)
        for j in range(inside[axis].start // count, -(-inside[axis].stop // count)):
            here = slice(j * count, min((j + 1) * count, shape[axis]))
            yield before + j, (*fixed, here, *full_box(shape[axis + 1 :]))


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised array that JAX's CPU backend adopts without a copy, which takes an address divisible by 64.

    Memory comes from numpy because it asks the kernel for huge pages: first touches of 4 KiB pages took three times as
    long as the reads themselves.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def reads(array: Array, box: Box, out: np.ndarray) -> Iterator[Read]:
    """The reads that fill `out` with `array[box]`, each block of a tensor once: it may go to several places."""
    found: dict[tuple[Tensor, int], Read] = {}
    for source, want in array.meeting(box):
        to_view = tuple(t.start - p.start for t, p in zip(source.take, source.put, strict=True))
        to_out = tuple(-v - b.start for v, b in zip(to_view, box, strict=True))
        inside = moved(want, to_view)
        for number, block in blocks(source.view, source.tensor.dtype.itemsize, inside, source.block_bytes):
            part = intersection(block, inside)
            assert part is not None
            place = moved(part, tuple(-s.start for s in block)), out[moved(part, to_out)]
            known = found.get((source.tensor, number))
            parts = (place,) if known is None else (*known.parts, place)
            found[source.tensor, number] = Read(source, number, block, parts, array.positive)
    yield from found.values()


def intersection(a: Box, b: Box) -> Box | None:
    """Box that two boxes share."""
    box = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return box if all(s.start < s.stop for s in box) else None


def moved(box: Box, by: tuple[int, ...]) -> Box:
    """The box, each axis shifted."""
    return tuple(slice(s.start + d, s.stop + d) for s, d in zip(box, by, strict=True))


def dequantise(data: np.ndarray, scale: np.ndarray, first_row: int, matrix_rows: int) -> np.ndarray:
    """float32 values of FP8 rows `data` [rows, K] uint8, which begin at `first_row` of a stack of matrices.

    `scale` float32 [..., ceil(matrix_rows / 128), ceil(K / 128)] belongs to the whole stack and is multiplied.
    """
    rows, K = data.shape
    block_rows = scale.shape[-2]
    scale = scale.reshape(-1, scale.shape[-1])
    values = np.empty((rows, K), np.float32)
    row = first_row
    while row < first_row + rows:
        matrix, inner = divmod(row, matrix_rows)
        end = min(row - inner % BLOCK + BLOCK, (matrix + 1) * matrix_rows, first_row + rows)
        here = slice(row - first_row, end - first_row)
        columns = np.repeat(scale[matrix * block_rows + inner // BLOCK], BLOCK)[:K]
        np.multiply(np.take(_E4M3_VALUES, data[here]), columns, out=values[here])
        row = end
    return values


class Files:
    """Open files and the threads that read them; a context manager."""

    def __init__(self, threads: int = 8) -> None:
        self._stack = ExitStack()
        self._descriptors: dict[Path, int] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint")
        self._scales: dict[Tensor, np.ndarray] = {}
        self._scratch = threading.local()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._stack.close()

    def open(self, paths: Iterable[Path]) -> None:
        """Opens files that are not open yet, before they are read; from one thread."""
        for path in dict.fromkeys(paths).keys() - self._descriptors.keys():
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
            self._stack.callback(os.close, self._descriptors[path])

    def fill(self, array: Array, box: Box, out: np.ndarray, advance: Callable[[int], None]) -> None:
        """Reads `array[box]` into `out`; `advance` is told the bytes of `Array.bytes_to_read` as they come.

        Raises `CheckpointError` for a file that ended early, a wrong checksum, or a scale that is not above zero.
        """
        self._run(lambda read: self._execute(read, self._own_scratch), reads(array, box, out), advance)
        self._scales.clear()

    def same_bytes(self, a: Tensor, b: Tensor, advance: Callable[[int], None]) -> bool:
        """Whether two tensors hold the same values in the same type."""
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        equal: list[bool] = []

        def compare(start: int) -> int:
            n = min(BLOCK_BYTES, a.nbytes - start)
            ours, theirs = np.empty(n, np.uint8), np.empty(n, np.uint8)
            self._read(a, start, ours)
            self._read(b, start, theirs)
            equal.append(np.array_equal(ours, theirs))
            return 2 * n

        self._run(compare, range(0, a.nbytes, BLOCK_BYTES), advance)
        return all(equal)

    def _run[T](self, task: Callable[[T], int], items: Iterable[T], advance: Callable[[int], None]) -> None:
        futures = [self._pool.submit(task, item) for item in items]
        try:
            for future in as_completed(futures):
                advance(future.result())
        finally:
            for future in futures:
                future.cancel()

    def _own_scratch(self, nbytes: int) -> np.ndarray:
        """The thread's scratch, reused: new memory would be touched for the first time, and kept by the allocator."""
        if getattr(self._scratch, "buffer", np.empty(0)).nbytes < nbytes:
            self._scratch.buffer = np.empty(nbytes, np.uint8)
        return self._scratch.buffer[:nbytes]

    def _execute(self, read: Read, scratch: Callable[[int], np.ndarray]) -> int:
        source, tensor = read.source, read.source.tensor
        shape = extents(read.block)
        direct = read.direct
        nbytes = math.prod(shape) * tensor.dtype.itemsize
        raw = read.parts[0][1].reshape(-1).view(np.uint8) if direct else scratch(nbytes)
        self._read(tensor, read.first * tensor.dtype.itemsize, raw)
        if source.checksums is not None and checksum(raw) != source.checksums[read.number]:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name}: block {read.number} has a wrong checksum")
        if not direct:
            values = self._values(read, raw).reshape(shape)
            for inner, out in read.parts:
                out[...] = values[inner]
        if read.positive:
            for _, out in read.parts:
                _check_positive(tensor, out)
        return sum(out.size for _, out in read.parts) * tensor.dtype.itemsize

    def _values(self, read: Read, raw: np.ndarray) -> np.ndarray:
        source, tensor = read.source, read.source.tensor
        if source.scale is None:
            return raw.view(tensor.dtype)
        rows, K = tensor.shape[-2:]
        return dequantise(raw.reshape(-1, K), self._scale(source.scale), read.first // K, rows)

    def _scale(self, source: Source) -> np.ndarray:
        """All scales of a tensor, kept until the end of the current fill (one part in 4,096 of the FP8 bytes)."""
        if source.tensor not in self._scales:
            array = Array(source.tensor.name, source.view, np.dtype(np.float32), (source,), positive=True)
            out = np.empty(source.view, np.float32)
            for read in reads(array, full_box(source.view), out):
                self._execute(read, lambda nbytes: np.empty(nbytes, np.uint8))  # the thread's holds the values to scale
            self._scales[source.tensor] = out
        return self._scales[source.tensor]

    def _read(self, tensor: Tensor, start: int, out: np.ndarray) -> None:
        """Fills `out` (uint8) with the tensor's bytes from `start` on."""
        descriptor, done, view = self._descriptors[tensor.path], 0, memoryview(out)
        while done < len(view):
            try:
                n = os.preadv(descriptor, [view[done:]], tensor.offset + start + done)
            except OSError as error:
                raise CheckpointError(f"{tensor.path}: tensor {tensor.name}: {error.strerror}") from error
            if n == 0:
                raise CheckpointError(f"{tensor.path}: tensor {tensor.name}: the file ended while it was read")
            done += n


def _check_positive(tensor: Tensor, values: np.ndarray) -> None:
    good = np.isfinite(values) & (values > 0)
    if not good.all():
        where = tuple(int(i) for i in np.argwhere(~good)[0])
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name}: a block scale is {values[where]}, not a positive finite number"
        )
