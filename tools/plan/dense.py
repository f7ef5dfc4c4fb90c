"""How long dense attention of prefill could take: new tokens expanded, cached ones in either form. An estimate."""

from typing import TYPE_CHECKING

from dsv3.config.model import ModelConfig
from tools.plan.sparse import PREFILL_OVERHEAD, core_operations, expanded_operations, expansion_seconds

if TYPE_CHECKING:
    from tools.plan.roofline import MicroBatch, Rates


def dense_core(model: ModelConfig, rates: "Rates", batch: "MicroBatch") -> float:
    """Returns the seconds of a layer's attention for a prefill micro-batch, less keys and values of its own tokens.

    Cached tokens are those that were there before the batch: `fewest` of each prompt, and what earlier batches have
    computed of a prompt that is longer than one. The form that takes less is taken, as the engine does.
    """
    return min(dense_forms(model, rates, batch))


def dense_forms(model: ModelConfig, rates: "Rates", batch: "MicroBatch") -> tuple[float, float]:
    """Returns the seconds of both forms, absorbed and expanded.

    Either cached latents are multiplied, with queries and outputs that two more products make; or keys and values are
    made of them.
    """
    cached, prompts = _cached(batch)
    pairs, token = batch.tokens * cached, expansion_seconds(model, rates) / batch.split
    pair = expanded_operations(model) / batch.split / rates.prefill_core_flops
    absorbed = pairs * core_operations(model) / batch.split / rates.decode_core_flops
    own = PREFILL_OVERHEAD * (batch.tokens * batch.keys - pairs) * pair
    return (
        own + absorbed + batch.tokens * token,
        own + PREFILL_OVERHEAD * pairs * pair + prompts * cached * token,
    )


def _cached(batch: "MicroBatch") -> tuple[float, float]:
    """Returns the cached tokens of a prompt, a mean, and how many prompts the batch has tokens of."""
    if batch.fewest is None:
        return 0.0, 0.0
    new = 2 * (batch.keys - batch.fewest)
    return batch.fewest + max(0.0, (new - batch.tokens) / 2), max(1.0, batch.tokens / max(new, 1.0))
