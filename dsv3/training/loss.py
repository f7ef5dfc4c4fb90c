"""What training minimises: the cross-entropy of the next token, and the MTP module's for the token after it."""

import jax
import jax.numpy as jnp

from dsv3.model.forward import ForwardOutput
from dsv3.training.tokenizer import PAD_ID


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean over all targets but padding, in nats per token, a float32 scalar; 0 if all are padding.

    `logits` are [B, S, W] and computed on in float32, `targets` [B, S] int32.
    """
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    real = targets != PAD_ID
    return jnp.where(real, losses, 0.0).sum() / jnp.maximum(real.sum(), 1)


def main_loss(output: ForwardOutput, tokens: jax.Array) -> jax.Array:
    """Returns the cross-entropy of token i + 1 given tokens 0 to i, for all i; `tokens` is [B, S]."""
    return cross_entropy(output.logits[:, :-1], tokens[:, 1:])


def mtp_loss(output: ForwardOutput, tokens: jax.Array) -> jax.Array:
    """Returns the mean of the MTP modules' cross-entropies (DeepSeek-V3 report, equations 24 and 25, without lambda).

    Module d, counted from 0, predicts token i + 2 + d at position i, so its last position has no target.
    """
    depths = enumerate(output.mtp_logits)
    losses = [cross_entropy(logits[:, :-1], tokens[:, depth + 2 :]) for depth, logits in depths]
    return sum(losses, start=jnp.zeros(())) / max(len(losses), 1)
