"""Models of Moonshot AI: Kimi and Moonlight."""

import dataclasses

from dsv3.config.model import Fp8Config, ModelConfig, YarnConfig

_YARN = YarnConfig(
    factor=64.0,
    original_max_position_embeddings=4096,
    beta_fast=1.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)

KIMI_K2 = ModelConfig(
    family="kimi_k2",
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.827,
    first_k_dense_replace=1,
    rope_theta=50000.0,
    yarn=dataclasses.replace(_YARN, factor=32.0),
    max_position_embeddings=131072,
    bos_token_id=163584,
    eos_token_ids=(163585,),
    fp8=Fp8Config(),
)
"""Kimi-K2 (1T): DeepSeek-V3 with 384 experts, 64 heads and no expert groups."""

KIMI_K2_THINKING = dataclasses.replace(
    KIMI_K2,
    max_position_embeddings=262144,
    yarn=_YARN,
    fp8=None,
    int4_experts=True,
)
"""Kimi-K2-Thinking: Kimi-K2 with a longer context, INT4 routed experts and bfloat16 for the rest."""

KIMI_K25 = dataclasses.replace(
    KIMI_K2_THINKING,
    family="kimi_k25",
    yarn=dataclasses.replace(_YARN, beta_fast=32.0),
)
"""The language model of Kimi-K2.5: Kimi-K2 with a longer context and INT4 experts."""

MOONLIGHT_16B_A3B = ModelConfig(
    family="deepseek_v3",
    vocab_size=163840,
    hidden_size=2048,
    num_hidden_layers=27,
    num_attention_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=11264,
    moe_intermediate_size=1408,
    n_routed_experts=64,
    num_experts_per_tok=6,
    n_shared_experts=2,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.446,
    first_k_dense_replace=1,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    max_position_embeddings=8192,
    bos_token_id=163584,
    eos_token_ids=(163586,),
)
"""Moonlight-16B-A3B: DeepSeek-V3's router on DeepSeek-V2-Lite's shape, plain rotary embedding."""
