"""What training minimises: the cross-entropy of the next token, and the MTP module's for the token after it.

`balanced` adds the sequence-wise auxiliary loss, which keeps the experts' load even inside of each sequence.
"""

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
    """Returns the reference on a CPU, None elsewhere, which is the device's own choice.

    The C++ kernels of a CPU take few rows only: how a batch is cut would change the order of sums.
    """
    return Backend.REFERENCE if jax.default_backend() == "cpu" else None


def objective(
    output: ForwardOutput, tokens: jax.Array, mtp_weight: float, counts: jax.Array | None = None
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns what a step minimises, a float32 scalar, and what it reports.

    `counts` are those of `target_counts` for the whole batch, where `tokens` is a micro-batch of it: the objectives
    of all micro-batches then add up to that of the batch.
    """
    main, extra = main_loss(output, tokens, counts), mtp_loss(output, tokens, counts)
    metrics = {"loss": main, "mtp_loss": extra, "expert_counts": output.expert_counts}
    return main + mtp_weight * extra, metrics


def target_counts(tokens: np.ndarray, mtp_modules: int) -> np.ndarray:
    """Returns how many targets of a batch [B, S] are no padding, float32 [1 + MTP modules], at least 1 each."""
    counts = [(tokens[:, depth + 1 :] != PAD_ID).sum() for depth in range(1 + mtp_modules)]
    return np.maximum(np.asarray(counts, np.float32), 1)


def cross_entropy(logits: jax.Array, targets: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """Returns the mean over all targets but padding, in nats per token, a float32 scalar; 0 if all are padding.

    `logits` are [B, S, W] and computed on in float32, `targets` [B, S] int32. With `count` the sum is divided by it.
    """
    total = _summed_surprise(logits.astype(jnp.float32), targets)
    return total / (jnp.maximum((targets != PAD_ID).sum(), 1) if count is None else count)


@jax.custom_vjp
def _summed_surprise(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the sum over all targets but padding.

    Its gradient is one pass over the logits. JAX's own writes arrays of their size several times.
    """
    return _surprise_forward(logits, targets)[0]


def _surprise_forward(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    total = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.where(targets != PAD_ID, total - picked, 0.0).sum(), (logits, total, targets)


def _surprise_backward(saved: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, None]:
    logits, total, targets = saved
    shares = jnp.exp(logits - total[..., None])
    words = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    weight = jnp.where(targets != PAD_ID, dy, 0.0)[..., None]
    return (shares - (words == targets[..., None])) * weight, None


_summed_surprise.defvjp(_surprise_forward, _surprise_backward)


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
    """Returns the token after each of `tokens` [B, S]; the last has padding. So no logits are cut off, and copied."""
    return jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=PAD_ID)


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

    def __call__(self, x: jax.Array, routing: Routing, layer: ExpertLayer, /) -> tuple[jax.Array, RouterStats]:
        y, router_stats = self.routed(x, routing, layer)
        logits = router_logits(x, layer.params.router, layer.index, layer.numerics.backend)
        loss = sequence_balance(self.cfg, logits.reshape(self.sequences, -1, logits.shape[-1])).sum()
        return _minimise_too(y, self.weight * loss), router_stats


@jax.custom_vjp
def _minimise_too(y: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns `y`; in the backward, `loss` gets the gradient of a term of the objective."""
    return y


def _forward(y: jax.Array, loss: jax.Array) -> tuple[jax.Array, None]:
    return y, None


def _backward(_: None, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return dy, jnp.ones((), jnp.float32)


_minimise_too.defvjp(_forward, _backward)
