"""DeepSeek-R1 (arXiv:2501.12948): the architecture of DeepSeek-V3 with other weights."""

from configs.deepseek_v3 import DEEPSEEK_V3

DEEPSEEK_R1 = DEEPSEEK_V3
