"""The roofline model of attention: dense in prefill, sparse (DeepSeek-V3.2) and compressed (DeepSeek-V4) by its parts.

Dense attention materializes keys and values of new tokens, and reads cached ones in the cheaper form. Sparse attention
reads copies of the top-k rows; in prefill of short requests it is masked attention to all (`SparseCore.masked`). Its
kernels run one after the other, for a group of query rows at a time (`dsv3.model.layers.sparse`).

Compressed attention is to a window and to entries, whose rows its kernel reads where they are, for a group of queries
at a time (`dsv3.model.layers.compressed_paged`). Its figures are means over the decoder's layers: those that see a
window alone, that choose entries, and that see all.
"""

import dataclasses
import math

from dsv3.config.device_rates import MASKING, PREFILL_OVERHEAD
from dsv3.config.model import (
    INDEX_KEYS,
    WINDOW_LATENTS,
    CompressedAttention,
    ModelConfig,
    absorbed_operations,
    entry_weights,
    index_operations,
    materialization_operations,
    materialized_operations,
)
from dsv3.kv_cache.layout import row_bytes
from dsv3.model.forms import needs_topk
from pallas_kernels.compressed import kernel_bytes_of_query
from pallas_kernels.dsa import BYTES_AT_ONCE, topk_width
from tools.plan.deployment import PlannedBatch, Rates

_SCORE_BYTES = 4
_LAUNCHES = 5  # per group: scores, top-k, copies, attention, and the reduction of its splits
_MASKED_LAUNCHES = 2, 8  # per group: scores, top-k; once: pages, products for keys and values, bits, attention
_BIT_BYTES = 4 + 2 * 32  # one position read, and the memory sector of its bit read and written
# Of compressed attention, per group of queries: of layers that see a window alone; that choose entries (scores, top-k,
# attention); and that see all (attention to shares of a list, and their sum).
_WINDOW_LAUNCHES, _SPARSE_LAUNCHES, _HEAVY_LAUNCHES = 1, 3, 2
_POOLING_LAUNCHES = 2  # of a compressor, beside its product: it completes entries, and writes rings
_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class SparseCore:
    """Seconds of a layer's parts for one micro-batch, averaged over layers with and without an indexer.

    `choice` is the top-k selection, `copies` gather the selected rows. Masked attention copies nothing; it materializes
    keys and values of all tokens (`expansion`) and builds the `mask`. `pooling` makes DeepSeek-V4's entries.
    """

    scores: float
    choice: float
    copies: float
    attention: float
    launches: float
    expansion: float = 0.0
    mask: float = 0.0
    pooling: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return sum(dataclasses.astuple(self))

    @property
    def masked(self) -> bool:
        """Whether this is masked attention to all tokens."""
        return self.expansion > 0


def index_share(model: ModelConfig) -> float:
    """Returns the share of the decoder's layers that have an indexer."""
    return sum(layer < model.num_hidden_layers for layer in model.index_layers) / model.num_hidden_layers


def index_weights(model: ModelConfig, use_topk: bool) -> int:
    """Returns the elements of an indexer that a step reads: without top-k selection only those of its keys."""
    if model.indexer is None:
        return 0
    Hi, Y, D = model.indexer.num_heads, model.indexer.head_dim, model.hidden_size
    return Y * D + (Hi * (Y * (model.q_lora_rank or 0) + D) if use_topk else 0)


def attended_keys(model: ModelConfig, keys: float, min_keys: float | None = None) -> float:
    """Returns the mean number of keys that queries attend to, if they see `keys` on average: at most `index_topk`.

    With `min_keys` the first query sees that many, and the number grows linearly over the others.
    """
    return mean_up_to(model.index_topk, keys, keys if min_keys is None else min_keys)


def mean_up_to(most: float, mean: float, least: float) -> float:
    """Returns the mean of numbers, each cut to `most`, that grow linearly from `least` and have the mean `mean`."""
    largest = 2 * mean - least
    if largest <= most or least >= most:
        return min(mean, most)
    return ((most**2 - least**2) / 2 + most * (largest - most)) / (largest - least)


def sparse_roofline(model: ModelConfig, context: float, cache_dtype: str) -> tuple[float, float]:
    """Returns the least bytes of cache and operations of attention per layer, for one query token.

    They are dense attention's where the model has no indexer or the context fits `index_topk`.
    """
    seen, share = attended_keys(model, context), index_share(model) if needs_topk(model, context) else 0
    nbytes = seen * row_bytes(model, cache_dtype) + share * context * row_bytes(model, cache_dtype, INDEX_KEYS)
    return nbytes, seen * absorbed_operations(model) + share * context * index_operations(model)


def materialization_seconds(model: ModelConfig, rates: Rates) -> float:
    """Returns the seconds of a token's products with k_up and v_up of all heads, which are bfloat16 in every model."""
    return PREFILL_OVERHEAD * materialization_operations(model) / (rates.prefill_flops / (2 if model.fp8 else 1))


