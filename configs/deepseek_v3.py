"""DeepSeek-V3 (arXiv:2412.19437), whose architecture DeepSeek-R1 has too, and its successors."""

import dataclasses

from dsv3.config.model import Fp8Config, IndexerConfig, ModelConfig, YarnConfig

DEEPSEEK_V3 = ModelConfig(
    family="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    n_group=8,
    topk_group=4,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    num_nextn_predict_layers=1,
    rope_theta=10000.0,
    yarn=YarnConfig(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0),
    max_position_embeddings=163840,
    bos_token_id=0,
    eos_token_ids=(1,),
    fp8=Fp8Config(),
)
"""DeepSeek-V3 (671B; arXiv:2412.19437)."""

DEEPSEEK_V31 = dataclasses.replace(DEEPSEEK_V3, fp8=Fp8Config(scale_fmt="ue8m0"))
"""DeepSeek-V3.1: DeepSeek-V3 with FP8 scales that are powers of two."""

DEEPSEEK_V32 = dataclasses.replace(
    DEEPSEEK_V31, family="deepseek_v32", indexer=IndexerConfig(num_heads=64, head_dim=128, topk=2048)
)
"""DeepSeek-V3.2: DeepSeek-V3.1 with sparse attention to 2,048 tokens per query."""
