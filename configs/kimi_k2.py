"""Kimi-K2 (1T, Moonshot AI): DeepSeek-V3 with 384 experts, 64 heads and no expert groups."""

from dsv3.config.model import Fp8Config, ModelConfig, YarnConfig

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
    yarn=YarnConfig(
        factor=32.0,
        original_max_position_embeddings=4096,
        beta_fast=1.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    max_position_embeddings=131072,
    bos_token_id=163584,
    eos_token_ids=(163585,),
    fp8=Fp8Config(),
)
