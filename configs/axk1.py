"""A.X-K1 (519B-A33B, SK Telecom): DeepSeek-V3 with 192 experts, 64 heads, and a norm after the experts.

The values are the defaults of transformers' AXK1Config; the published config.json may have a longer context with YaRN.
"""

from dsv3.config.model import ModelConfig

AXK1 = ModelConfig(
    family="axk1",
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
    n_routed_experts=192,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=8,
    topk_group=4,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    rope_theta=10000.0,
    max_position_embeddings=32768,
    bos_token_id=163691,
    eos_token_ids=(163691,),
    post_moe_norm=True,
)
