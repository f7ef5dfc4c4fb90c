"""How long attention could take: dense attention of prefill, and the parts of sparse attention (DeepSeek-V3.2).

Dense attention expands new tokens, and takes cached ones in either form. Sparse attention is to copies of rows, or in
prefill of short requests masked attention to all (`SparseCore.masked`).
Its kernels run one after the other, for a group of query rows at a time (`dsv3.model.layers.sparse`). An estimate, like
all of `tools.plan.roofline`; no GPU has run these kernels.
"""

import dataclasses
import math

from dsv3.config.device_rates import MASKING, PREFILL_OVERHEAD
from dsv3.config.model import (
    INDEX_KEYS,
    ModelConfig,
    absorbed_operations,
    materialization_operations,
    materialized_operations,
)
from dsv3.kv_cache.layout import row_bytes
from dsv3.model.forms import must_choose
from pallas_kernels.dsa import BYTES_AT_ONCE, chosen_width
from tools.plan.deployment import PlannedBatch, Rates

_SCORE_BYTES = 4
_LAUNCHES = 5  # per group: scores, choice, copies, attention, and what joins its parts
_MASKED_LAUNCHES = 2, 8  # per group: scores and choice; once: pages, products for keys and values, bits, attention
_BIT_BYTES = 4 + 2 * 32  # a position is read, and a sector of memory for its bit read and written


@dataclasses.dataclass(frozen=True)
class SparseCore:
    """Seconds of a layer's parts for one micro-batch; those of layers without an indexer count as nothing.

    `copies` are those of chosen rows. Masked attention has none: it has `expansion` of all tokens, and the `mask`.
    """

    scores: float
    choice: float
    copies: float
    attention: float
    launches: float
    expansion: float = 0.0
    mask: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return sum(dataclasses.astuple(self))

    @property
    def masked(self) -> bool:
        """Whether it is masked attention to all tokens."""
        return self.expansion > 0


def index_operations(model: ModelConfig) -> int:
    """Returns the operations of an index score of one query token and one cached token."""
    return 2 * model.indexer.num_heads * model.indexer.head_dim if model.indexer else 0


def index_share(model: ModelConfig) -> float:
    """Returns the share of the decoder's layers that have an indexer."""
    return sum(layer < model.num_hidden_layers for layer in model.index_layers) / model.num_hidden_layers


def index_weights(model: ModelConfig, chooses: bool) -> int:
    """Returns the elements of an indexer that a step uses: a step that does not choose makes its keys alone."""
    if model.indexer is None:
        return 0
    Hi, Y, D = model.indexer.num_heads, model.indexer.head_dim, model.hidden_size
    return Y * D + (Hi * (Y * (model.q_lora_rank or 0) + D) if chooses else 0)


def attended(model: ModelConfig, keys: float, fewest: float | None = None) -> float:
    """Returns how many of `keys` tokens, a mean, queries attend to; all, unless an indexer chooses.

    Where `fewest` is given the first query sees that many, and the others evenly more.
    """
    topk, fewest = model.index_topk, keys if fewest is None else fewest
    most = 2 * keys - fewest
    if most <= topk or fewest >= topk:
        return min(keys, topk)
    return ((topk**2 - fewest**2) / 2 + topk * (most - topk)) / (most - fewest)


def sparse_floor(model: ModelConfig, context: float, cache_dtype: str) -> tuple[float, float]:
    """Returns the bytes of cache and the operations of attention that a layer cannot do without, for a query's token.

    Dense attention's where the model has no indexer, or the query need not choose.
    """
    seen, share = attended(model, context), index_share(model) if must_choose(model, context) else 0
    nbytes = seen * row_bytes(model, cache_dtype) + share * context * row_bytes(model, cache_dtype, INDEX_KEYS)
    return nbytes, seen * absorbed_operations(model) + share * context * index_operations(model)


def expansion_seconds(model: ModelConfig, rates: Rates) -> float:
    """Returns the seconds of a token's products with k_up and v_up of all heads; they are bfloat16 in every model."""
    return PREFILL_OVERHEAD * materialization_operations(model) / (rates.prefill_flops / (2 if model.fp8 else 1))


