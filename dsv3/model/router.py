"""Choosing experts: softmax or sigmoid scores, group-limited selection, bias-corrected selection, scaled weights."""

import jax
import jax.numpy as jnp

from dsv3.config import ModelConfig


def route(cfg: ModelConfig, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their weights.

    Args:
      x: `[T, D]`; the product with `weight` is made in float32 whatever its dtype.
      weight: `[E, D]` float32.
      bias: `[E]` float32 or None; it moves the selection and never the weights (arXiv:2408.15664).

    Returns:
      ids `[T, K]` int32 and weights `[T, K]` float32, best expert first.
    """
    logits = jnp.einsum("td,ed->te", x.astype(jnp.float32), weight, precision="highest")
    scores = jax.nn.sigmoid(logits) if cfg.scoring_func == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if bias is None else scores + bias
    if cfg.n_group > 1 and cfg.topk_method != "greedy":
        choice = _keep_best_groups(cfg, choice)
    ids = jax.lax.top_k(choice, cfg.num_experts_per_tok)[1].astype(jnp.int32)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if cfg.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * cfg.routed_scaling_factor


def _keep_best_groups(cfg: ModelConfig, choice: jax.Array) -> jax.Array:
    """Puts the experts outside of the `topk_group` best groups out of reach.

    The mask is minus infinity: with the 0 of older reference code a masked expert wins over a kept one whose biased
    score is negative.
    """
    grouped = choice.reshape(choice.shape[0], cfg.n_group, -1)  # [T, G, E / G]
    best_in_group = jax.lax.top_k(grouped, 2 if cfg.topk_method == "noaux_tc" else 1)[0]
    best = jax.lax.top_k(best_in_group.sum(axis=-1), cfg.topk_group)[1]
    kept = jax.nn.one_hot(best, cfg.n_group, dtype=jnp.bool).any(axis=1)  # [T, G]
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
