"""DeepSeek-V2 (arXiv:2405.04434)."""

import dataclasses

from dsv3.config.model import ModelConfig, YarnConfig

DEEPSEEK_V2 = ModelConfig(
    family="deepseek_v2",
    vocab_size=102400,
    hidden_size=5120,
    num_hidden_layers=60,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    num_experts_per_tok=6,
    n_shared_experts=2,
    n_group=8,
    topk_group=3,
    topk_method="group_limited_greedy",
    scoring_func="softmax",
    norm_topk_prob=False,
    routed_scaling_factor=16.0,
    first_k_dense_replace=1,
    rope_theta=10000.0,
    yarn=YarnConfig(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707),
    max_position_embeddings=163840,
    bos_token_id=100000,
    eos_token_ids=(100001,),
)
"""DeepSeek-V2 (236B; arXiv:2405.04434)."""

DEEPSEEK_V2_LITE = dataclasses.replace(
    DEEPSEEK_V2,
    hidden_size=2048,
    num_hidden_layers=27,
    num_attention_heads=16,
    q_lora_rank=None,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    n_routed_experts=64,
    topk_method="greedy",
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
)
"""DeepSeek-V2-Lite (16B): no query latent, one expert group."""
