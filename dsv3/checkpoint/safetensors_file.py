"""Reads and writes safetensors headers: dtype, shape and file offset of each tensor.

`dsv3.checkpoint.reader` reads the data directly into the stacks. The `safetensors` package cannot: it returns new
arrays, or memory maps whose pages count as resident memory.
Format: the header's length in eight little-endian bytes, a JSON header, then the data without holes
(https://huggingface.co/docs/safetensors/index#format).
"""

import dataclasses
import json
import math
import os
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from dsv3 import files
from dsv3.files import IS_POINTER, is_pointer, open_regular, parse_json

# Buffers that older exporters stored; computed from the configuration instead.
HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MISTRAL_INDEX = "consolidated.safetensors.index.json"
_MISTRAL_SINGLE = "consolidated.safetensors"


SHOWN = 4


class CheckpointError(ValueError):
    """A checkpoint directory does not hold the configured model; the message names the file and the tensor."""


def raise_findings(where: str | os.PathLike[str], findings: Mapping[str, Sequence[str]]) -> None:
    """Raises one `CheckpointError` that counts the findings of each kind and shows the first few, if there are any."""
    lines = [f"  {kind} ({len(items)}): {_shorten(items)}" for kind, items in findings.items() if items]
    if lines:
        raise CheckpointError("\n".join([f"{os.fspath(where)} does not hold the configured model:", *lines]))


def _shorten(items: Sequence[str]) -> str:
    shown = "; ".join(items[:SHOWN])
    return shown if len(items) <= SHOWN else f"{shown}; and {len(items) - SHOWN} more"


MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
MAX_DIMENSIONS = 8

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

    Of a `repeated` tensor the file holds one value, which is broadcast to `shape`.
    """

    name: str
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    repeated: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: Collection[np.dtype],
    findings: Mapping[str, list[str]],
    note: str = "",
) -> None:
    """Adds tensor `name` to `findings` where its shape or its dtype is another; `note` follows the expected types."""
    where = f"{name} in {tensor.path.name}"
    if tensor.shape != shape:
        findings["wrong shapes"].append(f"{where} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        expected = "/".join(sorted(NAMES[dtype] for dtype in dtypes))
        findings["wrong dtypes"].append(f"{where} is {NAMES[tensor.dtype]}, expected {expected}{note}")


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads the header of a safetensors file: its tensors by name.

    Raises `CheckpointError` if the file is absent, truncated or longer than its header states, and if the header's
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


def tensors_in_memory(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns arrays as tensors, each in a file of its own that is not there.

    Raises `CheckpointError` for what is no array, or deleted, or of a dtype that safetensors files cannot have.
    """
    unusable = [f"{name} {why}" for name, array in arrays.items() if (why := unusable_array(array))]
    raise_findings("the mapping of tensors", {"unusable arrays": unusable})
    foreign = [f"{name} is {array.dtype}" for name, array in arrays.items() if np.dtype(array.dtype) not in NAMES]
    raise_findings("the mapping of tensors", {"dtypes that no checkpoint has": foreign})
    return {
        name: Tensor(name, Path(name, "memory"), np.dtype(array.dtype), tuple(array.shape), 0)
        for name, array in arrays.items()
    }


def unusable_array(array: Any) -> str:
    """Returns why values cannot be read from an object, "" if they can."""
    if not hasattr(array, "dtype"):
        return f"is a {type(array).__name__}, not an array"
    if not getattr(array.dtype, "isnative", True):
        return "has another byte order than this machine"
    return "has been deleted: it was donated to a program" if getattr(array, "is_deleted", bool)() else ""


def header_bytes(tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the start of a safetensors file that holds `tensors` (name, dtype, shape) in this order.

    The result is padded to a multiple of 8 bytes, so the data begin there.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 8)
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
        raise ValueError("duplicate key")
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


def read_directory(directory: Path) -> dict[str, Tensor]:
    """Reads the headers of a directory: of the index's shards, or of the single file if there is no index.

    Mistral's names of these files are used if there are no others.

    Raises `CheckpointError` if there is neither, if a shard is absent or damaged, if index and shards disagree, or if
    the index names a file outside the directory.
    """
    for index, single in ((INDEX, SINGLE), (_MISTRAL_INDEX, _MISTRAL_SINGLE)):
        if (directory / index).is_file():
            return _read_shards(directory, _weight_map(directory / index))
        if (directory / single).is_file():
            return read_header(directory / single)
    raise CheckpointError(
        f"{directory}: has neither {INDEX} nor {SINGLE}; only safetensors checkpoints are read (pickled ones never are)"
    )


def plain_file_name(name: Any) -> TypeGuard[str]:
    """Returns whether `name` is a file name without a path."""
    return isinstance(name, str) and bool(name) and not set(name) & set("/\\\0") and name not in (".", "..")


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; raises `CheckpointError` if it cannot be read."""
    try:
        return files.read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error


def _weight_map(path: Path) -> dict[str, str]:
    content = read_json(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map from tensor names to files")
    for name, file in weight_map.items():
        if not plain_file_name(file) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: tensor {name}: {file!r} is not the plain name of a safetensors file")
    return weight_map


def _read_shards(directory: Path, weight_map: dict[str, str]) -> dict[str, Tensor]:
    shards = sorted(set(weight_map.values()))
    raise_findings(
        directory, {"shards named in the index but absent": [f for f in shards if not (directory / f).exists()]}
    )
    headers = {file: read_header(directory / file) for file in shards}
    stray = [
        f"{name} in {file}"
        for file, header in headers.items()
        for name in header
        if weight_map.get(name) != file and not HARMLESS.fullmatch(name)
    ]
    lost = [f"{name} in {file}" for name, file in weight_map.items() if name not in headers[file]]
    raise_findings(
        directory,
        {
            "tensors that the index places in a shard that lacks them": lost,
            "tensors in a shard where the index does not place them": stray,
        },
    )
    return {name: headers[file][name] for name, file in weight_map.items()}
