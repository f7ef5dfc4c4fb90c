"""What checkpoints of the family call the tensors of a language model: one name for each, DeepSeek's."""

import re

# transformers 5.24 saves the layers of Kimi-K2.5's language model under the name that its vision tower has for them.
_NESTED = (
    ("model.language_model.", "model."),
    ("language_model.model.blocks.", "model.layers."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)
_OTHER_MEDIA = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_encoder|mm_projector|multi_modal_projector|vision_language_adapter"
    r"|patch_merger|pre_mm_projector_norm)\..*"
)
_SWIGLU = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MISTRAL_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MISTRAL_PARTS = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "gate": "mlp.gate",
}
_MISTRAL_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)")
_MISTRAL_SWIGLU = re.compile(r"(feed_forward|shared_experts|experts\.\d+)\.(w[123])")
_SUFFIXES = {
    "qscale_weight": "weight_scale_inv",
    "weight_scale": "weight_scale_inv",
    "qscale_act": "activation_scale",
    "weight_packed": "weight",
}


def is_of_other_media(name: str) -> bool:
    """Returns whether a tensor belongs to a vision or audio part of the model."""
    return _OTHER_MEDIA.fullmatch(name) is not None


def text_name(name: str) -> str:
    """Returns DeepSeek's name of a tensor; one that is not known stays as it is."""
    for prefix, ours in _NESTED:
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
            break
    if not name.startswith("model.") and (mistral := _of_mistral(name)) is not None:
        return mistral
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{_SUFFIXES[suffix]}" if suffix in _SUFFIXES else name


def _of_mistral(name: str) -> str | None:
    """Returns DeepSeek's name of a tensor that Mistral names, None for any other."""
    if name in _MISTRAL_TOP:
        return _MISTRAL_TOP[name]
    if (match := _MISTRAL_LAYER.fullmatch(name)) is None:
        return None
    layer, part, suffix = match.groups()
    if swiglu := _MISTRAL_SWIGLU.fullmatch(part):
        where = swiglu[1].replace("feed_forward", "mlp")
        part = f"{where if where == 'mlp' else f'mlp.{where}'}.{_SWIGLU[swiglu[2]]}"
    elif part in _MISTRAL_PARTS:
        part = _MISTRAL_PARTS[part]
    else:
        return None
    return f"model.layers.{layer}.{part}.{_SUFFIXES.get(suffix, suffix)}"
