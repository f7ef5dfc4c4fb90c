"""The configuration of a model directory: config.json or params.json, and what other files there add."""

import dataclasses
import hashlib
import logging
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any

from dsv3.config.hugging_face import deepseek_v4
from dsv3.config.hugging_face.deepseek import OF_MISTRAL, from_hf, indexer_to_hf
from dsv3.config.hugging_face.fields import ConfigError, Fields
from dsv3.config.hugging_face.names import text_name
from dsv3.config.hugging_face.quantization import quantization_to_hf
from dsv3.config.hugging_face.rotary import mistral_rope_parameters
from dsv3.config.model import ModelConfig
from dsv3.files import MAX_JSON_BYTES, open_regular, parse_json, read_json

_CLASSES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "axk1": "AXK1ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
}
_SPELLED_OTHERWISE = {
    "eos_token_ids",
    "latent_norm_eps",
    "yarn",
    "fp8",
    "int4_experts",
    "family",
    "query_scaling",
    "post_moe_norm",
    "indexer",
    "compressed",
    "hyper_connections",
    "num_hash_layers",
    "swiglu_limit",
    "fp4_experts",
    "dspark",
    "context_shards",
}


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of `cfg`: `from_hf(to_hf(cfg)) == cfg`, and transformers reads it.

    Members whose code is DeepSeek-V3's (Kimi-K2, also within K2.5) are written as such, and Mistral Large 3 as
    mistral4.

    Raises:
      ConfigError: `cfg` has settings that the Hugging Face format cannot say.
    """
    if cfg.compressed is not None:
        return deepseek_v4.to_hf(cfg)
    model_type = _model_type(cfg)
    _refuse_unsayable(cfg, model_type)
    same_name = sorted({field.name for field in dataclasses.fields(cfg)} - _SPELLED_OTHERWISE)
    return {name: getattr(cfg, name) for name in same_name} | {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "attention_bias": False,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "num_key_value_heads": cfg.num_attention_heads,
        "eos_token_id": cfg.eos_token_ids[0] if len(cfg.eos_token_ids) == 1 else list(cfg.eos_token_ids) or None,
        "use_cache": True,
        **_rotary_to_hf(cfg, model_type),
        **quantization_to_hf(cfg),
        **indexer_to_hf(cfg),
    }


def _model_type(cfg: ModelConfig) -> str:
    """Returns the type whose code computes `cfg`."""
    if cfg.indexer is not None:
        return "glm_moe_dsa" if cfg.indexer.interleaved else "deepseek_v32"
    if cfg.post_moe_norm:
        return "axk1"
    if cfg.topk_method == "noaux_tc":
        return "glm4_moe_lite" if cfg.family == "glm4_moe_lite" else "deepseek_v3"
    return "mistral4" if cfg.scoring_func == "softmax" and cfg.norm_topk_prob else "deepseek_v2"


def _rotary_to_hf(cfg: ModelConfig, model_type: str) -> dict[str, Any]:
    if model_type == "mistral4":
        return {"rope_parameters": mistral_rope_parameters(cfg)}
    return {"rope_scaling": None if cfg.yarn is None else {"type": "yarn", **dataclasses.asdict(cfg.yarn)}}


def _refuse_unsayable(cfg: ModelConfig, model_type: str) -> None:
    has_indexer = cfg.indexer is not None
    unsayable = {
        "latent_norm_eps": cfg.latent_norm_eps != 1e-6,
        "query_scaling": cfg.query_scaling is not None and model_type != "mistral4",
        "topk_method": cfg.topk_method != "noaux_tc" and (model_type == "axk1" or has_indexer),
        "post_moe_norm": cfg.post_moe_norm and has_indexer,
        "indexer": model_type == "deepseek_v32" and bool(cfg.indexer and cfg.indexer.shared_layers),
    }
    for name, is_lost in unsayable.items():
        if is_lost:
            value = getattr(cfg, name)
            raise ConfigError(f"{name} is {value}, which a config.json of model_type {model_type} cannot say")


_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
    "max_position_embeddings": "max_position_embeddings",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
    "quantization_config": "quantization_config",
}
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "routed_scale": "routed_scaling_factor",
}
# Tokens of Mistral's vocabularies that params.json does not say: <s> and </s>.
_BOS, _EOS = 1, 2


def as_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of model_type mistral_large_3 that a parsed params.json stands for.

    Raises:
      ConfigError: the file does not describe a model with latent attention and experts, or has a field that is not
        known.
    """
    fields = Fields(params, file="params.json")
    moe = fields.object("moe")
    if moe is None or not fields.has("kv_lora_rank"):
        raise ConfigError(
            "params.json: only Mistral's models with kv_lora_rank and moe (Large 3, Small 4) are served, not this one"
        )
    config = {theirs: fields.get(ours) for ours, theirs in _SIZES.items() if fields.has(ours)}
    config |= {theirs: moe.get(ours) for ours, theirs in _EXPERTS.items() if moe.has(ours)}
    for name in ("expert_parallel", "expert_model_parallel"):
        moe.get(name)
    moe.one_of("renorm_strategy", ("WEIGHTS",), "WEIGHTS")
    moe.one_of("use_load_balancing_bias", (False,), False)
    moe.finish()
    config |= {"model_type": "mistral_large_3", "bos_token_id": _BOS, "eos_token_id": _EOS}
    config.setdefault("routed_scaling_factor", 1.0)
    config.setdefault("q_lora_rank", None)
    config.setdefault("max_position_embeddings", fields.get("max_seq_len"))
    config |= _rope(fields)
    config |= _quantization(fields)
    for name in (*_SIZES, "head_dim", "model_parallel", "vision_encoder", "multimodal"):
        fields.get(name)
    fields.one_of("model_type", ("transformer",), "transformer")
    fields.finish()
    return config


