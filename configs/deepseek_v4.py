"""DeepSeek-V4 (arXiv:2606.19348)."""

import dataclasses

from dsv3.config.model import (
    CompressedAttention,
    DSparkConfig,
    Fp8Config,
    HyperConnections,
    IndexerConfig,
    ModelConfig,
    YarnConfig,
)

DEEPSEEK_V4_FLASH = ModelConfig(
    family="deepseek_v4",
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    q_lora_rank=1024,
    kv_lora_rank=448,
    qk_nope_head_dim=448,
    qk_rope_head_dim=64,
    v_head_dim=512,
    intermediate_size=0,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=6,
    n_shared_experts=1,
    topk_method="noaux_tc",
    scoring_func="sqrtsoftplus",
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    first_k_dense_replace=0,
    num_nextn_predict_layers=1,
    num_hash_layers=3,
    swiglu_limit=10.0,
    rope_theta=10000.0,
    max_position_embeddings=1048576,
    bos_token_id=0,
    eos_token_ids=(1,),
    compressed=CompressedAttention(
        ratios=(0, 0, *(4, 128) * 20, 4),
        sparse_ratio=4,
        window=128,
        indexer=IndexerConfig(num_heads=64, head_dim=128, topk=512, interleaved=True),
        rope_theta=160000.0,
        yarn=YarnConfig(factor=16.0, original_max_position_embeddings=65536, mscale=0.0),
        output_groups=8,
        output_rank=1024,
    ),
    hyper_connections=HyperConnections(streams=4, sinkhorn_iterations=20, eps=1e-6),
    fp8=Fp8Config(scale_fmt="ue8m0"),
    fp4_experts=True,
)
"""DeepSeek-V4-Flash (284B, April 2026; arXiv:2606.19348): 2 layers see their window, 21 choose entries, 20 see all."""

DEEPSEEK_V4_FLASH_0731 = dataclasses.replace(
    DEEPSEEK_V4_FLASH,
    num_nextn_predict_layers=0,
    dspark=DSparkConfig(stages=3, block_size=5, noise_token_id=128799, target_layers=(40, 41, 42), markov_rank=256),
)
"""DeepSeek-V4-Flash-0731: other weights, and DSpark's stages in place of the MTP module."""

assert DEEPSEEK_V4_FLASH.compressed is not None

DEEPSEEK_V4_PRO = dataclasses.replace(
    DEEPSEEK_V4_FLASH,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    moe_intermediate_size=3072,
    n_routed_experts=384,
    routed_scaling_factor=2.5,
    compressed=dataclasses.replace(
        DEEPSEEK_V4_FLASH.compressed,
        ratios=(128, 128, *(4, 128) * 29, 4),
        indexer=dataclasses.replace(DEEPSEEK_V4_FLASH.compressed.indexer, topk=1024),
        output_groups=16,
    ),
)
"""DeepSeek-V4-Pro (1.6T, April 2026): 30 layers choose entries, 31 see all."""

DEEPSEEK_V4_PRO_0813 = dataclasses.replace(
    DEEPSEEK_V4_PRO,
    num_nextn_predict_layers=0,
    dspark=DSparkConfig(stages=3, block_size=5, noise_token_id=128799, target_layers=(58, 59, 60), markov_rank=512),
)
"""DeepSeek-V4-Pro-0813: other weights, and DSpark's stages in place of the MTP module."""
