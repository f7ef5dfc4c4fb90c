"""Writes parameters as a Hugging Face checkpoint, file by file, by the tensor slices of `layout`."""

import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import jax
import ml_dtypes
import numpy as np

from dsv3.checkpoint import fp4, layout, quantize
from dsv3.checkpoint.layout import TensorSlice, extents, full_box
from dsv3.checkpoint.load import Advance, check_duplicates, plan_directory, reporter
from dsv3.checkpoint.load_plan import Fp8Mode, LoadPlan
from dsv3.checkpoint.reader import CheckpointReader, aligned_empty
from dsv3.checkpoint.safetensors_file import INDEX, SINGLE, CheckpointError, header_bytes
from dsv3.config.hugging_face import to_hf
from dsv3.config.model import ModelConfig
from dsv3.files import sync
from dsv3.model.params import Fp4Weight, Fp8Weight, Int4Weight, Params
from pallas_kernels.float8 import E4M3

_QUANTIZED = (Fp4Weight, Fp8Weight, Int4Weight)
F32 = np.dtype(np.float32)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


class Stacks(Protocol):
    """Stacked parameters that can be fetched by rows."""

    def dtypes(self, path: str) -> tuple[np.dtype, ...]:
        """Returns the dtypes of a leaf's arrays: one, or E4M3 for data and float32 for scales."""

    def rows(self, path: str, part: int, rows: slice) -> np.ndarray:
        """Returns the indices `rows` of the first axis of array `part` of a leaf, on the host."""