def _rope(fields: Fields) -> dict[str, Any]:
    """Returns `rope_parameters`; theirs alpha and beta are YaRN's slow and fast bounds."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope_theta")}
    yarn, scaling = fields.object("yarn"), fields.object("llama_4_scaling")
    if yarn is not None:
        yarn.one_of("apply_scale", (False,))
        rope |= {"rope_type": "yarn", "factor": yarn.get("factor"), "attention_factor": 1.0}
        rope |= {"beta_fast": yarn.get("beta"), "beta_slow": yarn.get("alpha")}
        rope["original_max_position_embeddings"] = yarn.get("original_max_position_embeddings")
        yarn.finish()
    if scaling is not None:
        period = scaling.integer("original_max_position_embeddings")
        if yarn is not None and period != rope["original_max_position_embeddings"]:
            raise scaling.fail("original_max_position_embeddings", "that of yarn")
        rope |= {"llama_4_scaling_beta": scaling.get("beta"), "original_max_position_embeddings": period}
        scaling.finish()
    return {"rope_parameters": rope, "rope_theta": None}


def _quantization(fields: Fields) -> dict[str, Any]:
    """Returns `quantization_config` for FP8 weights with one scale per tensor; static scales of inputs are not used."""
    quantization = fields.object("quantization")
    if quantization is None:
        return {}
    quantization.one_of("qformat_weight", ("fp8_e4m3",))
    quantization.one_of("qscheme_act", ("TENSOR", "NO_SCALES"), "TENSOR")
    quantization.finish()
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}}


_log = logging.getLogger(__name__)

CONFIG, PARAMS = "config.json", "params.json"
_INDEXES = ("model.safetensors.index.json", "consolidated.safetensors.index.json")


def has_config(directory: str | pathlib.Path) -> bool:
    """Returns whether a directory has a file that says what model it holds."""
    return any((pathlib.Path(directory) / name).is_file() for name in (CONFIG, PARAMS))


def config_digest(directory: str | pathlib.Path) -> str:
    """Returns the sha256, in hex, of the files that say what model a directory holds."""
    total = hashlib.sha256()
    for path in (pathlib.Path(directory) / name for name in (CONFIG, PARAMS)):
        if path.is_file():
            total.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return total.hexdigest()


def load_config(directory: str | pathlib.Path) -> ModelConfig:
    """Reads the `ModelConfig` of a checkpoint directory, from its config.json or from Mistral's params.json.

    Where a Mistral has both, its own file counts: they differ in the scale of the softmax (docs/models.md).
    Two things beyond config.json count: end tokens that only generation_config.json names (Kimi-K2's chats end on one)
    are added, and MTP modules that config.json promises but the safetensors files do not hold (transformers writes
    such directories) are left out.

    Raises:
      ConfigError: config.json is missing, is no JSON object, or `from_hf` refuses it.
    """
    directory = pathlib.Path(directory)
    cfg = _from_files(directory)
    cfg = _add_generation_eos(cfg, directory / "generation_config.json")
    if cfg.num_nextn_predict_layers and not _holds_layer(directory, cfg.num_hidden_layers):
        _log.info("the checkpoint holds no multi-token prediction module, although config.json names one")
        cfg = dataclasses.replace(cfg, num_nextn_predict_layers=0)
    return cfg


def _from_files(directory: pathlib.Path) -> ModelConfig:
    config, params = directory / CONFIG, directory / PARAMS
    cfg = from_hf(_read_object(config)) if config.is_file() else None
    if cfg is None and not params.is_file():
        raise ConfigError(absent(directory))
    if cfg is not None and (cfg.family not in OF_MISTRAL or not params.is_file()):
        return cfg
    own = from_hf(as_config(_read_object(params)), PARAMS)
    return own if cfg is None else dataclasses.replace(own, family=cfg.family, fp8=cfg.fp8)


def stored_dtype(directory: str | pathlib.Path) -> str | None:
    """Returns what config.json calls the type of the weights, such as "float16"; None where it says nothing.

    Transformers 5 writes it as `dtype`, older versions as `torch_dtype`; it may lie with the language model's settings.

    Raises:
      ConfigError: config.json is no JSON object.
    """
    path = pathlib.Path(directory) / CONFIG
    if not path.is_file() and has_config(directory):
        return None
    config = _read_object(path)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str):
            return name.removeprefix("torch.")
    return None


def absent(directory: str | pathlib.Path) -> str:
    """Says that a directory has no configuration, and how to fetch a model where the name is one of Hugging Face's."""
    name = str(directory)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not pathlib.Path(name).exists():
        local = name.rpartition("/")[2]
        return (
            f"there is no directory {name!r}; a model of this name on huggingface.co is fetched with: "
            f"hf download {name} --local-dir {local}"
        )
    return f"there is no {CONFIG} in {name!r}; give a Hugging Face model directory"


def _read_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is no readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r} must hold a JSON object, but holds {type(value).__name__}")
    return value


