"""Plans the load of a Hugging Face checkpoint: which tensor fills which part of which parameter, and in which dtype.

Only headers are read. Every mismatch between checkpoint and configuration is reported here, before any weight is read.
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
from dsv3.checkpoint.layout import TensorSlice, scale_shape, scale_slice, stated_shape_name
from dsv3.checkpoint.load_plan import Fp8Mode, LoadPlan, PlannedArray
from dsv3.checkpoint.safetensors_file import HARMLESS, Tensor, check_tensor, raise_findings
from dsv3.checkpoint.tables import V3_SCALE, layer_of, layer_prefix, modules_beyond, scale_name
from dsv3.config.hugging_face.names import is_of_other_media, text_name
from dsv3.config.model import ModelConfig
from dsv3.model.params import ParamSpec
from pallas_kernels.float8 import BLOCK, E4M3

_log = logging.getLogger(__name__)
_MAX_EXPERTS = 2**12  # of a layer; a tensor with more is not split

_ALL_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(_scale_inv)?")
# Static scales of inputs are ignored: inputs are quantized dynamically, per 128 channels.
_INPUT_SCALES = (".activation_scale", ".input_scale", "_proj_activation_scale")


def to_deepseek_names(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the language model under DeepSeek's names.

    Tensors of other media are skipped and logged; static scales of inputs are skipped. A tensor of several experts is
    split into one tensor each. A scale of a whole FP8 tensor becomes the scale of each of its blocks.

    Raises `CheckpointError` where two tensors would have one name.
    """
    skipped = [name for name in tensors if is_of_other_media(name)]
    if skipped:
        _log.info("%s: %d tensors of other media, such as %s, are not loaded", directory, len(skipped), skipped[0])
    named: dict[str, Tensor] = {}
    clashes: list[str] = []
    for name in tensors if not skipped else (n for n in tensors if not is_of_other_media(n)):
        for ours, tensor in _split_experts(text_name(name), tensors[name]):
            if ours in named:
                clashes.append(f"{ours}, of {named[ours].name} and {name}")
            named[ours] = tensor
    raise_findings(directory, {"tensors that mean the same": clashes})
    return {name: _broadcast_scale(named, name) for name in named if not name.endswith(_INPUT_SCALES)}


