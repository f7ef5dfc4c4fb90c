"""Reads slices of arrays from safetensors files, into the array or through a few MiB of scratch for conversion.

`CheckpointReader.read` fills any boxes of a `PlannedArray` with several threads, and reads each block of a tensor once
for all of them. Beyond the destinations it needs at most two `BLOCK_BYTES` of memory per thread, seven if values are
converted.
"""

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dsv3.checkpoint.layout import Box, TensorSlice, blocks, extents, full_box, intersection, shift_box, whole_slice
from dsv3.checkpoint.load_plan import PlannedArray
from dsv3.checkpoint.safetensors_file import CheckpointError, Tensor, unusable_array
from dsv3.checkpoint.source import ALIGNMENT, Buffers, Source
from pallas_kernels.float8 import BLOCK, E4M3
from pallas_kernels.int4 import VALUES_PER_WORD, interleave

# Large enough that a read costs more than its bookkeeping, small enough that scratch does not count.
BLOCK_BYTES = 4 << 20
E8M0, _E8M0_NAN = np.dtype(ml_dtypes.float8_e8m0fnu), 255
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class BlockRead:
    """One contiguous block of a tensor; each part, a box relative to the block, is copied to a destination array."""

    array: PlannedArray
    tensor_slice: TensorSlice
    block: Box
    parts: tuple[tuple[Box, np.ndarray], ...]

    @property
    def tensor(self) -> Tensor:
        return self.array.tensors[self.tensor_slice.name]

    @property
    def first(self) -> int:
        """Elements of the tensor before the block."""
        view = self.tensor_slice.view
        return sum(s.start * math.prod(view[axis + 1 :]) for axis, s in enumerate(self.block))

    @property
    def direct(self) -> bool:
        """Whether the block can be read without conversion into a single destination."""
        out = self.parts[0][1]
        whole = len(self.parts) == 1 and out.size == math.prod(extents(self.block))
        same = self.tensor.dtype == out.dtype and self.tensor_slice.scale is None and not self.tensor.repeated
        same = same and not self.tensor_slice.packed
        return whole and same and out.flags.c_contiguous


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array at an address divisible by 4,096.

    JAX's CPU backend adopts it without a copy (alignment of 64 or more), and direct reads need it. numpy allocates huge
    pages: a load's processor time is mostly the kernel's first touch of new pages, and 4 KiB pages are 512 times as
    many.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def reads(array: PlannedArray, wanted: Iterable[tuple[Box, np.ndarray]]) -> Iterator[BlockRead]:
    """Plans the reads that fill the array of each pair with `array[box]`; each block is read once."""
    found: dict[tuple[str, int], tuple[TensorSlice, Box, list[tuple[Box, np.ndarray]]]] = {}
    for box, out in wanted:
        for tensor_slice, target in array.slices_in(box):
            to_out = tuple(
                t - v - b.start
                for t, v, b in zip(_starts(tensor_slice.target), _starts(tensor_slice.source), box, strict=True)
            )
            for number, block, part in _blocks_of(array, tensor_slice, target):
                _, _, parts = found.setdefault((tensor_slice.name, number), (tensor_slice, block, []))
                parts.append((shift_box(part, tuple(-s.start for s in block)), out[shift_box(part, to_out)]))
    for tensor_slice, block, parts in found.values():
        yield BlockRead(array, tensor_slice, block, tuple(parts))


def _blocks_of(array: PlannedArray, tensor_slice: TensorSlice, target: Box) -> Iterator[tuple[int, Box, Box]]:
    """Yields the blocks of a slice's tensor that fill `target` of the array: number, box, and the part of it."""
    tensor = array.tensors[tensor_slice.name]
    inside = shift_box(
        target, tuple(t - p for t, p in zip(_starts(tensor_slice.source), _starts(tensor_slice.target), strict=True))
    )
    for number, block in blocks(tensor_slice.view, tensor.dtype.itemsize, inside, BLOCK_BYTES):
        part = intersection(block, inside)
        assert part is not None
        yield number, block, part


def _starts(box: Box) -> tuple[int, ...]:
    return tuple(s.start for s in box)


def group_reads(array: PlannedArray, boxes: Sequence[Box], limit: int) -> list[list[Box]]:
    """Groups boxes of an array that need the same blocks, in groups of at most `limit` bytes."""
    groups: list[tuple[set[tuple[str, int]], list[Box]]] = []
    for box in boxes:
        needed = {
            (tensor_slice.name, n)
            for tensor_slice, target in array.slices_in(box)
            for n, _, _ in _blocks_of(array, tensor_slice, target)
        }
        overlapping = [group for group in groups if not needed.isdisjoint(group[0])]
        together = [*(each for _, members in overlapping for each in members), box]
        if sum(math.prod(extents(each)) for each in together) * array.dtype.itemsize > limit:
            overlapping, together = [], [box]
        groups = [group for group in groups if group not in overlapping]
        groups.append((needed.union(*(blocks_of for blocks_of, _ in overlapping)), together))
    return [members for _, members in groups]


