"""The roofline model of attention: dense attention in prefill, and sparse attention (DeepSeek-V3.2) by its parts.

Dense attention materializes keys and values of new tokens, and reads cached ones in the cheaper form. Sparse attention
reads copies of the top-k rows; in prefill of short requests it is masked attention to all (`SparseCore.masked`). Its
kernels run one after the other, for a group of query rows at a time (`dsv3.model.layers.sparse`).
"""

import dataclasses
import math

from dsv3.config.device_rates import MASKING, PREFILL_OVERHEAD
from dsv3.config.model import (
    INDEX_KEYS,
    ModelConfig,
    absorbed_operations,
    index_operations,
    materialization_operations,
    materialized_operations,
)
from dsv3.kv_cache.layout import row_bytes
from dsv3.model.forms import needs_topk
from pallas_kernels.dsa import BYTES_AT_ONCE, topk_width
from tools.plan.deployment import PlannedBatch, Rates

_SCORE_BYTES = 4
_LAUNCHES = 5  # per group: scores, top-k, copies, attention, and the reduction of its splits
_MASKED_LAUNCHES = 2, 8  # per group: scores, top-k; once: pages, products for keys and values, bits, attention
_BIT_BYTES = 4 + 2 * 32  # one position read, and the memory sector of its bit read and written


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
