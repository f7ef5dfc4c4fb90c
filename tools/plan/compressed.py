"""The roofline model of attention to a window and to compressed entries (DeepSeek-V4), by its parts.

Every query copies the rows that it attends to, in groups of queries, as `dsv3.model.layers.compressed_paged` does. All
figures are means over the decoder's layers: those that see a window alone, that choose entries, and that see all.
"""

import math

from dsv3.config.model import (
    INDEX_KEYS,
    WINDOW_LATENTS,
    CompressedAttention,
    ModelConfig,
    absorbed_operations,
    entry_weights,
    index_operations,
)
from dsv3.kv_cache.layout import row_bytes
from pallas_kernels.dsa import BYTES_AT_ONCE
from tools.plan.attention import SparseCore, mean_up_to
from tools.plan.deployment import PlannedBatch, Rates

_SCORE_BYTES = 4
_LAUNCHES = 3  # per group: copies, attention, and the reduction of its splits
_CHOICE_LAUNCHES = 2  # per group: scores, top-k
_POOLING_LAUNCHES = 2  # of a compressor, beside its product: it completes entries, and writes rings
_FLOAT32 = 4


def rows_seen(model: ModelConfig, keys: float, min_keys: float | None = None) -> tuple[float, float]:
    """Returns how many rows a query attends to in all layers together, and how many index keys it scores.

    Queries see `keys` tokens on average, the first `min_keys` (`mean_up_to`).
    """
    compressed = _compressed(model)
    ratio, least = compressed.sparse_ratio, keys if min_keys is None else min_keys
    window = model.num_hidden_layers * mean_up_to(compressed.window, keys, least)
    chosen = compressed.num_sparse * mean_up_to(compressed.indexer.topk, keys / ratio, least / ratio)
    seen = sum(keys / heavy for heavy in compressed.heavy_ratios)
    return window + chosen + seen, compressed.num_sparse * keys / ratio


def cache_reads(model: ModelConfig, context: float, cache_dtype: str) -> tuple[float, float]:
    """Returns the bytes that a decoded token reads in all layers: of rows that it attends to, and of index keys."""
    rows, keys = rows_seen(model, context)
    return rows * row_bytes(model, cache_dtype, WINDOW_LATENTS), keys * row_bytes(model, cache_dtype, INDEX_KEYS)


def core_operations(model: ModelConfig, context: float) -> float:
    """Returns the operations of attention and of index scores in all layers for one query token."""
    rows, keys = rows_seen(model, context)
    return rows * absorbed_operations(model) + keys * index_operations(model)


def compressed_core(model: ModelConfig, rates: Rates, batch: PlannedBatch, kernel_s: float) -> SparseCore:
    """Returns the parts of one layer for a micro-batch; a kernel launch takes `kernel_s`.

    Devices of a rank share the heads, and nothing else unless they divide pages: then each reads and scores its share,
    of the window's rows too. One multiprocessor selects the entries of one query. Each query reads the index keys of
    its request, at the rate of HBM even from the L2 cache.
    """
    compressed, b, L, n = _compressed(model), batch.tokens, model.num_hidden_layers, batch.context_split
    seen, scored = rows_seen(model, batch.keys, batch.min_keys)
    rows, keys = seen / n, scored / n
    again = 0 if n == 1 else compressed.num_sparse * n * compressed.indexer.topk  # among the best of all devices
    row, key = (row_bytes(model, batch.cache_dtype, name) for name in (WINDOW_LATENTS, INDEX_KEYS))
    sparse, heavy = compressed.num_sparse / L, compressed.num_heavy / L
    score_flops = rates.fp8_core_flops if batch.cache_dtype == "fp8" else rates.decode_core_flops
    scores = max(keys * index_operations(model) / score_flops, keys * (key + _SCORE_BYTES) / rates.hbm)
    core = max(seen * absorbed_operations(model) / batch.split / rates.decode_core_flops, rows * row / rates.hbm)
    groups = _groups(model, batch)
    launches = groups * (_LAUNCHES + sparse * _CHOICE_LAUNCHES) + (2 * sparse + heavy) * _POOLING_LAUNCHES
    return SparseCore(
        scores=b * scores / L,
        choice=math.ceil(b / rates.multiprocessors) * (keys + again) / L / rates.selection,
        copies=2 * b * rows / L * row / rates.hbm,
        attention=b * core / L,
        launches=launches * kernel_s,
        pooling=b * pooling_bytes(model) / L / rates.hbm,
    )


def pooling_bytes(model: ModelConfig) -> int:
    """Returns the bytes that the compressors of all layers read and write for one token.

    They write what a token gives, values and scores in float32, and read it once for every entry that it is part of.
    """
    compressed, d, Y = _compressed(model), model.latent_dim, _compressed(model).indexer.head_dim
    sparse, heavy = 4 * (d + Y) * 3, 2 * d * 2  # a token is part of two entries where they overlap
    return _FLOAT32 * (compressed.num_sparse * sparse + compressed.num_heavy * heavy)


def product_elements(model: ModelConfig) -> tuple[int, int]:
    """Returns the elements of the products of compressors and indexers in all layers: FP8 ones, and bfloat16 ones."""
    compressed = _compressed(model)
    queries = compressed.num_sparse * compressed.indexer.num_heads * compressed.indexer.head_dim
    fp8 = queries * (model.q_lora_rank or 0)
    return fp8, entry_weights(model) - fp8


def product_launches(model: ModelConfig) -> float:
    """Returns the products of compressors and indexers in a layer, on average."""
    compressed = _compressed(model)
    return (4 * compressed.num_sparse + compressed.num_heavy) / model.num_hidden_layers


def _groups(model: ModelConfig, batch: PlannedBatch) -> int:
    """Returns the groups of queries of a layer that chooses entries: copies and logits stay within `BYTES_AT_ONCE`."""
    compressed = _compressed(model)
    copies = compressed.window + compressed.indexer.topk
    scores = _SCORE_BYTES * batch.max_keys / compressed.sparse_ratio / batch.context_split
    logits = _SCORE_BYTES * model.num_attention_heads * batch.context_split // batch.split
    each = max(scores, copies * max(logits, 2 * model.latent_dim))
    return math.ceil(batch.tokens * each / BYTES_AT_ONCE)


def _compressed(model: ModelConfig) -> CompressedAttention:
    assert model.compressed is not None
    return model.compressed
