"""Up to where prefill of sparse attention masks: the one place that decides it, from shapes and a device's rates.

There are two forms to attend to chosen tokens. The sparse one copies the chosen rows of each query and attends to them
in absorbed form; its time does not depend on the context. The masked one expands the cached latents of all requests
once and attends to all of them; its time grows with them. Scores and choice are the same in both. The masked form has
room for a number of tokens, which its program needs to know: the number at which both take as long.
"""

import math

from dsv3.cache.layout import row_bytes
from dsv3.config import ModelConfig

KEY_BLOCK = 128
"""What the room is a multiple of: whole blocks of keys of the kernels."""

# Operations and bytes per second of an H200: what DeepSeek's kernels reach of an H800's peaks on 108 of its 132
# multiprocessors (FlashMLA 580 of 989 TFLOP/s on all, expanded attention 535, DeepGEMM's products 993 of 1979), and the
# data sheet's 4.8 TB/s. What counts is how many operations a GPU has per byte: an H200 206, an H100 295, an A100 156,
# an L40S 419. Where there are more, copies cost less beside products, and the two forms cross somewhat later.
_ABSORBED = 580e12 * 108 / 132
_EXPANDED = 535e12 / 1.25 / 1.04  # with what else a prefill step does per product (`dsv3.plan.sparse`), and the mask
_PRODUCTS = 993e12 / 1.25
_HBM = 4.8e12

_LEAST_GAIN = 2  # times the tokens that are chosen; a program with less room would seldom run


def masked_room(model: ModelConfig, cache_dtype: str, tokens: int, split: int = 1) -> int:
    """Returns the tokens up to which `tokens` queries of a micro-batch mask; 0 where copying always is faster.

    All tokens of the step's requests count, each request's in whole pages. `split` devices share the heads. Each query
    is taken to attend to a choice, and all to be the last of one prompt, which sees most.
    """
    if model.indexer is None:
        return 0
    H, topk = model.num_attention_heads / split, model.indexer.topk
    R, V, N = model.kv_lora_rank, model.v_head_dim, model.qk_nope_head_dim
    copied = 2 * row_bytes(model, cache_dtype) / _HBM + 2 * H * (model.latent_dim + R) / _ABSORBED
    pair = 2 * H * (model.qk_head_dim + V) / _EXPANDED
    expanded = 2 * H * (N + V) * R / (_PRODUCTS if model.fp8 else _PRODUCTS / 2)
    # tokens * topk * copied = tokens * (room - tokens / 2) * pair + room * expanded
    room = tokens * (topk * copied + pair * tokens / 2) / (tokens * pair + expanded)
    room = math.floor(room / KEY_BLOCK) * KEY_BLOCK
    return room if room >= _LEAST_GAIN * topk else 0
