"""Plans the load of a Hugging Face checkpoint: which tensor fills which part of which parameter, and in which dtype.

It looks at headers only. Every disagreement between checkpoint and configuration is found here, before any weight is
read.
"""

import dataclasses
import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from dsv3.checkpoint import layout, quantize
from dsv3.checkpoint.layout import Piece, scale_name, scale_piece, scale_shape, stated_shape_name
from dsv3.checkpoint.load_plan import Array, Fp8Mode, LoadPlan
from dsv3.checkpoint.safetensors_file import HARMLESS, NAMES, Tensor, raise_findings
from dsv3.config.hugging_face.names import is_of_other_media, text_name
from dsv3.config.model import ModelConfig
from dsv3.model.params import ParamSpec
from pallas_kernels.float8 import BLOCK, E4M3

_log = logging.getLogger(__name__)
_MOST_EXPERTS = 2**12  # of a layer; a tensor of more is none of a model's, and stays as it is
_SCALE = scale_name("")

_ALL_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(_scale_inv)?")
# Scales of inputs that a file holds ready-made: inputs are quantized as they come, 128 channels at a time.
_OF_INPUTS = (".activation_scale", ".input_scale", "_proj_activation_scale")


def in_deepseek_form(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the language model under DeepSeek's names.

    Those of other media are left out, which the log says, and so are ready-made scales of inputs. Experts that lie in
    one tensor become one tensor each. A scale for a whole FP8 tensor stands for each of its blocks.

    Raises `CheckpointError` where two tensors would have one name.
    """
    skipped = [name for name in tensors if is_of_other_media(name)]
    if skipped:
        _log.info("%s: %d tensors of other media, such as %s, are not loaded", directory, len(skipped), skipped[0])
    named: dict[str, Tensor] = {}
    clashes: list[str] = []
    for name in tensors if not skipped else (n for n in tensors if not is_of_other_media(n)):
        for ours, tensor in _apart(text_name(name), tensors[name]):
            if ours in named:
                clashes.append(f"{ours}, of {named[ours].name} and {name}")
            named[ours] = tensor
    raise_findings(directory, {"tensors that mean the same": clashes})
    return {name: _spread(named, name) for name in named if not name.endswith(_OF_INPUTS)}


def _apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields a tensor, or one for each expert that it holds: `[E, 2 * I, D]`, `[E, D, I]`, or scales `[E, ...]`."""
    match = _ALL_EXPERTS.fullmatch(name)
    if match is None or not tensor.shape or not 0 < tensor.shape[0] <= _MOST_EXPERTS:
        yield name, tensor
        return
    experts, projection, scale = match.groups()
    suffix = ".weight_scale_inv" if scale else ".weight"
    count, inner = tensor.shape[0], tensor.shape[1:]
    each = math.prod(inner) * tensor.dtype.itemsize
    for e in range(count):
        whole = dataclasses.replace(tensor, shape=inner, offset=tensor.offset + e * each)
        stem = f"{experts}.{e}."
        if projection == "down_proj":
            yield f"{stem}down_proj{suffix}", whole
        elif math.prod(inner) == 1:  # one scale for both
            yield f"{stem}gate_proj{suffix}", whole
            yield f"{stem}up_proj{suffix}", whole
        else:
            half = dataclasses.replace(whole, shape=(inner[0] // 2, *inner[1:]))
            yield f"{stem}gate_proj{suffix}", half
            yield f"{stem}up_proj{suffix}", dataclasses.replace(half, offset=half.offset + half.nbytes)


def _spread(named: Mapping[str, Tensor], name: str) -> Tensor:
    """Returns a tensor; a scale of a whole FP8 matrix gets the shape of the blocks' scales, each of which it is."""
    tensor = named[name]
    if not name.endswith(_SCALE) or math.prod(tensor.shape) != 1:
        return tensor
    weight = named.get(name.removesuffix(_SCALE))
    if weight is None or weight.dtype != E4M3 or len(weight.shape) != 2:
        return tensor
    return dataclasses.replace(tensor, shape=scale_shape(weight.shape), repeated=True)


Findings = defaultdict[str, list[str]]

F32 = np.dtype(np.float32)
PLAIN = {np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16)}
SCALES = {np.dtype(t) for t in (np.float32, ml_dtypes.float8_e8m0fnu)}


def plan_hf(
    directory: Path, tensors: Mapping[str, Tensor], cfg: ModelConfig, dtype: np.dtype | None, fp8: Fp8Mode
) -> LoadPlan:
    """Plans the load of a Hugging Face checkpoint that holds `tensors`; `dtype` None takes the embedding's.

    Three rules go beyond the table. Rotary buffers (`HARMLESS`) are ignored. MTP modules beyond
    `num_nextn_predict_layers` are skipped, because they change no output. MTP modules that the configuration promises
    and the checkpoint lacks are an error.

    Raises one `CheckpointError` that names all missing, unexpected and misshapen tensors and all wrong dtypes.
    """
    findings: Findings = defaultdict(list)
    pieces = layout.pieces(cfg)
    skipped = layout.mtp_layers_beyond(cfg, tensors)
    _check_names(cfg, tensors, pieces, skipped, findings)
    for path, spec in layout.leaves(cfg).items():
        for piece in pieces[path]:
            if quantize.is_int4(cfg, spec):
                quantize.check_int4(tensors, piece, findings)
            else:
                _check_tensor(tensors, piece.name, piece.shape, cfg, findings)
    raise_findings(directory, findings)
    own = tensors[pieces["embed"][0].name].dtype
    dtype = dtype or (own if own in PLAIN else np.dtype(ml_dtypes.bfloat16))
    leaves = {
        path: quantize.int4_arrays(path, spec, pieces[path], tensors)
        if quantize.is_int4(cfg, spec)
        else _leaf(path, spec, pieces[path], tensors, dtype, fp8, findings)
        for path, spec in layout.leaves(cfg).items()
    }
    raise_findings(directory, findings)
    equal = tuple((tensors[d.name], tensors[d.of]) for d in layout.duplicates(cfg) if d.name in tensors)
    return LoadPlan(directory, leaves, equal, tuple(sorted(skipped)))


def _check_names(
    cfg: ModelConfig,
    tensors: Mapping[str, Tensor],
    pieces: Mapping[str, tuple[Piece, ...]],
    skipped: set[int],
    findings: Findings,
) -> None:
    required = {p.name: None for group in pieces.values() for p in group}
    required |= {d.name: None for d in layout.duplicates(cfg) if d.required}
    missing = [name for name in required if name not in tensors]
    findings["missing tensors"] = missing
    absent = [i for i in range(cfg.num_hidden_layers, cfg.num_cache_layers) if _no_layer(tensors, i)]
    if absent:
        findings["missing tensors"] = [n for n in missing if layout.layer_of(n) not in absent]
        findings["MTP modules that the checkpoint lacks altogether; set num_nextn_predict_layers to what it has"] = [
            f"layer {i}" for i in absent
        ]
    known = required.keys() | {d.name for d in layout.duplicates(cfg)}
    quantized = {name for name in known if name in tensors and tensors[name].dtype in (E4M3, quantize.WORD)}
    known |= {scale_name(name) for name in quantized} | {stated_shape_name(name) for name in quantized}
    findings["unexpected tensors"] = [
        f"{name} in {tensor.path.name}"
        for name, tensor in tensors.items()
        if name not in known and layout.layer_of(name) not in skipped and not HARMLESS.fullmatch(name)
    ]


def _no_layer(tensors: Mapping[str, Tensor], layer: int) -> bool:
    return not any(name.startswith(f"model.layers.{layer}.") for name in tensors)


def _check_tensor(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], cfg: ModelConfig, findings: Findings
) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        return
    where = f"{name} in {tensor.path.name}"
    if tensor.shape != shape:
        findings["wrong shapes"].append(f"{where} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype == E4M3 and len(shape) == 2:
        if cfg.fp8 is None:
            findings["FP8 tensors although the configuration has no quantization_config"].append(where)
        _check_scale(tensors, name, shape, findings)
    elif tensor.dtype not in PLAIN:
        findings["wrong dtypes"].append(f"{where} is {NAMES[tensor.dtype]}, expected {names(PLAIN)} or FP8 matrices")


def _check_scale(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], findings: Findings) -> None:
    scale = tensors.get(scale_name(name))
    if scale is None:
        findings["missing tensors"].append(scale_name(name))
        return
    where = f"{scale.name} in {scale.path.name}"
    if scale.shape != scale_shape(shape):
        findings["wrong shapes"].append(f"{where} is {list(scale.shape)}, expected {list(scale_shape(shape))}")
    allowed = SCALES | PLAIN if scale.repeated else SCALES
    if scale.dtype not in allowed:
        findings["wrong dtypes"].append(f"{where} is {NAMES[scale.dtype]}, expected {names(allowed)}")


def names(dtypes: set[np.dtype]) -> str:
    """Names of dtypes in the safetensors format, joined for a message."""
    return "/".join(sorted(NAMES[dtype] for dtype in dtypes))


def _leaf(
    path: str,
    spec: ParamSpec,
    pieces: tuple[Piece, ...],
    tensors: Mapping[str, Tensor],
    dtype: np.dtype,
    fp8: Fp8Mode,
    findings: Findings,
) -> tuple[Array, ...]:
    quantized = [p for p in pieces if tensors[p.name].dtype == E4M3]
    if spec.quantizable and quantized and fp8 != "dequantize":
        findings["weights that cannot stay FP8; load with fp8='dequantize'"] += _obstacles(path, pieces, tensors)
        scales = tuple(scale_piece(p) for p in quantized)
        return (
            Array(f"{path}.data", spec.shape, E4M3, pieces, tensors),
            Array(f"{path}.scale", scale_shape(spec.shape), F32, scales, tensors, positive=True),
        )
    stored = [tensors[p.name].dtype for p in pieces]
    read = tuple(
        dataclasses.replace(p, scale=scale_name(p.name)) if own == E4M3 else p
        for p, own in zip(pieces, stored, strict=True)
    )
    return (Array(path, spec.shape, spec.dtype_in(dtype, checkpoint=stored), read, tensors),)


def _obstacles(path: str, pieces: tuple[Piece, ...], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    first, plain = (next((p for p in pieces if (tensors[p.name].dtype == E4M3) == q), None) for q in (True, False))
    if first and plain:
        yield f"{path}: {first.name} is FP8 but {plain.name} is not"
    cut = next((p for p in pieces if p.put[-2].start % BLOCK), None)
    if cut:
        row = cut.put[-2].start
        yield f"{path}: {cut.name} begins at row {row} of the fused weight, not a multiple of {BLOCK}"
