"""How a file says that weights are quantized: FP8 in blocks or whole tensors, or routed experts in INT4."""

from typing import Any

from dsv3.config.hugging_face.fields import Fields
from dsv3.config.model import Fp8Config, ModelConfig

# Which tensors are quantized shows in the file: they have a scale next to them.
_TENSOR_LISTS = frozenset({"modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize", "ignore"})
# How scales were found, and what the file's writer was. A symmetric quantization has no zero points.
_MEANINGLESS = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
_OF_THE_WRITER = frozenset({"version", "global_compression_ratio"})


def read_quantization(fields: Fields, *, per_tensor: bool = False, fp4: bool = False) -> dict[str, Any]:
    """Reads `quantization_config` as fields of `ModelConfig`: `fp8`, `int4_experts`, `fp4_experts`; none without it.

    With `fp4` the form is DeepSeek-V4's: routed experts are FP4 where no `expert_dtype`, beside or inside of it, says
    otherwise. With `per_tensor` an FP8 weight may have one scale instead of one per block of 128 x 128. Activations are
    quantized as they come whatever the file says: its static scales are not used.
    """
    quantization = fields.object("quantization_config")
    if quantization is None:
        return {}
    method = quantization.one_of("quant_method", ("fp8",) if fp4 else ("fp8", "compressed-tensors"))
    if method == "compressed-tensors":
        return _compressed_tensors(quantization)
    quantization.one_of("fmt", ("e4m3",), "e4m3")
    outer = fields.one_of("expert_dtype", ("fp4", "fp8"), "fp4") if fp4 else "fp8"
    experts = quantization.one_of("expert_dtype", ("fp4", "fp8") if fp4 else ("fp8",), outer)
    whole = per_tensor and not quantization.has("weight_block_size")
    quantization.one_of("activation_scheme", ("dynamic", "static") if whole else ("dynamic",), "dynamic")
    if whole:
        quantization.get("weight_block_size")
    else:
        quantization.one_of("weight_block_size", ([128, 128],))
    scale_fmt = quantization.one_of("scale_fmt", ("float", "ue8m0"), "float")
    quantization.finish(_TENSOR_LISTS)
    return {"fp8": Fp8Config("ue8m0" if scale_fmt == "ue8m0" else "float32"), "fp4_experts": experts == "fp4"}


def quantization_to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the field `quantization_config`, where there is one."""
    if cfg.int4_experts:
        return {"quantization_config": _int4_to_hf()}
    if cfg.fp8 is None:
        return {}
    settings = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    if cfg.fp8.scale_fmt == "ue8m0":
        settings["scale_fmt"] = "ue8m0"
    return {"quantization_config": settings}


def _compressed_tensors(quantization: Fields) -> dict[str, Any]:
    """Reads blocks of FP8 as Mistral Large 3 has them, or packed INT4 as Kimi-K2-Thinking has it.

    The names and patterns of `ignore` are not matched, because a pattern may take forever: the loader sees which
    tensors are quantized, and refuses all that are not served so.
    """
    form = quantization.one_of("format", ("float-quantized", "pack-quantized"))
    quantization.one_of("kv_cache_scheme", (None,), None)
    groups = quantization.object("config_groups")
    group = groups.object("group_0") if groups is not None else None
    if groups is None or group is None:
        raise quantization.fail("config_groups", "an object with one group, group_0")
    groups.finish()
    group.one_of("targets", (["Linear"],), ["Linear"])
    group.one_of("output_activations", (None,), None)
    weights = group.object("weights")
    if weights is None:
        raise group.fail("weights", "an object")
    (_packed_int4 if form == "pack-quantized" else _float_blocks)(group, weights)
    weights.one_of("dynamic", (False,), False)
    weights.one_of("actorder", (None,), None)
    weights.finish(_MEANINGLESS)
    group.one_of("format", (form,), form)
    group.finish()
    ignored = quantization.get("ignore", [])
    if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
        raise quantization.fail("ignore", "a list of names and patterns")
    quantization.one_of("quantization_status", ("compressed",), "compressed")
    for name in ("sparsity_config", "transform_config"):
        quantization.one_of(name, ({},), {})
    quantization.finish(_OF_THE_WRITER)
    return {"int4_experts": True} if form == "pack-quantized" else {"fp8": Fp8Config()}


def _float_blocks(group: Fields, weights: Fields) -> None:
    """Checks that weights have a scale per block, and that activations, if at all, are quantized as they come."""
    activations = group.object("input_activations")
    weights.one_of("num_bits", (8,))
    weights.one_of("type", ("float",))
    weights.one_of("symmetric", (True,), True)
    weights.one_of("strategy", ("block",))
    weights.one_of("group_size", (None,), None)
    weights.one_of("block_structure", ([128, 128],))
    if activations is not None:
        activations.one_of("num_bits", (8,), 8)
        activations.one_of("type", ("float",), "float")
        activations.one_of("dynamic", (True,))


def _packed_int4(group: Fields, weights: Fields) -> None:
    """Checks that weights have four bits and a scale per 32 columns, and that activations are plain."""
    weights.one_of("num_bits", (4,))
    weights.one_of("type", ("int",))
    weights.one_of("symmetric", (True,))
    weights.one_of("strategy", ("group",))
    weights.one_of("group_size", (32,))
    weights.one_of("block_structure", (None,), None)
    group.one_of("input_activations", (None,), None)


def _int4_to_hf() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*eh_proj.*",
        ],
        "kv_cache_scheme": None,
    }
