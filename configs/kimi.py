"""Models of Moonshot AI: Kimi and Moonlight."""

import dataclasses

from configs.deepseek_v2 import DEEPSEEK_V2_LITE
from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.config.model import YarnConfig

_YARN = YarnConfig(
    factor=64.0,
    original_max_position_embeddings=4096,
    beta_fast=1.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)

KIMI_K2 = dataclasses.replace(
    DEEPSEEK_V3,
    family="kimi_k2",
    vocab_size=163840,
    num_attention_heads=64,
    n_routed_experts=384,
    routed_scaling_factor=2.827,
    first_k_dense_replace=1,
    rope_theta=50000.0,
    yarn=dataclasses.replace(_YARN, factor=32.0),
    max_position_embeddings=131072,
    bos_token_id=163584,
    eos_token_ids=(163585,),
    n_group=1,
    topk_group=1,
    num_nextn_predict_layers=0,
)
"""Kimi-K2 (1T): DeepSeek-V3 with 384 experts, 64 heads and no expert groups."""

KIMI_K2_THINKING = dataclasses.replace(
    KIMI_K2,
    max_position_embeddings=262144,
    yarn=_YARN,
    fp8=None,
    int4_experts=True,
)
"""Kimi-K2-Thinking: Kimi-K2 with a longer context, INT4 routed experts and bfloat16 for the rest."""

KIMI_K25 = dataclasses.replace(
    KIMI_K2_THINKING,
    family="kimi_k25",
    yarn=dataclasses.replace(_YARN, beta_fast=32.0),
)
"""The language model of Kimi-K2.5: Kimi-K2 with a longer context and INT4 experts."""

MOONLIGHT_16B_A3B = dataclasses.replace(
    DEEPSEEK_V2_LITE,
    family="deepseek_v3",
    vocab_size=163840,
    intermediate_size=11264,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.446,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    max_position_embeddings=8192,
    bos_token_id=163584,
    eos_token_ids=(163586,),
    yarn=None,
)
"""Moonlight-16B-A3B: DeepSeek-V3's router on DeepSeek-V2-Lite's shape, plain rotary embedding."""
