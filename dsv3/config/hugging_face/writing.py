"""`ModelConfig` to the config.json that says the same."""

import dataclasses
from typing import Any

from dsv3.config.hugging_face.fields import ConfigError
from dsv3.config.hugging_face.indexer import indexer_to_hf
from dsv3.config.hugging_face.quantization import quantization_to_hf
from dsv3.config.hugging_face.rotary import Rotary, mistral_rope_parameters
from dsv3.config.model import ModelConfig

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
}


def to_hf(cfg: ModelConfig) -> dict[str, Any]:
    """Returns the config.json of `cfg`: `from_hf(to_hf(cfg)) == cfg`, and transformers reads it.

    Members whose code is DeepSeek-V3's (Kimi-K2, also within K2.5) are written as such, and Mistral Large 3 as
    mistral4.

    Raises:
      ConfigError: `cfg` has settings that the Hugging Face format cannot say.
    """
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
    if model_type != "mistral4":
        return {"rope_scaling": None if cfg.yarn is None else {"type": "yarn", **dataclasses.asdict(cfg.yarn)}}
    rotary = Rotary(cfg.rope_theta, cfg.yarn, cfg.query_scaling)
    return {"rope_parameters": mistral_rope_parameters(rotary, cfg.qk_rope_head_dim / cfg.qk_head_dim)}


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
