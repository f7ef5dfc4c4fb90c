"""Models of Mistral AI."""

from dsv3.config.model import Fp8Config, ModelConfig, QueryScaling, YarnConfig

MISTRAL_LARGE_3 = ModelConfig(
    family="mistral_large_3",
    vocab_size=131072,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=16384,
    moe_intermediate_size=4096,
    n_routed_experts=128,
    num_experts_per_tok=4,
    n_shared_experts=1,
    topk_method="greedy",
    scoring_func="softmax",
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    first_k_dense_replace=3,
    rope_theta=10000.0,
    yarn=YarnConfig(factor=36.0, original_max_position_embeddings=8192, mscale=0.0, mscale_all_dim=0.0),
    query_scaling=QueryScaling(beta=0.1, original_max_position_embeddings=8192),
    max_position_embeddings=294912,
    bos_token_id=1,
    eos_token_ids=(2,),
    fp8=Fp8Config(),
)
"""Mistral Large 3 (675B-A41B, 2.5B of them for images): DeepSeek-V3's shape with 128 experts of twice the width.

These values are from memory, not from the published params.json; they give 673B parameters, as published.
"""

MISTRAL_SMALL_4 = ModelConfig(
    family="mistral4",
    vocab_size=131072,
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    q_lora_rank=1024,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    n_routed_experts=128,
    num_experts_per_tok=4,
    n_shared_experts=1,
    topk_method="greedy",
    scoring_func="softmax",
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
    first_k_dense_replace=0,
    rope_theta=10000.0,
    yarn=YarnConfig(factor=128.0, original_max_position_embeddings=8192, mscale=0.0, mscale_all_dim=0.0),
    query_scaling=QueryScaling(beta=0.1, original_max_position_embeddings=8192),
    max_position_embeddings=1048576,
    bos_token_id=1,
    eos_token_ids=(2,),
    fp8=Fp8Config(),
)
"""Mistral Small 4 (119B-A6.5B): latents of 256, softmax scores, queries scaled by position."""
