"""Mistral's own `params.json`, as the config.json that says the same."""

from collections.abc import Mapping
from typing import Any

from dsv3.config.hugging_face.fields import ConfigError, Fields

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
