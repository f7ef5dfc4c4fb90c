"""DeepSeek-V4-Flash-0731: other weights, and DSpark's stages in place of the MTP module."""

import dataclasses

from configs.deepseek_v4_flash import DEEPSEEK_V4_FLASH
from dsv3.config.model import DSparkConfig

DEEPSEEK_V4_FLASH_0731 = dataclasses.replace(
    DEEPSEEK_V4_FLASH,
    num_nextn_predict_layers=0,
    dspark=DSparkConfig(stages=3, block_size=5, noise_token_id=128799, target_layers=(40, 41, 42), markov_rank=256),
)
