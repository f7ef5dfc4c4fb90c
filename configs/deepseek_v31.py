"""DeepSeek-V3.1: DeepSeek-V3 with FP8 scales that are powers of two."""

import dataclasses

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.config.model import Fp8Config

DEEPSEEK_V31 = dataclasses.replace(DEEPSEEK_V3, fp8=Fp8Config(scale_fmt="ue8m0"))
