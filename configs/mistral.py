"""Models of Mistral AI."""

import dataclasses

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.config.model import QueryScaling, YarnConfig

MISTRAL_LARGE_3 = dataclasses.replace(
    DEEPSEEK_V3,
    family="mistral_large_3",
    vocab_size=131072,
    intermediate_size=16384,
    moe_intermediate_size=4096,
    n_routed_experts=128,
    num_experts_per_tok=4,
    topk_method="greedy",
    scoring_func="softmax",
    routed_scaling_factor=1.0,
    yarn=YarnConfig(factor=36.0, original_max_position_embeddings=8192, mscale=0.0, mscale_all_dim=0.0),
    query_scaling=QueryScaling(beta=0.1, original_max_position_embeddings=8192),
    max_position_embeddings=294912,
    bos_token_id=1,
    eos_token_ids=(2,),
    n_group=1,
    topk_group=1,
    num_nextn_predict_layers=0,
)
"""Mistral Large 3 (675B-A41B, 2.5B of them for images): DeepSeek-V3's shape with 128 experts of twice the width.

These values are from memory, not from the published params.json; they give 673B parameters, as published.
"""

MISTRAL_SMALL_4 = dataclasses.replace(
    MISTRAL_LARGE_3,
    family="mistral4",
    hidden_size=4096,
    num_hidden_layers=36,
    num_attention_heads=32,
    q_lora_rank=1024,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    first_k_dense_replace=0,
    yarn=YarnConfig(factor=128.0, original_max_position_embeddings=8192, mscale=0.0, mscale_all_dim=0.0),
    max_position_embeddings=1048576,
)
"""Mistral Small 4 (119B-A6.5B): latents of 256, softmax scores, queries scaled by position."""
