"""Models of Z.ai: GLM."""

import dataclasses

from dsv3.config.model import IndexerConfig, ModelConfig

GLM_4_7_FLASH = ModelConfig(
    family="glm4_moe_lite",
    vocab_size=154880,
    hidden_size=2048,
    num_hidden_layers=47,
    num_attention_heads=20,
    q_lora_rank=768,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    intermediate_size=10240,
    moe_intermediate_size=1536,
    n_routed_experts=64,
    num_experts_per_tok=4,
    n_shared_experts=1,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=1.8,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
    rms_norm_eps=1e-5,
    rope_theta=1000000.0,
    max_position_embeddings=202752,
    eos_token_ids=(154820, 154827, 154829),
)
"""GLM-4.7-Flash (30B-A3B): wide heads, 64 experts without groups, and an MTP module."""

GLM_5 = dataclasses.replace(
    GLM_4_7_FLASH,
    family="glm_moe_dsa",
    hidden_size=6144,
    num_hidden_layers=78,
    num_attention_heads=64,
    q_lora_rank=2048,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    indexer=IndexerConfig(num_heads=32, head_dim=128, topk=2048, interleaved=True),
    eos_token_ids=(),
)
"""GLM-5 (744B-A40B): sparse attention like DeepSeek-V3.2's, wide heads, and experts without groups.

GLM-5.2 shares an indexer's top-k among four layers (`shared_layers` in its own file).
"""
