"""The language model of Kimi-K2.5 (Moonshot AI): Kimi-K2 with a longer context and INT4 experts."""

import dataclasses

from configs.kimi_k2_thinking import KIMI_K2_THINKING
from dsv3.config.model import YarnConfig

KIMI_K25 = dataclasses.replace(
    KIMI_K2_THINKING,
    family="kimi_k25",
    yarn=YarnConfig(
        factor=64.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
)