def dequantize(data: np.ndarray, scale: np.ndarray, first_row: int, matrix_rows: int) -> np.ndarray:
    """Returns float32 values of FP8 rows `data`, uint8 [rows, K], which begin at `first_row` of a stack of matrices.

    `scale`, float32 [..., ceil(matrix_rows / 128), ceil(K / 128)], has one factor per 128 x 128 values of the whole
    stack.
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


class ArraySource:
    """An array in memory, in place of a file that begins with its bytes.

    Bytes that are on another device are copied to host memory for a read, and stay there until the last `release`.
    """

    is_direct = False

    def __init__(self, array: Any) -> None:
        self._array = array
        self._copied: np.ndarray | None = None
        self._num_holds = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Does nothing: the array belongs to the caller."""

    def hold(self) -> None:
        """Keeps what a later read copies to host memory."""
        with self._lock:
            self._num_holds += 1

    def release(self) -> None:
        """Ends a `hold`; the last one frees the copy."""
        with self._lock:
            self._num_holds -= 1
            if not self._num_holds:
                self._copied = None

    def read(self, start: int, out: np.ndarray) -> int:
        """Fills `out`, uint8 [n], from byte `start` on; returns the number of bytes read."""
        with self._lock:
            copied = _bytes_on_host(self._array) if self._copied is None else self._copied
            self._copied = copied if self._num_holds else None
        found = copied[start : start + out.size]
        out[: found.size] = found
        return found.size


def _bytes_on_host(array: Any) -> np.ndarray:
    """Returns the bytes of an array, uint8 [n], without a copy if they are in host memory and contiguous."""
    if isinstance(array, jax.Array):
        # jax keeps the copy with the array that was asked for it: ask a new one, in the same memory of the devices.
        shards = [shard.data for shard in array.addressable_shards]
        array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class PendingReads:
    """The reads of one call of `CheckpointReader.start_read`."""

    def __init__(self, futures: Sequence[Future[int]], advance: Callable[[int], None]) -> None:
        self._futures = futures
        self._advance = advance

    def wait(self) -> None:
        """Waits for all reads. On an error it cancels the rest and raises as `CheckpointReader.read`."""
        try:
            for future in as_completed(self._futures):
                self._advance(future.result())
        finally:
            for future in self._futures:
                future.cancel()