def _add_generation_eos(cfg: ModelConfig, path: pathlib.Path) -> ModelConfig:
    if not path.is_file():
        return cfg
    more = Fields(_read_object(path), "generation_config.").token_ids("eos_token_id")
    ids = dict.fromkeys((*cfg.eos_token_ids, *(i for i in more if i < cfg.vocab_size)))
    return dataclasses.replace(cfg, eos_token_ids=tuple(ids))


def _holds_layer(directory: pathlib.Path, layer: int) -> bool:
    """Returns False only if the directory's safetensors files are there and none has a tensor of `layer`.

    DeepSeek-V4's layers behind the decoder have a name of their own.
    """
    index = next((directory / name for name in _INDEXES if (directory / name).is_file()), None)
    if index is not None:
        weight_map = _read_object(index).get("weight_map")
        names = set(weight_map) if isinstance(weight_map, dict) else set()
    else:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            return True
        names = set().union(*map(_tensor_names, files))
    return any(text_name(name).startswith((f"model.layers.{layer}.", "mtp.0.")) for name in names)


def _tensor_names(path: pathlib.Path) -> set[str]:
    """Names in a safetensors file's header; none if it cannot be read, which is for the loader to report."""
    try:
        with open_regular(path) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(min(length, MAX_JSON_BYTES)))
    except (OSError, ValueError, struct.error):
        return set()
    return set(header) if isinstance(header, dict) else set()
