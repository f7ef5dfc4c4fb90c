"""Kimi-K2-Thinking (Moonshot AI): Kimi-K2 with a longer context, INT4 routed experts and bfloat16 for the rest."""

import dataclasses

from configs.kimi_k2 import KIMI_K2
from dsv3.config.model import YarnConfig

KIMI_K2_THINKING = dataclasses.replace(
    KIMI_K2,
    max_position_embeddings=262144,
    yarn=YarnConfig(
        factor=64.0,
        original_max_position_embeddings=4096,
        beta_fast=1.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    fp8=None,
    int4_experts=True,
)