def sparse_core(model: ModelConfig, rates: Rates, batch: PlannedBatch, kernel_s: float) -> SparseCore:
    """Returns the parts of one layer for a micro-batch with top-k selection; a kernel launch takes `kernel_s`.

    Each query reads the index keys of its request, at the rate of HBM even from the L2 cache, and copies its top-k
    rows. One multiprocessor selects the rows of one query. Devices that divide pages divide keys, scores and copies.
    """
    b, share, seen = batch.tokens, index_share(model), attended_keys(model, batch.keys, batch.min_keys)
    row, key = row_bytes(model, batch.cache_dtype), row_bytes(model, batch.cache_dtype, INDEX_KEYS)
    score_flops = rates.fp8_core_flops if batch.cache_dtype == "fp8" else rates.decode_core_flops
    n, topk = batch.context_split, model.index_topk
    pairs = b * batch.keys / n
    scored = batch.keys if n == 1 else batch.keys / n + n * topk  # and again among the best of all devices
    chosen = math.ceil(b / rates.multiprocessors) * scored / rates.selection
    choosing: dict[str, float] = {
        "scores": share * max(pairs * index_operations(model) / score_flops, pairs * (key + _SCORE_BYTES) / rates.hbm),
        "choice": share * chosen,
    }
    if batch.kv_capacity:
        return SparseCore(**choosing, **_masked(model, rates, batch, kernel_s))
    core = b * seen * absorbed_operations(model) / batch.split / rates.decode_core_flops
    groups = math.ceil(b * topk_width(model.index_topk) * row / BYTES_AT_ONCE)
    return SparseCore(
        **choosing,
        copies=2 * b * seen / n * row / rates.hbm,
        attention=max(core, b * seen / n * row / rates.hbm),
        launches=groups * _LAUNCHES * kernel_s,
    )


def _masked(model: ModelConfig, rates: Rates, batch: PlannedBatch, kernel_s: float) -> dict[str, float]:
    """Returns the seconds of masked attention: it materializes the whole capacity and multiplies all visible keys."""
    b, kv_capacity = batch.tokens, batch.kv_capacity
    core = b * batch.keys * materialized_operations(model) / batch.split / rates.prefill_core_flops
    groups = math.ceil(b * _SCORE_BYTES * kv_capacity / BYTES_AT_ONCE)
    bits = b * attended_keys(model, batch.keys, batch.min_keys) * _BIT_BYTES + kv_capacity // 32 * b * 4
    return {
        "copies": 0.0,
        "attention": PREFILL_OVERHEAD * MASKING * core,
        "launches": (groups * _MASKED_LAUNCHES[0] + _MASKED_LAUNCHES[1]) * kernel_s,
        "expansion": kv_capacity * materialization_seconds(model, rates) / batch.split,
        "mask": bits / rates.hbm,
    }


def dense_core(model: ModelConfig, rates: Rates, batch: PlannedBatch) -> float:
    """Returns the seconds of a layer's attention for a prefill micro-batch, without keys and values of new tokens.

    Cached tokens are the `min_keys` of each prompt and what earlier batches computed of a prompt longer than one batch.
    Takes the faster form, as the engine does.
    """
    return min(dense_forms(model, rates, batch))


def dense_forms(model: ModelConfig, rates: Rates, batch: PlannedBatch) -> tuple[float, float]:
    """Returns the seconds of both forms, absorbed and materialized.

    The absorbed form multiplies cached latents, and needs two more products for queries and outputs. The materialized
    form computes keys and values from the latents.
    """
    cached, prompts = _cached(batch)
    pairs, token = batch.tokens * cached, materialization_seconds(model, rates) / batch.split
    pair = materialized_operations(model) / batch.split / rates.prefill_core_flops
    absorbed = pairs * absorbed_operations(model) / batch.split / rates.decode_core_flops
    own = PREFILL_OVERHEAD * (batch.tokens * batch.keys - pairs) * pair
    return (
        own + absorbed + batch.tokens * token,
        own + PREFILL_OVERHEAD * pairs * pair + prompts * cached * token,
    )


def _cached(batch: PlannedBatch) -> tuple[float, float]:
    """Returns the mean cached tokens of a prompt, and the number of prompts in the batch."""
    if batch.min_keys is None:
        return 0.0, 0.0
    new = 2 * (batch.keys - batch.min_keys)
    return batch.min_keys + max(0.0, (new - batch.tokens) / 2), max(1.0, batch.tokens / max(new, 1.0))


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
    score_flops, core_flops = rates.decode_core_flops, rates.listed_core_flops
    if batch.cache_dtype == "fp8":
        score_flops, core_flops = rates.fp8_core_flops, rates.listed_fp8_core_flops
    scores = max(keys * index_operations(model) / score_flops, keys * (key + _SCORE_BYTES) / rates.hbm)
    core = max(seen * absorbed_operations(model) / batch.split / core_flops, rows * row / rates.hbm)
    choosing, seeing_all = _groups(model, batch)
    launches = sparse * choosing * _SPARSE_LAUNCHES + heavy * seeing_all * _HEAVY_LAUNCHES
    launches += (1 - sparse - heavy) * _WINDOW_LAUNCHES + (2 * sparse + heavy) * _POOLING_LAUNCHES
    return SparseCore(
        scores=b * scores / L,
        choice=math.ceil(b / rates.multiprocessors) * (keys + again) / L / rates.selection,
        copies=0.0,
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


def _groups(model: ModelConfig, batch: PlannedBatch) -> tuple[int, int]:
    """Returns the groups of queries of a layer that chooses entries, and of one that sees all.

    What is made for a group stays within `BYTES_AT_ONCE`: scores, numbers of rows, and shares of a list. Page tables
    hold the model's whole context.
    """
    compressed, n = _compressed(model), batch.context_split
    tokens, heavy = model.max_position_embeddings // n, min(compressed.heavy_ratios, default=0)
    listed = compressed.window + (tokens // heavy if heavy else 0)
    shares = kernel_bytes_of_query(model.num_attention_heads * n // batch.split, model.latent_dim, listed)
    scores = _SCORE_BYTES * tokens // compressed.sparse_ratio
    return math.ceil(batch.tokens * scores / BYTES_AT_ONCE), math.ceil(batch.tokens * shares / BYTES_AT_ONCE)


def _compressed(model: ModelConfig) -> CompressedAttention:
    assert model.compressed is not None
    return model.compressed
