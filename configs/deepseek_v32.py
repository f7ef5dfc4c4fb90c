"""DeepSeek-V3.2: DeepSeek-V3.1 with sparse attention to 2,048 tokens per query."""

import dataclasses

from configs.deepseek_v31 import DEEPSEEK_V31
from dsv3.config.model import IndexerConfig

DEEPSEEK_V32 = dataclasses.replace(
    DEEPSEEK_V31, family="deepseek_v32", indexer=IndexerConfig(num_heads=64, head_dim=128, topk=2048)
)
