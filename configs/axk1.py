"""A.X-K1 (519B-A33B, SK Telecom): DeepSeek-V3 with 192 experts, 64 heads, and a norm after the experts.

The values are the defaults of transformers' AXK1Config; the published config.json may have a longer context with YaRN.
"""

import dataclasses

from configs.deepseek_v3 import DEEPSEEK_V3

AXK1 = dataclasses.replace(
    DEEPSEEK_V3,
    family="axk1",
    vocab_size=163840,
    num_attention_heads=64,
    n_routed_experts=192,
    first_k_dense_replace=1,
    max_position_embeddings=32768,
    bos_token_id=163691,
    eos_token_ids=(163691,),
    post_moe_norm=True,
    num_nextn_predict_layers=0,
    yarn=None,
    fp8=None,
)
