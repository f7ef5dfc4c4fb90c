"""Losses: cross-entropy of the next token and of MTP modules, and the sequence-wise auxiliary loss (`balanced`)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.model.forward import ForwardOutput
from dsv3.model.layers.experts import ExpertLayer, RoutedExperts, RouterStats
from dsv3.model.layers.router import Routing, router_logits
from dsv3.model.tensor_parallel import Shards
from pallas_kernels.backend import Backend
from training.config import TrainingConfig
from training.tokenizer import PAD_ID


def training_backend() -> Backend | None:
    """Returns the reference on a CPU, and None, the device's default, elsewhere.

    The C++ kernels of CPUs take only few rows, so the cutting of a batch would change the order of sums.
    """
    return Backend.REFERENCE if jax.default_backend() == "cpu" else None


def objective(
    output: ForwardOutput, tokens: jax.Array, mtp_weight: float, counts: jax.Array | None = None
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the objective of a step, a float32 scalar, and its report.

    If `tokens` is a micro-batch, `counts` are `target_counts` of the whole batch, so that the objectives of all
    micro-batches add up to the batch's.
    """
    main, extra = main_loss(output, tokens, counts), mtp_loss(output, tokens, counts)
    metrics = {"loss": main, "mtp_loss": extra, "expert_counts": output.expert_counts}
    return main + mtp_weight * extra, metrics


def target_counts(tokens: np.ndarray, mtp_modules: int) -> np.ndarray:
    """Returns the number of targets without padding of a batch [B, S], float32 [1 + MTP modules], at least 1 each."""
    counts = [(tokens[:, depth + 1 :] != PAD_ID).sum() for depth in range(1 + mtp_modules)]
    return np.maximum(np.asarray(counts, np.float32), 1)


def cross_entropy(logits: jax.Array, targets: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Returns the mean over all targets except padding, in nats per token, a float32 scalar; 0 if all are padding.

    `logits` are [B, S, W], converted to float32, `targets` [B, S] int32. With `count` the sum is divided by it.
    """
    total = _summed_loss(logits.astype(jnp.float32), targets)
    return total / (jnp.maximum((targets != PAD_ID).sum(), 1) if count is None else count)


@jax.custom_vjp
def _summed_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the sum over all targets except padding.

    Its gradient is one pass over the logits; JAX's own would write several arrays of their size.
    """
    return _summed_loss_forward(logits, targets)[0]


def _summed_loss_forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    total = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.where(targets != PAD_ID, total - picked, 0.0).sum(), (logits, total, targets)


def _summed_loss_backward(saved: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, None]:
    logits, total, targets = saved
    shares = jnp.exp(logits - total[..., None])
    words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    weight = jnp.where(targets != PAD_ID, dy, 0.0)[..., None]
    return (shares - (words == targets[..., None])) * weight, None


_summed_loss.defvjp(_summed_loss_forward, _summed_loss_backward)


def main_loss(output: ForwardOutput, tokens: jax.Array, counts: jax.Array | None = None) -> jax.Array:
    """Returns the cross-entropy of token i + 1 given tokens 0 to i, for all i; `tokens` is [B, S]."""
    return cross_entropy(output.logits, _next(tokens), None if counts is None else counts[0])


def mtp_loss(output: ForwardOutput, tokens: jax.Array, counts: jax.Array | None = None) -> jax.Array:
    """Returns the mean of the MTP modules' cross-entropies (DeepSeek-V3 report, equations 24 and 25, without lambda).

    Module d, counted from 0, predicts token i + 2 + d at position i, so its last position has no target.
    """
    losses = [
        cross_entropy(logits, _next(tokens[:, depth + 1 :]), None if counts is None else counts[depth + 1])
        for depth, logits in enumerate(output.mtp_logits)
    ]
    return sum(losses, start=jnp.zeros(())) / max(len(losses), 1)


def _next(tokens: jax.Array) -> jax.Array:
    """Returns the token after each of `tokens` [B, S], padding for the last, so that logits need not be sliced."""
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=PAD_ID)


def balanced(routed: RoutedExperts, config: TrainingConfig, sequences: int) -> RoutedExperts:
    """Returns experts with the auxiliary loss of `sequences` in their gradient; `routed` if its weight is 0."""
    weight = config.sequence_balance_weight / config.batch_size
    return BalancedExperts(routed, config.model, sequences, weight) if weight else routed


def sequence_balance(cfg: ModelConfig, logits: jax.Array) -> jax.Array:
    """Returns the loss of each sequence, float32 [B], without its weight: 1 for an even load, E / K at most.

    `logits` are the router's, [B, S, E] float32. An expert counts where its score, without the router's bias, is among
    the K best of a token (DeepSeek-V3 report, equations 17 to 20). Only the scores have a gradient, not the counts.
    """
    scores = jax.nn.sigmoid(logits) if cfg.scoring_func == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    E, K = cfg.n_routed_experts, cfg.num_experts_per_tok
    selected = jax.nn.one_hot(jax.lax.top_k(scores, K)[1], E, dtype=jnp.float32).sum(axis=2)  # [B, S, E]
    load = selected.mean(axis=1) * E / K
    share = (scores / scores.sum(axis=-1, keepdims=True)).mean(axis=1)
    return (jax.lax.stop_gradient(load) * share).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class BalancedExperts:
    """`RoutedExperts` that add the gradient of `weight` times the auxiliary loss of each of their `sequences`.

    The gradient is added where the layer is computed, as a middle pipeline stage cannot add to the last one's
    objective. The objective's own gradient must be 1.
    """

    routed: RoutedExperts
    cfg: ModelConfig
    sequences: int
    weight: float

    @property
    def shards(self) -> Shards:
        return self.routed.shards

    def __call__(self, x: jax.Array, routing: Routing, layer: ExpertLayer, /) -> tuple[jax.Array, RouterStats]:
        y, router_stats = self.routed(x, routing, layer)
        logits = router_logits(x, layer.params.router, layer.index, layer.numerics.backend)
        loss = sequence_balance(self.cfg, logits.reshape(self.sequences, -1, logits.shape[-1])).sum()
        return _add_to_gradient(y, self.weight * loss), router_stats


@jax.custom_vjp
def _add_to_gradient(y: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns `y`; in the backward, `loss` gets gradient 1, as a term of the objective."""
    return y


def _forward(y: jax.Array, loss: jax.Array) -> tuple[jax.Array, None]:
    return y, None


def _backward(_: None, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return dy, jnp.ones((), jnp.float32)


_add_to_gradient.defvjp(_forward, _backward)
