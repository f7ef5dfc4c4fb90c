"""DeepSeek-V4-Pro-0813: other weights, and DSpark's stages in place of the MTP module."""

import dataclasses

from configs.deepseek_v4_pro import DEEPSEEK_V4_PRO
from dsv3.config.model import DSparkConfig

DEEPSEEK_V4_PRO_0813 = dataclasses.replace(
    DEEPSEEK_V4_PRO,
    num_nextn_predict_layers=0,
    dspark=DSparkConfig(stages=3, block_size=5, noise_token_id=128799, target_layers=(58, 59, 60), markov_rank=512),
)
