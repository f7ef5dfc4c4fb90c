"""The safetensors container: where each tensor's bytes lie in a file, and how such a file begins.

Only headers are read here; `dsv3.checkpoint.fill` reads the data straight into the stack it belongs to. The
`safetensors` package cannot do that: it returns new arrays, or memory maps whose pages count as resident memory.
Format: the header's length in eight little-endian bytes, a JSON header, then the data without holes
(https://huggingface.co/docs/safetensors/index#format).
"""

import dataclasses
import json
import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from dsv3.checkpoint.errors import CheckpointError
from dsv3.files import IS_POINTER, is_pointer, open_regular, parse_json

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
MAX_DIMENSIONS = 8
DATA_ALIGNMENT = 4096  # bytes; where the data of our own files begin

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file: C-contiguous, little-endian, `offset` bytes from the file's start.

    `checksums` has one entry per block of at most `block_bytes` (`fill.blocks`). Only the pre-stacked form has both.
    The file holds one value of a `repeated` tensor, which all of `shape` have.
    """

    name: str
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    checksums: tuple[int, ...] | None = None
    block_bytes: int | None = None
    repeated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file by name.

    Raises `CheckpointError` if the file is absent, truncated or longer than its header says, and if the header's
    offsets overlap, leave holes, or do not fit shape and dtype.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if is_pointer(file.peek(64)):
                raise CheckpointError(f"{path}: {IS_POINTER}")
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path}: its first 8 bytes announce a header of {length} bytes but the file has {size}: "
                    "truncated, or not a safetensors file"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    tensors = _parse(path, text, 8 + length)
    _check_extents(path, tensors, 8 + length, size)
    return {tensor.name: tensor for tensor in tensors}


def header_bytes(
    tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]], metadata: Mapping[str, str], align: int = 8
) -> bytes:
    """Returns the start of a safetensors file that holds `tensors` (name, dtype, shape) in this order.

    The result is padded to a multiple of `align` bytes, so the data begin there.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def _parse(path: Path, text: bytes, data_start: int) -> list[Tensor]:
    try:
        header = parse_json(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object")
    return [_tensor(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> Tensor:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where}: dtype {reprlib.repr(dtype)} is not one of {', '.join(DTYPES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        shown = f"shape {reprlib.repr(shape)} and data_offsets {reprlib.repr(offsets)}"
        raise CheckpointError(
            f"{where}: {shown} must list natural numbers below 2**63, and at most {MAX_DIMENSIONS} of them"
        )
    tensor = Tensor(name, path, DTYPES[dtype], tuple(shape), data_start + offsets[0])
    if offsets[1] - offsets[0] != tensor.nbytes:
        raise CheckpointError(
            f"{where}: data_offsets {offsets} span {offsets[1] - offsets[0]} bytes, "
            f"but {dtype} {shape} takes {tensor.nbytes}"
        )
    return tensor


def _naturals(value: Any) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return False
    return all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_extents(path: Path, tensors: Sequence[Tensor], data_start: int, size: int) -> None:
    end = data_start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            problem = "overlaps the tensor before it" if tensor.offset < end else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {tensor.name}: begins at byte {tensor.offset} and {problem}")
        end += tensor.nbytes
        if end > size:
            raise CheckpointError(
                f"{path}: tensor {tensor.name}: ends at byte {end} but the file has {size}: truncated; fetch it again"
            )
    if end != size:
        raise CheckpointError(f"{path}: {size - end} bytes follow the last tensor")
