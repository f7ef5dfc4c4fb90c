"""The pre-stacked form: one safetensors file per parameter, as it lies in memory, with a checksum for every block.

    config.json, tokenizer files     as in a Hugging Face directory
    stacked/manifest.json            format, version, block size; per array its file and its blocks' checksums
    stacked/<leaf>.safetensors       the array, or `.data` and `.scale` of a quantized one; data begin at 4,096 bytes

Loading transposes and reassembles nothing: every block is read straight into its array and checked there.
"""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from dsv3.checkpoint import int4, layout
from dsv3.checkpoint.boxes import num_blocks
from dsv3.checkpoint.directory import plain_file_name, read_json
from dsv3.checkpoint.errors import CheckpointError, raise_findings
from dsv3.checkpoint.hugging_face import F32, PLAIN, Findings, names
from dsv3.checkpoint.layout import scale_shape, whole_piece
from dsv3.checkpoint.load_plan import Array, Fp8Mode, LoadPlan
from dsv3.checkpoint.safetensors_file import NAMES, Tensor, read_header
from dsv3.config.model import ModelConfig
from dsv3.model.params import ParamSpec
from pallas_kernels.float8 import E4M3

FORMAT = "dsv3-stacked"
VERSION = 2
FOLDER = "stacked"
MANIFEST = "manifest.json"


def is_stacked(directory: Path) -> bool:
    """Returns whether a directory holds the pre-stacked form."""
    return (directory / FOLDER / MANIFEST).is_file()


def manifest_bytes(arrays: dict[str, Any], block_bytes: int) -> bytes:
    """Returns the content of the manifest; `arrays` maps names to `{"file": ..., "checksums": [...]}`."""
    content = {"format": FORMAT, "version": VERSION, "block_bytes": block_bytes, "arrays": arrays}
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def plan_stacked(directory: Path, cfg: ModelConfig, dtype: np.dtype | None, fp8: Fp8Mode) -> LoadPlan:
    """Plans the load of a pre-stacked directory; `dtype` None takes the embedding's.

    MTP modules in the directory are skipped if `cfg` has none. Raises `CheckpointError` if the manifest has another
    version, if files are damaged or absent, or if the parameters are not those of `cfg`.
    """
    stored = _read_tensors(directory / FOLDER)
    leaves = layout.leaves(cfg)
    dtype = dtype or (stored["embed"].dtype if "embed" in stored else F32)
    found = {name.removesuffix(".data").removesuffix(".scale") for name in stored}
    skipped = {path for path in found if path.startswith("mtp.")} if not cfg.num_nextn_predict_layers else set()
    findings: Findings = defaultdict(list)
    findings["missing parameters"] = [path for path in leaves if path not in found]
    findings["unexpected parameters"] = sorted(found - leaves.keys() - skipped)
    raise_findings(directory, findings)
    planned = {path: _leaf(path, spec, stored, cfg, dtype, fp8, findings) for path, spec in leaves.items()}
    raise_findings(directory, findings)
    return LoadPlan(directory, planned, skipped_mtp_layers=(cfg.num_hidden_layers,) if skipped else ())


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Reads the stored arrays by name, with their checksums."""
    path = folder / MANIFEST
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise CheckpointError(f"{path}: is not a {FORMAT} manifest of version {VERSION}; convert the checkpoint again")
    block_bytes, entries = manifest.get("block_bytes"), manifest.get("arrays")
    if type(block_bytes) is not int or block_bytes <= 0 or not isinstance(entries, dict):
        raise CheckpointError(f"{path}: lacks block_bytes or arrays")
    files = {name: _file(path, name, entry) for name, entry in entries.items()}
    headers = {file: read_header(folder / file) for file in set(files.values())}
    lost = [f"{name} in {file}" for name, file in files.items() if name not in headers[file]]
    raise_findings(folder, {"arrays that their file lacks": lost})
    return {
        name: _with_checksums(path, headers[file][name], entries[name].get("checksums"), block_bytes)
        for name, file in files.items()
    }


def _file(path: Path, name: str, entry: Any) -> str:
    file = entry.get("file") if isinstance(entry, dict) else None
    if plain_file_name(file):
        return file
    raise CheckpointError(f"{path}: array {name}: {file!r} is not a plain file name")


def _with_checksums(path: Path, tensor: Tensor, checksums: Any, block_bytes: int) -> Tensor:
    try:
        count = num_blocks(tensor.shape, tensor.dtype.itemsize, block_bytes)
    except ValueError as error:
        raise CheckpointError(f"{path}: array {tensor.name}: {error}") from None
    if not isinstance(checksums, list) or len(checksums) != count or not all(type(value) is int for value in checksums):
        raise CheckpointError(f"{path}: array {tensor.name}: checksums must be {count} integers, one per block")
    return dataclasses.replace(tensor, checksums=tuple(checksums), block_bytes=block_bytes)


def _leaf(
    path: str,
    spec: ParamSpec,
    stored: dict[str, Tensor],
    cfg: ModelConfig,
    dtype: np.dtype,
    fp8: Fp8Mode,
    findings: Findings,
) -> tuple[Array, ...]:
    whole = whole_piece(path, spec.shape)
    if (plain := stored.get(path)) is not None:
        _check(plain, spec.shape, PLAIN, findings)
        return (Array(path, spec.shape, spec.dtype_in(dtype, checkpoint=[plain.dtype]), (whole,), stored),)
    if (data := stored.get(f"{path}.data")) is None or (scale := stored.get(f"{path}.scale")) is None:
        findings["quantized parameters that lack their data or their scales"].append(path)
        return ()
    if int4.is_int4(cfg, spec):
        return _int4_leaf(spec, data, scale, findings)
    if cfg.fp8 is None:
        findings["FP8 parameters although the configuration has no quantization_config"].append(path)
    scales = whole_piece(scale.name, scale_shape(spec.shape))
    _check(data, spec.shape, {E4M3}, findings)
    _check(scale, scales.shape, {F32}, findings)
    if fp8 == "dequantize" or not spec.quantizable:
        read = dataclasses.replace(whole, name=data.name, scale=scale.name)
        return (Array(path, spec.shape, spec.dtype_in(dtype), (read,), stored),)
    kept = dataclasses.replace(whole, name=data.name)
    return (
        Array(data.name, spec.shape, E4M3, (kept,), stored),
        Array(scale.name, scales.shape, F32, (scales,), stored, positive=True),
    )


def _int4_leaf(spec: ParamSpec, data: Tensor, scale: Tensor, findings: Findings) -> tuple[Array, ...]:
    words, scales = int4.shapes(spec.shape)
    _check(data, words, {int4.WORD}, findings)
    _check(scale, scales, {int4.SCALE}, findings)
    stored = {tensor.name: tensor for tensor in (data, scale)}
    return (
        Array(data.name, words, int4.WORD, (whole_piece(data.name, words),), stored),
        Array(scale.name, scales, int4.SCALE, (whole_piece(scale.name, scales),), stored, positive=True),
    )


def _check(tensor: Tensor, shape: tuple[int, ...], dtypes: set[np.dtype], findings: Findings) -> None:
    where = f"{tensor.name} in {tensor.path.name}"
    if tensor.shape != shape:
        findings["wrong shapes"].append(f"{where} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        findings["wrong dtypes"].append(f"{where} is {NAMES[tensor.dtype]}, expected {names(dtypes)}")