def sparse_core(model: ModelConfig, rates: Rates, batch: PlannedBatch, kernel_s: float) -> SparseCore:
    """Returns the parts of a layer of a micro-batch whose queries choose; a launch takes `kernel_s`.

    Each query reads its request's index keys for itself, from memory or from an L2 cache that is taken to be as fast,
    and copies its chosen rows. Rows are chosen by one multiprocessor each.
    """
    b, share, seen = batch.tokens, index_share(model), attended(model, batch.keys, batch.fewest)
    row, key = row_bytes(model, batch.cache_dtype), row_bytes(model, batch.cache_dtype, INDEX_KEYS)
    score_flops = rates.fp8_core_flops if batch.cache_dtype == "fp8" else rates.decode_core_flops
    pairs = b * batch.keys
    chosen = math.ceil(b / rates.multiprocessors) * batch.keys / rates.selection
    choosing: dict[str, float] = {
        "scores": share * max(pairs * index_operations(model) / score_flops, pairs * (key + _SCORE_BYTES) / rates.hbm),
        "choice": share * chosen,
    }
    if batch.room:
        return SparseCore(**choosing, **_masked(model, rates, batch, kernel_s))
    core = b * seen * absorbed_operations(model) / batch.split / rates.decode_core_flops
    groups = math.ceil(b * chosen_width(model.index_topk) * row / BYTES_AT_ONCE)
    return SparseCore(
        **choosing,
        copies=2 * b * seen * row / rates.hbm,
        attention=max(core, b * seen * row / rates.hbm),
        launches=groups * _LAUNCHES * kernel_s,
    )


def _masked(model: ModelConfig, rates: Rates, batch: PlannedBatch, kernel_s: float) -> dict[str, float]:
    """Returns the seconds of masked attention: all room is expanded, and all tokens that are seen are multiplied."""
    b, room = batch.tokens, batch.room
    core = b * batch.keys * materialized_operations(model) / batch.split / rates.prefill_core_flops
    groups = math.ceil(b * _SCORE_BYTES * room / BYTES_AT_ONCE)
    bits = b * attended(model, batch.keys, batch.fewest) * _BIT_BYTES + room // 32 * b * 4
    return {
        "copies": 0.0,
        "attention": PREFILL_OVERHEAD * MASKING * core,
        "launches": (groups * _MASKED_LAUNCHES[0] + _MASKED_LAUNCHES[1]) * kernel_s,
        "expansion": room * expansion_seconds(model, rates) / batch.split,
        "mask": bits / rates.hbm,
    }


def dense_core(model: ModelConfig, rates: Rates, batch: PlannedBatch) -> float:
    """Returns the seconds of a layer's attention for a prefill micro-batch, less keys and values of its own tokens.

    Cached tokens are those that were there before the batch: `fewest` of each prompt, and what earlier batches have
    computed of a prompt that is longer than one. The form that takes less is taken, as the engine does.
    """
    return min(dense_forms(model, rates, batch))


def dense_forms(model: ModelConfig, rates: Rates, batch: PlannedBatch) -> tuple[float, float]:
    """Returns the seconds of both forms, absorbed and expanded.

    Either cached latents are multiplied, with queries and outputs that two more products make; or keys and values are
    made of them.
    """
    cached, prompts = _cached(batch)
    pairs, token = batch.tokens * cached, expansion_seconds(model, rates) / batch.split
    pair = materialized_operations(model) / batch.split / rates.prefill_core_flops
    absorbed = pairs * absorbed_operations(model) / batch.split / rates.decode_core_flops
    own = PREFILL_OVERHEAD * (batch.tokens * batch.keys - pairs) * pair
    return (
        own + absorbed + batch.tokens * token,
        own + PREFILL_OVERHEAD * pairs * pair + prompts * cached * token,
    )


def _cached(batch: PlannedBatch) -> tuple[float, float]:
    """Returns the cached tokens of a prompt, a mean, and how many prompts the batch has tokens of."""
    if batch.fewest is None:
        return 0.0, 0.0
    new = 2 * (batch.keys - batch.fewest)
    return batch.fewest + max(0.0, (new - batch.tokens) / 2), max(1.0, batch.tokens / max(new, 1.0))
