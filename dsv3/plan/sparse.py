"""How long sparse attention could take (DeepSeek-V3.2): index scores, the choice, copies and attention to the chosen.

Its kernels run one after the other, for a group of query rows at a time (`dsv3.model.layers.sparse`). An estimate, like
all of `dsv3.plan.roofline`; no GPU has run these kernels.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

from dsv3.cache.layout import key_bytes, row_bytes
from dsv3.config import ModelConfig
from pallas_kernels.dsa import BYTES_AT_ONCE, chosen_width

if TYPE_CHECKING:
    from dsv3.plan.roofline import MicroBatch, Rates

SELECT_CYCLES = 1.35
"""Cycles of a multiprocessor per score: of 16 warps on 4 schedulers each has 4 x 170 and 695 instructions for 4,096."""

_SCORE_BYTES = 4
_LAUNCHES = 5  # per group: scores, choice, copies, attention, and what joins its parts


@dataclasses.dataclass(frozen=True)
class SparseCore:
    """Seconds of a layer's parts for one micro-batch; those of layers without an indexer count as nothing."""

    scores: float
    choice: float
    copies: float
    attention: float
    launches: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.scores + self.choice + self.copies + self.attention + self.launches


def core_operations(model: ModelConfig) -> int:
    """Returns the operations of absorbed attention for one query token and one cached token."""
    return 2 * model.num_attention_heads * (model.latent_dim + model.kv_lora_rank)


def index_operations(model: ModelConfig) -> int:
    """Returns the operations of an index score of one query token and one cached token."""
    return 2 * model.indexer.num_heads * model.indexer.head_dim if model.indexer else 0


def index_share(model: ModelConfig) -> float:
    """Returns the share of the decoder's layers that have an indexer."""
    return sum(layer < model.num_hidden_layers for layer in model.index_layers) / model.num_hidden_layers


def must_choose(model: ModelConfig, most: float) -> bool:
    """Returns whether a step whose queries see `most` tokens at most takes the sparse path."""
    return model.indexer is not None and most > model.indexer.topk


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
    if model.indexer is None:
        return keys
    topk, fewest = model.indexer.topk, keys if fewest is None else fewest
    most = 2 * keys - fewest
    if most <= topk or fewest >= topk:
        return min(keys, topk)
    return ((topk**2 - fewest**2) / 2 + topk * (most - topk)) / (most - fewest)


def sparse_floor(model: ModelConfig, context: float, cache_dtype: str) -> tuple[float, float]:
    """Returns the bytes of cache and the operations of attention that a layer cannot do without, for a query's token.

    Dense attention's where the model has no indexer, or the query need not choose.
    """
    seen, share = attended(model, context), index_share(model) if must_choose(model, context) else 0
    nbytes = seen * row_bytes(model, cache_dtype) + share * context * key_bytes(model, cache_dtype)
    return nbytes, seen * core_operations(model) + share * context * index_operations(model)


def sparse_core(model: ModelConfig, rates: "Rates", batch: "MicroBatch", kernel_s: float) -> SparseCore:
    """Returns the parts of a layer of a micro-batch that takes the sparse path; a launch takes `kernel_s`.

    Each query reads its request's index keys for itself, from memory or from an L2 cache that is taken to be as fast,
    and copies its chosen rows. Rows are chosen by one multiprocessor each.
    """
    b, share, seen = batch.tokens, index_share(model), attended(model, batch.keys, batch.fewest)
    row, key = row_bytes(model, batch.cache_dtype), key_bytes(model, batch.cache_dtype)
    score_flops = rates.fp8_core_flops if batch.cache_dtype == "fp8" else rates.decode_core_flops
    pairs = b * batch.keys
    chosen = math.ceil(b / rates.multiprocessors) * batch.keys / rates.selection
    core = b * seen * core_operations(model) / batch.split / rates.decode_core_flops
    topk = model.indexer.topk if model.indexer else 0
    groups = math.ceil(b * chosen_width(topk) * row / BYTES_AT_ONCE)
    return SparseCore(
        scores=share * max(pairs * index_operations(model) / score_flops, pairs * (key + _SCORE_BYTES) / rates.hbm),
        choice=share * chosen,
        copies=2 * b * seen * row / rates.hbm,
        attention=max(core, b * seen * row / rates.hbm),
        launches=groups * _LAUNCHES * kernel_s,
    )