class CheckpointReader:
    """Open files of one checkpoint and the threads that read them; a context manager.

    `arrays` in memory are read in place of the files of these paths.
    """

    def __init__(self, threads: int = 8, arrays: Mapping[Path, Any] = MappingProxyType({})) -> None:
        self._stack = ExitStack()
        self._arrays, self._sources = arrays, dict[Path, Source | ArraySource]()
        self._buffers = Buffers(BLOCK_BYTES)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint")
        self._scratch = Buffers(BLOCK_BYTES)

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._stack.close()

    def open(self, paths: Iterable[Path]) -> None:
        """Opens files that are not open yet; not thread-safe, call it before reads of these files."""
        for path in dict.fromkeys(paths).keys() - self._sources.keys():
            try:
                array = self._arrays.get(path)
                if array is not None and (why := unusable_array(array)):  # it may have been deleted since the plan
                    raise CheckpointError(f"{path.parent} {why}")
                self._sources[path] = Source(path, self._buffers) if array is None else ArraySource(array)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
            self._stack.callback(self._sources[path].close)

    def read(
        self, array: PlannedArray, wanted: Iterable[tuple[Box, np.ndarray]], advance: Callable[[int], None]
    ) -> None:
        """Reads `array[box]` into the array of each pair; calls `advance` with the bytes of each read.

        Raises `CheckpointError` if a file ends early or a scale is not finite and above zero.
        """
        self.start_read(array, wanted, advance).wait()

    def start_read(
        self, array: PlannedArray, wanted: Iterable[tuple[Box, np.ndarray]], advance: Callable[[int], None]
    ) -> PendingReads:
        """Starts a `read`, which runs after those of earlier calls."""
        scales: dict[str, np.ndarray] = {}
        return self._submit(
            lambda read: self._execute(read, scales, self._scratch.own),
            list(reads(array, wanted)),
            lambda read: [read.tensor],
            advance,
        )

    def same_bytes(self, a: Tensor, b: Tensor, advance: Callable[[int], None]) -> bool:
        """Returns whether two tensors have the same dtype, shape and bytes."""
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

        self._submit(compare, range(0, a.nbytes, BLOCK_BYTES), lambda _: [a, b], advance).wait()
        return all(equal)

    def _submit[T](
        self,
        task: Callable[[T], int],
        items: Sequence[T],
        tensors_of: Callable[[T], Sequence[Tensor]],
        advance: Callable[[int], None],
    ) -> PendingReads:
        """Starts `task` for each item; a source keeps what it copies until the last item that reads its tensor."""

        def run(item: T) -> int:
            try:
                return task(item)
            finally:
                for tensor in tensors_of(item):
                    self._sources[tensor.path].release()

        for item in items:
            for tensor in tensors_of(item):
                self._sources[tensor.path].hold()
        return PendingReads([self._pool.submit(run, item) for item in items], advance)

    def _execute(self, read: BlockRead, scales: dict[str, np.ndarray], scratch: Callable[[int], np.ndarray]) -> int:
        tensor, shape, direct = read.tensor, extents(read.block), read.direct
        nbytes = math.prod(shape) * tensor.dtype.itemsize
        raw = read.parts[0][1].reshape(-1).view(np.uint8) if direct else scratch(nbytes)
        if tensor.repeated:
            self._read(tensor, 0, raw[: tensor.dtype.itemsize])
            raw.view(tensor.dtype)[:] = raw.view(tensor.dtype)[0]
        else:
            self._read(tensor, read.first * tensor.dtype.itemsize, raw)
        values = raw.view(tensor.dtype) if direct else self._values(read, raw, scales)
        if read.array.below is not None:
            _check_below(tensor, values, read.first, read.array.below)
        if not direct:
            values = values.reshape(shape)
            for inner, out in read.parts:
                out[...] = values[inner]
        if read.array.positive:
            for _, out in read.parts:
                _check_positive(tensor, out)
        return sum(out.size for _, out in read.parts) * tensor.dtype.itemsize

    def _values(self, read: BlockRead, raw: np.ndarray, scales: dict[str, np.ndarray]) -> np.ndarray:
        tensor, scale = read.tensor, read.tensor_slice.scale
        if read.tensor_slice.packed:
            self._check_stated_shape(read)
            return interleave(raw.view(tensor.dtype).reshape(-1, tensor.shape[-1]))
        if scale is None:
            return raw.view(tensor.dtype)
        rows, K = tensor.shape[-2:]
        return dequantize(raw.reshape(-1, K), self._scale(read.array, scale, scales), read.first // K, rows)

    def _check_stated_shape(self, read: BlockRead) -> None:
        """Checks the stated shape of a packed matrix against the shape of its words, once per matrix."""
        stated = read.array.stated_shape(read.tensor_slice)
        if stated is None or read.first:
            return
        found = np.empty(stated.shape, stated.dtype)
        self._read(stated, 0, found.view(np.uint8))
        rows, width = read.tensor.shape
        if found.tolist() != [rows, width * VALUES_PER_WORD]:
            raise CheckpointError(
                f"{stated.path}: tensor {stated.name}: is {found.tolist()}, but {read.tensor.name} holds "
                f"{[rows, width * VALUES_PER_WORD]}"
            )

    def _scale(self, array: PlannedArray, name: str, scales: dict[str, np.ndarray]) -> np.ndarray:
        """Returns all scales of tensor `name`, cached in `scales` for one call of `read` (1 byte per 4,096 of FP8)."""
        if name not in scales:
            shape = array.tensors[name].shape
            out = np.empty(shape, np.float32)
            wanted = PlannedArray(name, shape, out.dtype, (whole_slice(name, shape),), array.tensors, positive=True)
            for read in reads(wanted, [(full_box(shape), out)]):
                # Not the thread's scratch, which holds the values to scale.
                self._execute(read, {}, lambda nbytes: np.empty(nbytes, np.uint8))
            scales[name] = out
        return scales[name]

    def _read(self, tensor: Tensor, start: int, out: np.ndarray) -> None:
        """Fills `out`, uint8 [n], with the tensor's bytes from byte `start` on."""
        try:
            read = self._sources[tensor.path].read(tensor.offset + start, out)
        except OSError as error:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name}: {error.strerror}") from error
        if read < out.size:
            raise CheckpointError(f"{tensor.path}: tensor {tensor.name}: the file was truncated while it was read")


def _check_positive(tensor: Tensor, values: np.ndarray) -> None:
    if values.dtype == E8M0:  # powers of two, or not a number; numpy's predicates do not understand it
        good = values.view(np.uint8) != _E8M0_NAN
    else:
        least = values > 0 if values.dtype == np.float32 else values >= 0  # INT4 values of 0 may have a scale of 0
        good = np.isfinite(values) & least
    if not good.all():
        where = tuple(int(i) for i in np.argwhere(~good)[0])
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name}: a block scale is {values[where]}, not a positive finite number"
        )


def _check_below(tensor: Tensor, values: np.ndarray, first: int, below: int) -> None:
    """Checks values before they are converted, which would cut off bits; `first` of the tensor's lie before them."""
    wrong = np.flatnonzero((values < 0) | (values >= below))
    if len(wrong):
        where = [int(i) for i in np.unravel_index(first + wrong[0], tensor.shape)]
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name}: has {values.reshape(-1)[wrong[0]]} at {where}, but must be 0 to "
            f"{below - 1}; check n_routed_experts in config.json, or fetch the file again"
        )
