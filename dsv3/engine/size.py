"""How large a model is, as its parameters are declared."""

import math

import jax

from dsv3.config.model import ModelConfig
from dsv3.model.params import declare


def count_parameters(cfg: ModelConfig) -> tuple[int, int]:
    """Returns how many parameters there are, and how many of them a token meets: all but the experts it is not sent to.

    The embedding counts in the first number alone, unless it is the head too.
    """
    total = active = 0
    for spec in jax.tree.leaves(declare(cfg)):
        size = math.prod(spec.shape)
        total += size
        active += size // cfg.n_routed_experts * cfg.num_experts_per_tok if "experts" in spec.axes else size
    embedding = cfg.vocab_size * cfg.hidden_size
    return total, active if cfg.tie_word_embeddings else active - embedding


def short(count: int) -> str:
    """Returns a count with three digits: "30.6 billion"."""
    for power, word in ((12, "trillion"), (9, "billion"), (6, "million")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {word}"
    return f"{count:,}"