@dataclasses.dataclass(frozen=True)
class OutTensor:
    """A tensor to write. Each of `parts` is a leaf's path, an array of that leaf (0 or 1), and the slice to copy."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int, TensorSlice], ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save_hf(
    directory: str | os.PathLike[str],
    cfg: ModelConfig,
    params: Params,
    *,
    shard_bytes: int = 5 * 10**9,
    scale_dtype: Any = np.float32,
    companions: Sequence[Path] = (),
    progress: bool = False,
) -> None:
    """Writes config.json and safetensors files that `load_params` reads back bit for bit, atomically.

    Tensors keep the dtype of their leaf, FP8 data and scales included; tables of experts become int64. The router's
    weights take the embedding's dtype if that holds them exactly, else float32. kv_b_proj and wo_a of an FP8 model were
    dequantized on loading and stay so; `modules_to_not_convert` lists them with all other matrices that are not FP8.

    `shard_bytes` bounds a file. One file is `model.safetensors`; several have an index. `scale_dtype` float8_e8m0fnu
    stores scales that are powers of two in one byte. `companions` (tokenizer files) are copied into the directory, an
    encoder of messages (`encoding_*.py`) into its folder `encoding`.

    Raises `FileExistsError` if the directory holds anything, ValueError if `params` are not those of `cfg`, and
    `CheckpointError` if they have four bits.
    """
    write_hf(
        Path(directory),
        cfg,
        TreeStacks(cfg, params),
        shard_bytes=shard_bytes,
        scale_dtype=np.dtype(scale_dtype),
        companions=companions,
        progress=progress,
    )


class TreeStacks:
    """Stacks of a parameter tree; `rows` copies to the host."""

    def __init__(self, cfg: ModelConfig, params: Params) -> None:
        flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, _QUANTIZED))
        self._leaves = {layout.leaf_path(keys): leaf for keys, leaf in flat}
        reject_int4(path for path, leaf in self._leaves.items() if isinstance(leaf, Int4Weight))
        if path := next((path for path, leaf in self._leaves.items() if isinstance(leaf, Fp4Weight)), None):
            raise CheckpointError(
                f"{path} is FP4, which cannot be written as a Hugging Face checkpoint; keep the original, or load with "
                "fp4='fp8'"
            )
        expected = {path: spec.shape for path, spec in layout.leaves(cfg).items()}
        found = {path: self._arrays(path)[0].shape for path in self._leaves}
        wrong = sorted(path for path in expected | found if expected.get(path) != found.get(path))
        if wrong:
            shown = "; ".join(f"{p} is {found.get(p)}, expected {expected.get(p)}" for p in wrong[:4])
            raise ValueError(f"{len(wrong)} parameter(s) do not fit the configuration: {shown}")

    def dtypes(self, path: str) -> tuple[np.dtype, ...]:
        return tuple(np.dtype(array.dtype) for array in self._arrays(path))

    def rows(self, path: str, part: int, rows: slice) -> np.ndarray:
        array = self._arrays(path)[part]
        whole = (rows.start, rows.stop) == (0, array.shape[0])
        return np.asarray(array if whole else array[rows])

    def _arrays(self, path: str) -> tuple[Any, ...]:
        leaf = self._leaves[path]
        return (leaf.data, leaf.scale) if isinstance(leaf, Fp8Weight) else (leaf,)


def reject_int4(paths: Iterable[str]) -> None:
    """Raises `CheckpointError` if there are INT4 parameters, whose paths are `paths`."""
    if path := next(iter(paths), None):
        raise CheckpointError(
            f"{path} is INT4, which cannot be written as a Hugging Face checkpoint; keep the original, or load with "
            "int4='dequantize'"
        )


def write_hf(
    directory: Path,
    cfg: ModelConfig,
    stacks: Stacks,
    *,
    shard_bytes: int,
    scale_dtype: np.dtype,
    companions: Sequence[Path],
    progress: bool,
) -> None:
    """Implements `save_hf` for any `Stacks`."""
    if scale_dtype not in (F32, E8M0):
        raise ValueError(f"scale_dtype {scale_dtype} is neither float32 nor float8_e8m0fnu")
    tensors = list(out_tensors(cfg, stacks, scale_dtype))
    settings = json.dumps(_settings(cfg, tensors), indent=2, sort_keys=True)
    shards = _shards(tensors, shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    total = sum(t.nbytes for t in tensors)
    with atomic_directory(directory) as partial, reporter(total, "saving", shown=progress) as advance:
        (partial / "config.json").write_text(settings + "\n")
        for path in companions:
            copy = partial / ("encoding" if path.name.startswith("encoding_") else "") / path.name
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        for name, shard in zip(names, shards, strict=True):
            with (partial / name).open("wb") as file:
                _write_shard(file, shard, stacks, advance)
        if count > 1:
            weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def out_tensors(cfg: ModelConfig, stacks: Stacks, scale_dtype: np.dtype) -> Iterator[OutTensor]:
    """Yields the tensors of the checkpoint, leaf by leaf and layer by layer, so that few rows are on the host."""
    copies: dict[str, list[str]] = {}
    for duplicate in layout.duplicates(cfg):
        if duplicate.required:
            copies.setdefault(duplicate.of, []).append(duplicate.name)
    by_name: dict[str, list[tuple[str, TensorSlice]]] = {}
    for path, slices in layout.slices(cfg).items():
        for tensor_slice in slices:
            by_name.setdefault(tensor_slice.name, []).append((path, tensor_slice))
    dtypes = {path: _written_dtype(path, stacks) for path in layout.leaves(cfg)}
    for name, parts in by_name.items():
        path, tensor_slice = parts[0]
        data = tuple((p, 0, q) for p, q in parts)
        for title in (name, *copies.get(name, ())):
            yield OutTensor(title, dtypes[path], tensor_slice.shape, data)
        if len(stacks.dtypes(path)) == 2:
            scale = layout.scale_slice(tensor_slice)
            yield OutTensor(scale.name, scale_dtype, scale.shape, ((path, 1, scale),))


def _written_dtype(path: str, stacks: Stacks) -> np.dtype:
    own = stacks.dtypes(path)[0]
    if own == np.int32:  # a table of experts
        return np.dtype(np.int64)
    narrow = stacks.dtypes("embed")[0]
    if not path.endswith(".router") or narrow.itemsize >= own.itemsize:
        return own
    values = stacks.rows(path, 0, slice(None))
    return narrow if np.array_equal(values.astype(narrow).astype(own), values) else own


def _settings(cfg: ModelConfig, tensors: Sequence[OutTensor]) -> dict[str, Any]:
    """Returns the content of config.json, with a quantization that matches the tensors."""
    quantized = any(t.dtype == E4M3 for t in tensors)
    if quantized and cfg.fp8 is None:
        raise ValueError("the parameters hold FP8 weights but the configuration's fp8 is None")
    kept = cfg.fp8 if quantized else None
    settings = to_hf(dataclasses.replace(cfg, fp8=kept, int4_experts=False, fp4_experts=False))
    settings["torch_dtype"] = next(t.dtype.name for t in tensors if t.parts[0][0] == "embed")
    if quantized:
        plain = [t.name for t in tensors if len(t.shape) == 2 and t.dtype != E4M3 and t.name.endswith(".weight")]
        settings["quantization_config"]["modules_to_not_convert"] = [n.removesuffix(".weight") for n in plain]
    return settings


def _shards(tensors: Sequence[OutTensor], limit: int) -> list[list[OutTensor]]:
    shards: list[list[OutTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_shard(file: BinaryIO, tensors: Sequence[OutTensor], stacks: Stacks, advance: Advance) -> None:
    # Two entries: data and scales of a leaf, or the two halves of kv_b_proj, alternate.
    fetch = functools.lru_cache(maxsize=2)(lambda path, part, start, stop: stacks.rows(path, part, slice(start, stop)))
    file.write(header_bytes([(t.name, t.dtype, t.shape) for t in tensors], {"format": "pt"}))
    for tensor in tensors:
        file.write(_value(tensor, fetch).reshape(-1).view(np.uint8).data)
        advance(tensor.nbytes)


def _value(tensor: OutTensor, fetch: Any) -> np.ndarray:
    out: np.ndarray | None = None
    for path, part, tensor_slice in tensor.parts:
        rows = fetch(path, part, tensor_slice.target[0].start, tensor_slice.target[0].stop)
        box = rows[(slice(None), *tensor_slice.target[1:])]
        if box.dtype != tensor.dtype:
            box = _exactly(box, tensor)
        if tensor_slice.source == full_box(tensor_slice.view):
            return np.ascontiguousarray(box).reshape(tensor.shape)
        out = np.empty(tensor.shape, tensor.dtype) if out is None else out
        out.reshape(tensor_slice.view)[tensor_slice.source] = box
    assert out is not None
    return out


def _exactly(values: np.ndarray, tensor: OutTensor) -> np.ndarray:
    cast = values.astype(tensor.dtype)
    if not np.array_equal(cast.astype(values.dtype), values):
        raise ValueError(f"{tensor.name}: its values are not all representable in {tensor.dtype}")
    return cast


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields a directory to write into, which is renamed to `target` at the end, and removed if the block raises.

    It is synced to disk before it is renamed. Raises `FileExistsError` at once unless `target` is absent or an
    empty directory, which a rename may replace.
    """
    partial = target.absolute().parent / f".{target.absolute().name}.partial"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty; remove it or choose another directory")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for directory, _, names in os.walk(partial):
        for name in names:
            sync(Path(directory) / name)
        sync(Path(directory))
    os.rename(partial, target)
    sync(target.absolute().parent)


COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "encoding/encoding_dsv32.py",
    "encoding/encoding_dsv4.py",
    "tiktoken.model",
    "tekken.json",
    "tokenization_kimi.py",
    "tokenization_moonshot.py",
    "generation_config.json",
)


def convert_checkpoint(
    source: Path,
    target: Path,
    cfg: ModelConfig,
    *,
    dtype: Any = None,
    fp8: Fp8Mode = "keep",
    shard_bytes: int = 5 * 10**9,
    progress: bool = False,
    threads: int = 8,
) -> None:
    """Rewrites a checkpoint directory in another dtype, as `save_hf`; `dtype` None keeps the embedding's.

    FP4 experts become FP8 in blocks with the same values; under `fp8` "dequantize" they have the dtype. `target`
    appears atomically; after a kill the next run starts over.

    Raises `CheckpointError` if the source is not what `cfg` describes, `FileExistsError` if `target` holds anything,
    ValueError for an `fp8` that files do not have.
    """
    if fp8 == "quantize":
        raise ValueError("fp8 'quantize' is not possible for files: it rounds on devices; use 'keep' or 'dequantize'")
    plan = plan_directory(source, cfg, dtype, fp8)
    reject_int4(path for path, leaf in plan.leaves.items() if len(leaf) == 2 and leaf[0].dtype == quantize.INT4.data)
    with CheckpointReader(threads) as reader:
        reader.open(plan.files)
        check_duplicates(reader, plan, _ignore)
        write_hf(
            target,
            cfg,
            PlannedStacks(plan, reader, fp8),
            shard_bytes=shard_bytes,
            scale_dtype=F32,
            companions=[source / name for name in COMPANIONS if (source / name).is_file()],
            progress=progress,
        )


class PlannedStacks:
    """Stacks of a checkpoint directory; `rows` reads files, and converts FP4 experts as `convert_checkpoint` says."""

    def __init__(self, plan: LoadPlan, reader: CheckpointReader, fp8: Fp8Mode = "keep") -> None:
        self._plan, self._reader = plan, reader
        self._experts = plan.leaves["embed"][0].dtype if fp8 == "dequantize" else E4M3
        self._converted = functools.lru_cache(maxsize=1)(self._convert)  # data and scales are asked for in turns

    def dtypes(self, path: str) -> tuple[np.dtype, ...]:
        if self._is_fp4(path):
            return (E4M3, F32) if self._experts == E4M3 else (self._experts,)
        return tuple(array.dtype for array in self._plan.leaves[path])

    def rows(self, path: str, part: int, rows: slice) -> np.ndarray:
        if self._is_fp4(path):
            return self._converted(path, rows.start, rows.stop)[part]
        return self._read(path, part, rows)

    def _is_fp4(self, path: str) -> bool:
        return self._plan.leaves[path][0].dtype == quantize.FP4.data

    def _convert(self, path: str, start: int, stop: int) -> list[np.ndarray]:
        data, scale = (self._read(path, part, slice(start, stop)) for part in (0, 1))
        return fp4.convert_rows(data, scale, self._plan.leaves[path][0], start, self._experts)

    def _read(self, path: str, part: int, rows: slice) -> np.ndarray:
        array = self._plan.leaves[path][part]
        box = (slice(*rows.indices(array.shape[0])[:2]), *full_box(array.shape[1:]))
        out = aligned_empty(extents(box), array.dtype)
        self._reader.read(array, [(box, out)], _ignore)
        return out


def _ignore(_: int) -> None:
    pass
