"""DeepSeek-V4-Pro (1.6T, April 2026): 30 layers choose entries, 31 see all."""

import dataclasses

from configs.deepseek_v4_flash import DEEPSEEK_V4_FLASH

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
