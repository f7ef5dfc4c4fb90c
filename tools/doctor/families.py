"""A dense layer and an MoE layer of each family of models, with random weights of the family's types."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from configs.deepseek_v2 import DEEPSEEK_V2_LITE
from configs.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V32
from configs.glm import GLM_4_7_FLASH, GLM_5
from configs.kimi import KIMI_K2_THINKING
from configs.mistral import MISTRAL_SMALL_4
from dsv3.checkpoint.quantize import abstract_int4, is_int4, rounding
from dsv3.config.model import ModelConfig
from dsv3.model.params import Int4Weight, Params, ParamSpec, declare, initialize

FAMILIES: Mapping[str, ModelConfig] = {
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3.2": DEEPSEEK_V32,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "Kimi-K2-Thinking": KIMI_K2_THINKING,
    "GLM-4.7-Flash": GLM_4_7_FLASH,
    "GLM-5": GLM_5,
    "Mistral-Small-4": MISTRAL_SMALL_4,
}
_INT4_DEVIATION = 4.6  # of -8 to 7, all as frequent


def two_layers(cfg: ModelConfig, *, narrow: bool) -> ModelConfig:
    """Returns a model of two layers of `cfg`, the MoE layer last, with few words and experts.

    The widths are those of `cfg`, or `narrow`: then hidden states, MLPs and the query's latent have two to four blocks
    of 128, and what attention works on stays as it is but for the number of heads. An indexer chooses fewer tokens, so
    that a short prompt has more.
    """
    fewer = 4 * cfg.n_group  # in each group more than the least that a router ranks it by
    few: dict[str, Any] = {
        "num_hidden_layers": 2,
        "first_k_dense_replace": min(1, cfg.first_k_dense_replace),
        "num_nextn_predict_layers": 0,
        "vocab_size": 1024,
        "n_routed_experts": max(fewer, 32),
    }
    if cfg.indexer is not None:
        few["indexer"] = dataclasses.replace(cfg.indexer, topk=64 if narrow else 512)
    if narrow:
        few |= {
            "hidden_size": 512,
            "num_attention_heads": 16,
            "q_lora_rank": cfg.q_lora_rank and 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 256,
        }
    return dataclasses.replace(cfg, **few)


def random_params(cfg: ModelConfig) -> Params:
    """Returns random parameters of the types that a server keeps them in; plain ones are bfloat16.

    Their deviation keeps what a layer adds of the size of what it is added to, at any width, so that each layer counts.
    """
    std = 0.45 * cfg.hidden_size**-0.5
    # This generator compiles in a fraction of the time of jax's own.
    drawn = initialize(cfg, jax.random.key(0, impl="rbg"), jnp.bfloat16, std=std)

    def stored(spec: ParamSpec, leaf: jax.Array) -> Any:
        if is_int4(cfg, spec):
            return _int4(spec, std)
        if cfg.fp8 is not None and spec.quantizable:
            return rounding(cfg.fp8.scale_fmt == "ue8m0")(leaf)
        return leaf

    return jax.tree.map(stored, declare(cfg), drawn)


def _int4(spec: ParamSpec, std: float) -> Int4Weight:
    words_key, scale_key = jax.random.split(jax.random.key(spec.shape[-1], impl="rbg"))
    shapes = abstract_int4(spec.shape)
    words = jax.random.bits(words_key, shapes.data.shape, jnp.uint32).astype(shapes.data.dtype)
    scale = jax.random.uniform(scale_key, shapes.scale.shape, jnp.float32, 0.5, 1.5) * (std / _INT4_DEVIATION)
    return Int4Weight(words, scale.astype(shapes.scale.dtype))
