"""DeepSeek-V3's published training run, for planning: 14.8T tokens on 2,048 H800 (arXiv:2412.19437, 4.2).

One phase replaces the report's: the largest batch, the highest learning rate, and one cosine. Weights are bfloat16.
"""

import dataclasses

from configs.deepseek_v3 import DEEPSEEK_V3
from training.config import TrainingConfig

TRAINING = TrainingConfig(
    model=dataclasses.replace(DEEPSEEK_V3, fp8=None),
    steps=14_800_000_000_000 // (15360 * 4096),
    chat_steps=0,
    batch_size=15360,
    sequence_length=4096,
    learning_rate=2.2e-4,
    warmup_steps=2000,
    final_rate_fraction=0.033,
    init_std=0.006,
    router_bias_rate=0.001,
    sequence_balance_weight=0.0001,
    compute_dtype="bfloat16",
)
