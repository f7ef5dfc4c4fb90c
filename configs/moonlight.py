"""Moonlight-16B-A3B (Moonshot AI): DeepSeek-V3's router on DeepSeek-V2-Lite's shape, plain rotary embedding."""

from dsv3.config.model import ModelConfig

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