def _split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields a tensor, or one for each expert that it holds: `[E, 2 * I, D]`, `[E, D, I]`, or scales `[E, ...]`."""
    match = _ALL_EXPERTS.fullmatch(name)
    if match is None or not tensor.shape or not 0 < tensor.shape[0] <= _MAX_EXPERTS:
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


def _broadcast_scale(named: Mapping[str, Tensor], name: str) -> Tensor:
    """Returns a tensor; a scale of a whole FP8 matrix gets the shape of block scales, with `repeated` set."""
    tensor = named[name]
    if not name.endswith(V3_SCALE) or math.prod(tensor.shape) != 1:
        return tensor
    weight = named.get(name.removesuffix(V3_SCALE))
    if weight is None or weight.dtype != E4M3 or len(weight.shape) != 2:
        return tensor
    return dataclasses.replace(tensor, shape=scale_shape(weight.shape), repeated=True)


Findings = defaultdict[str, list[str]]

F32 = np.dtype(np.float32)
PLAIN = {np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16)}
SCALES = {np.dtype(t) for t in (np.float32, ml_dtypes.float8_e8m0fnu)}
INTEGERS: set[np.dtype] = {np.dtype(np.int32), np.dtype(np.int64)}
_SCALED = (E4M3, quantize.INT4.data, quantize.FP4.data)


def plan_hf(
    directory: Path, tensors: Mapping[str, Tensor], cfg: ModelConfig, dtype: np.dtype | None, fp8: Fp8Mode
) -> LoadPlan:
    """Plans the load of a Hugging Face checkpoint that holds `tensors`; `dtype` None takes the embedding's.

    Three rules go beyond the table. Rotary buffers (`HARMLESS`) are ignored. MTP modules beyond
    `num_nextn_predict_layers` are skipped, because they affect no output. MTP modules of the configuration that the
    checkpoint lacks are an error.

    Raises one `CheckpointError` that names all missing, unexpected and misshapen tensors and all wrong dtypes.
    """
    findings: Findings = defaultdict(list)
    slices = layout.slices(cfg)
    skipped = modules_beyond(cfg, tensors)
    _check_names(cfg, tensors, slices, skipped, findings)
    for path, spec in layout.leaves(cfg).items():
        for tensor_slice in slices[path]:
            if (form := quantize.packed_form(cfg, spec)) is not None:
                quantize.check_packed(tensors, tensor_slice, form, findings)
            else:
                _check_tensor(tensors, tensor_slice, spec, cfg, findings)
    raise_findings(directory, findings)
    own = tensors[slices["embed"][0].name].dtype
    dtype = dtype or (own if own in PLAIN else np.dtype(ml_dtypes.bfloat16))
    leaves = {
        path: quantize.packed_arrays(path, spec, slices[path], tensors, form)
        if (form := quantize.packed_form(cfg, spec)) is not None
        else _leaf(path, spec, slices[path], tensors, dtype, fp8, cfg, findings)
        for path, spec in layout.leaves(cfg).items()
    }
    raise_findings(directory, findings)
    equal = tuple((tensors[d.name], tensors[d.of]) for d in layout.duplicates(cfg) if d.name in tensors)
    return LoadPlan(directory, leaves, equal, tuple(sorted(skipped)))


def _check_names(
    cfg: ModelConfig,
    tensors: Mapping[str, Tensor],
    slices: Mapping[str, tuple[TensorSlice, ...]],
    skipped: set[int],
    findings: Findings,
) -> None:
    required = {p.name: None for group in slices.values() for p in group}
    required |= {d.name: None for d in layout.duplicates(cfg) if d.required}
    missing = [name for name in required if name not in tensors]
    findings["missing tensors"] = missing
    drafting = range(cfg.num_hidden_layers, cfg.num_cache_layers)
    absent = [i for i in drafting if not any(name.startswith(layer_prefix(cfg, i)) for name in tensors)]
    if absent:
        findings["missing tensors"] = [n for n in missing if layer_of(cfg, n) not in absent]
        findings["MTP modules that the checkpoint lacks altogether; set num_nextn_predict_layers to what it has"] = [
            f"layer {i}" for i in absent
        ]
    known = required.keys() | {d.name for d in layout.duplicates(cfg)}
    quantized = {name for name in known if name in tensors and tensors[name].dtype in _SCALED}
    known |= {scale_name(name) for name in quantized} | {stated_shape_name(name) for name in quantized}
    findings["unexpected tensors"] = [
        f"{name} in {tensor.path.name}"
        for name, tensor in tensors.items()
        if name not in known and layer_of(cfg, name) not in skipped and not HARMLESS.fullmatch(name)
    ]


def _check_tensor(
    tensors: Mapping[str, Tensor], tensor_slice: TensorSlice, spec: ParamSpec, cfg: ModelConfig, findings: Findings
) -> None:
    name, shape = tensor_slice.name, tensor_slice.shape
    tensor = tensors.get(name)
    if tensor is None:
        return
    if spec.dtype == np.int32:
        check_tensor(name, tensor, shape, INTEGERS, findings)
    elif tensor.dtype != E4M3 or len(shape) != 2:
        check_tensor(name, tensor, shape, PLAIN, findings, " or FP8 matrices")
    else:
        check_tensor(name, tensor, shape, (E4M3,), findings)
        if cfg.fp8 is None:
            where = f"{name} in {tensor.path.name}"
            findings["FP8 tensors although the configuration has no quantization_config"].append(where)
        _check_scale(tensors, name, shape, findings)


def _check_scale(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], findings: Findings) -> None:
    scale = tensors.get(scale_name(name))
    if scale is None:
        findings["missing tensors"].append(scale_name(name))
    else:
        check_tensor(scale.name, scale, scale_shape(shape), SCALES | PLAIN if scale.repeated else SCALES, findings)


def _leaf(
    path: str,
    spec: ParamSpec,
    slices: tuple[TensorSlice, ...],
    tensors: Mapping[str, Tensor],
    dtype: np.dtype,
    fp8: Fp8Mode,
    cfg: ModelConfig,
    findings: Findings,
) -> tuple[PlannedArray, ...]:
    if spec.dtype == np.int32:  # a table of experts
        table = np.dtype(np.int32)
        return (PlannedArray(path, spec.shape, table, slices, tensors, below=cfg.n_routed_experts),)
    quantized = [p for p in slices if tensors[p.name].dtype == E4M3]
    if spec.quantizable and quantized and fp8 != "dequantize":
        findings["weights that cannot stay FP8; load with fp8='dequantize'"] += _obstacles(path, slices, tensors)
        scales = tuple(scale_slice(p) for p in quantized)
        return (
            PlannedArray(f"{path}.data", spec.shape, E4M3, slices, tensors),
            PlannedArray(f"{path}.scale", scale_shape(spec.shape), F32, scales, tensors, positive=True),
        )
    stored = [tensors[p.name].dtype for p in slices]
    read = tuple(
        dataclasses.replace(p, scale=scale_name(p.name)) if own == E4M3 else p
        for p, own in zip(slices, stored, strict=True)
    )
    return (PlannedArray(path, spec.shape, spec.dtype_in(dtype, checkpoint=stored), read, tensors),)


def _obstacles(path: str, slices: tuple[TensorSlice, ...], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    first, plain = (next((p for p in slices if (tensors[p.name].dtype == E4M3) == q), None) for q in (True, False))
    if first and plain:
        yield f"{path}: {first.name} is FP8 but {plain.name} is not"
    cut = next((p for p in slices if p.target[-2].start % BLOCK), None)
    if cut:
        row = cut.target[-2].start
        yield f"{path}: {cut.name} begins at row {row} of the fused weight, not a multiple of {BLOCK}"
