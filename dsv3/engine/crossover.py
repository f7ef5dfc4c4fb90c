"""Which form prefill's attention to cached tokens takes: the one place that decides it, from shapes and device rates.

Dense attention has two forms. The absorbed one multiplies cached latents; the expanded one makes keys and values of
them first, and then takes 0.29 of the operations per pair of tokens (DeepSeek-V3). Its program has room for a number of
tokens, and whether it pays depends on how many new tokens share the cached ones of a step.

Sparse attention has two forms, too. The sparse one copies the chosen rows of each query and attends to them in absorbed
form; its time does not depend on the context. The masked one expands the cached latents of all requests once and
attends to all of them; its time grows with them. Scores and choice are the same in both. The masked form has room for a
number of tokens, which its program needs to know: the number at which both take as long.

What counts is how many operations a GPU has per byte: an H200 206, an H100 295, an A100 153, an L40S 419. Where there
are more, copies cost more beside products, and the forms cross somewhat later.
"""

import math

from dsv3.config import device_rates
from dsv3.config.device_rates import MASKING, PREFILL_OVERHEAD, Peaks
from dsv3.config.model import ModelConfig
from dsv3.kv_cache.layout import row_bytes
from dsv3.model.layers.context import BYTES_AT_ONCE, heads_at_once

KEY_BLOCK = 128
"""What the room is a multiple of: whole blocks of keys of the kernels."""

_LEAST_GAIN = 2  # times the tokens that are chosen; a program with less room would seldom run
_LEAST_TOKENS = 2  # times the new tokens from which on the expanded form pays: those of a step may be several requests'
_MOST_CONTEXT = 2**18  # tokens; their latents take 302 MB
_QUERIES, _BLOCKS = 128, 128  # of a thread block of the prefill kernel; that fill the multiprocessors


def context_room(model: ModelConfig, peaks: Peaks, tokens: int, split: int = 1) -> int:
    """Returns the tokens that the expanded program of `tokens` queries of a micro-batch has room for; 0: there is none.

    All tokens of the step's requests count, each request's in whole pages. `split` devices share the heads. Keys and
    values are made of as many heads at once as fill the multiprocessors with their queries, and fit in memory.
    """
    absorbed, expanded, expansion = _dense_seconds(model, peaks, split)
    if model.indexer is not None or tokens * (absorbed - expanded) < _LEAST_TOKENS * expansion:
        return 0
    heads = model.num_attention_heads // split
    least = min(heads, -(-_QUERIES * _BLOCKS // tokens))
    together = next(n for n in range(least, heads + 1) if heads % n == 0)
    room = BYTES_AT_ONCE // (together * _head_bytes(model))
    return min(room, _MOST_CONTEXT) // KEY_BLOCK * KEY_BLOCK


def context_pays(
    model: ModelConfig,
    peaks: Peaks,
    tokens: int,
    pairs: int,
    keys: int,
    room: int,
    split: int = 1,
    micro_batches: int = 1,
) -> bool:
    """Returns whether a step of `tokens` queries in all takes less time in expanded form than in absorbed form.

    There are `pairs` of a new token and a cached one, and `keys` tokens of requests to expand, in each micro-batch. The
    absorbed form expands new tokens, and multiplies their queries and outputs by the same weights.
    """
    absorbed, expanded, expansion = _dense_seconds(model, peaks, split)
    heads = model.num_attention_heads // split
    groups = heads // heads_at_once(heads, room * _head_bytes(model))
    more = micro_batches * (keys * expansion + 3 * groups * device_rates.LAUNCH_S)
    return pairs * (absorbed - expanded) + 2 * tokens * expansion > more


def _head_bytes(model: ModelConfig) -> int:
    """Returns the bytes of a token's key and value of one head, in 16 bits; the shared part of the key is no head's."""
    return 2 * (model.qk_nope_head_dim + model.v_head_dim)


def _dense_seconds(model: ModelConfig, peaks: Peaks, split: int) -> tuple[float, float, float]:
    """Returns the seconds of a pair of tokens, absorbed and expanded, and those of expanding one."""
    H, R = model.num_attention_heads / split, model.kv_lora_rank
    absorbed = 2 * H * (model.latent_dim + R) / _absorbed(peaks)
    expanded = 2 * H * (model.qk_head_dim + model.v_head_dim) / _expanded(peaks)
    return absorbed, expanded, _expansion(model, peaks, split)


def _absorbed(peaks: Peaks) -> float:
    """Returns the operations per second of attention to latents, on the multiprocessors that prefill has."""
    return peaks.bf16 * device_rates.DECODE_CORE_FLOPS * device_rates.PREFILL_TAKEN


def _expanded(peaks: Peaks) -> float:
    """Returns those of attention to keys and values, with what else a prefill does per product."""
    return peaks.bf16 * device_rates.PREFILL_CORE_FLOPS / PREFILL_OVERHEAD


def _expansion(model: ModelConfig, peaks: Peaks, split: int) -> float:
    """Returns the seconds of a token's products with k_up and v_up, which are bfloat16 in every model."""
    widths = model.qk_nope_head_dim + model.v_head_dim
    products = peaks.bf16 * device_rates.PREFILL_FLOPS / PREFILL_OVERHEAD
    return 2 * model.num_attention_heads / split * widths * model.kv_lora_rank / products


def masked_room(model: ModelConfig, peaks: Peaks, cache_dtype: str, tokens: int, split: int = 1) -> int:
    """Returns the tokens up to which `tokens` queries of a micro-batch mask; 0 where copying always is faster.

    All tokens of the step's requests count, each request's in whole pages. `split` devices share the heads. Each query
    is taken to attend to a choice, and all to be the last of one prompt, which sees most.
    """
    if model.indexer is None:
        return 0
    H, topk = model.num_attention_heads / split, model.indexer.topk
    R, V = model.kv_lora_rank, model.v_head_dim
    copied = 2 * row_bytes(model, cache_dtype) / peaks.hbm + 2 * H * (model.latent_dim + R) / _absorbed(peaks)
    pair = 2 * H * (model.qk_head_dim + V) * MASKING / _expanded(peaks)
    expanded = _expansion(model, peaks, split)
    # tokens * (topk * copied + expanded) = tokens * (room - tokens / 2) * pair + room * expanded: the copying form
    # multiplies its queries and outputs by k_up and v_up.
    room = tokens * (topk * copied + expanded + pair * tokens / 2) / (tokens * pair + expanded)
    room = math.floor(room / KEY_BLOCK) * KEY_BLOCK
    return room if room >= _LEAST_GAIN * topk else 0
