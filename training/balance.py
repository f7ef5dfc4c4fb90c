"""The sequence-wise auxiliary loss, which keeps the experts' load even inside of each sequence."""

import dataclasses

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model.layers.experts import ExpertLayer, RoutedExperts, Tally
from dsv3.model.layers.router import Routing, router_logits
from dsv3.model.tensor_parallel import Shards
from training.config import TrainingConfig


def balanced(routed: RoutedExperts, config: TrainingConfig, sequences: int) -> RoutedExperts:
    """Returns experts whose gradient holds the loss too, for `sequences` sequences; `routed` if its weight is 0."""
    weight = config.sequence_balance_weight / config.batch_size
    return BalancedExperts(routed, config.model, sequences, weight) if weight else routed


def sequence_balance(cfg: ModelConfig, logits: jax.Array) -> jax.Array:
    """Returns the loss of each sequence, float32 [B], without its weight: 1 for an even load, E / K at most.

    `logits` are the router's, [B, S, E] float32. An expert counts where its score, without the router's bias, is among
    the K best of a token (DeepSeek-V3 report, equations 17 to 20). Only the scores have a gradient, not the counts.
    """
    scores = jax.nn.sigmoid(logits) if cfg.scoring_func == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    E, K = cfg.n_routed_experts, cfg.num_experts_per_tok
    chosen = jax.nn.one_hot(jax.lax.top_k(scores, K)[1], E, dtype=jnp.float32).sum(axis=2)  # [B, S, E]
    load = chosen.mean(axis=1) * E / K
    share = (scores / scores.sum(axis=-1, keepdims=True)).mean(axis=1)
    return (jax.lax.stop_gradient(load) * share).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class BalancedExperts:
    """`RoutedExperts` that add `weight` times the loss of each of their `sequences` to what training minimises.

    The loss joins the gradient where the layer is computed, as its value is needed nowhere else: a pipeline stage in
    the middle has no other way to what the last one minimises. The objective must be differentiated by 1.
    """

    routed: RoutedExperts
    cfg: ModelConfig
    sequences: int
    weight: float

    @property
    def shards(self) -> Shards:
        return self.routed.shards

    def __call__(self, x: jax.Array, routing: Routing, layer: ExpertLayer, /) -> tuple[jax.Array, Tally]:
        y, tally = self.routed(x, routing, layer)
        logits = router_logits(x, layer.params.router, layer.index, layer.numerics.backend)
        loss = sequence_balance(self.cfg, logits.reshape(self.sequences, -1, logits.shape[-1])).sum()
        return _minimise_too(y, self.weight * loss), tally


@jax.custom_vjp
def _minimise_too(y: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns `y`; in the backward, `loss` gets the gradient of a term of the objective."""
    return y


def _forward(y: jax.Array, loss: jax.Array) -> tuple[jax.Array, None]:
    return y, None


def _backward(_: None, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return dy, jnp.ones((), jnp.float32)


_minimise_too.defvjp(_forward, _backward)
