"""The router: scores, group-limited and bias-corrected top-k experts or a table by token, scaled weights."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.config.model import ModelConfig
from dsv3.model.layers.linear import Index, layer_slice
from pallas_kernels import dense, invariance, native, routing
from pallas_kernels.backend import Backend, resolve_backend, resolve_operation, uses_triton
from pallas_kernels.rows import differentiable


class Routing(NamedTuple):
    """The experts of each token and their weights."""

    ids: jax.Array  # [T, K] int32; distinct within a row, except -1, which selects no expert
    weights: jax.Array  # [T, K] float32


def id_dtype(num_experts: int) -> np.dtype:
    """Returns the type in which expert ids leave a step: uint8, or uint16 for more than 256 experts."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def ids_per_token(cfg: ModelConfig) -> tuple[int, int, str]:
    """Returns a token's MoE layers, its experts in each, and numpy's name of the type of their ids outside of jax."""
    return cfg.num_moe_layers, cfg.num_experts_per_tok, id_dtype(cfg.n_routed_experts).newbyteorder("<").str


def router_logits(x: jax.Array, weight: jax.Array, layer: Index, backend: Backend | None) -> jax.Array:
    """Returns the router logits `[T, E]` float32: `x` `[T, D]` times layer `layer` of the router.

    The product of two bfloat16 or float16 values is exact in float32, so the kernel for them differs from the float32
    product only by the order of the sums. It addresses the layer in the stack; XLA would copy the slice.

    Args:
      x: `[T, D]`; the product is computed in float32 for any dtype.
      weight: `[L, E, D]`, float32 or the dtype of x.
      layer: Python or traced integer.
      backend: implementation; None selects by device.

    Raises:
      ValueError: 16-bit operands on Hopper whose E or D is no multiple of 8.
    """
    has_kernel = x.dtype == weight.dtype != jnp.float32
    resolved = resolve_backend(requested=backend)
    if has_kernel and resolved in (Backend.MOSAIC, Backend.TRITON):
        return dense.layer_gemm(x, weight, layer, out_dtype=jnp.float32, backend=backend)
    x32 = x.astype(jnp.float32)
    if resolved is Backend.NATIVE and weight.dtype == jnp.float32:
        return dense.layer_gemm(x32, weight, layer, backend=backend)
    weight32 = layer_slice(weight, layer).astype(jnp.float32)
    if resolved is Backend.NATIVE:
        return dense.plain_gemm(x32, weight32, backend=backend)

    def product(rows: jax.Array) -> jax.Array:
        return jnp.einsum("td,ed->te", rows, weight32, precision="highest")

    return invariance.in_blocks(product, x32)


def route(
    cfg: ModelConfig,
    logits: jax.Array,
    bias: jax.Array | None,
    backend: Backend | None,
    layer: Index | None = None,
    first: int = 0,
    valid: jax.Array | None = None,
) -> Routing:
    """Selects the top-k experts of each token, best first.

    Args:
      logits: `[T, E]` float32.
      bias: `[E]` float32, or `[L, E]` where `layer` says which, or None; it affects the selection, not the weights
        (arXiv:2408.15664).
      backend: implementation; None selects by device.
      layer: Python or traced integer.
      first: the layer of the first row of `bias`.
      valid: `[T]` bool, the tokens that get experts; the ids of others are -1. None for all.
    """
    stack, number = (bias, layer) if layer is not None else (None if bias is None else bias[None], 0)
    resolved = resolve_operation("weighted_experts", backend)
    in_kernel = uses_triton(resolved) and not _is_limited(cfg)
    reference = functools.partial(_route, cfg, backend, first)
    if not in_kernel or cfg.scoring_func not in routing.SCORES or not logits.size:
        return reference(logits, stack, number, valid)
    how: dict[str, Any] = {
        "normed": cfg.norm_topk_prob,
        "factor": float(cfg.routed_scaling_factor),
        "first": first,
        "backend": resolved,
    }

    def kernel(*arrays: Any) -> Routing:
        found = routing.weighted_experts(*arrays, topk=cfg.num_experts_per_tok, score=cfg.scoring_func, **how)
        return Routing(*found)

    return differentiable(kernel, reference)(logits, stack, jnp.asarray(number, jnp.int32), valid)


def _route(
    cfg: ModelConfig,
    backend: Backend | None,
    first: int,
    logits: jax.Array,
    stack: jax.Array | None,
    layer: Index,
    valid: jax.Array | None,
) -> Routing:
    scores = _SCORES[cfg.scoring_func](logits)
    ranked = scores if stack is None else scores + layer_slice(stack, layer - first)
    routing = _weighted(cfg, scores, _topk_experts(cfg, jax.lax.stop_gradient(ranked), backend))
    return routing if valid is None else masked(routing, valid)


def masked(routing: Routing, valid: jax.Array) -> Routing:
    """Returns a routing whose tokens get no experts where `valid` `[T]` is False."""
    return routing._replace(ids=jnp.where(valid[:, None], routing.ids, -1))


def _is_limited(cfg: ModelConfig) -> bool:
    """Returns whether a token's experts come from its best groups."""
    return cfg.n_group > 1 and cfg.topk_method != "greedy"


def route_by_token(cfg: ModelConfig, logits: jax.Array, table: jax.Array, tokens: jax.Array) -> Routing:
    """Returns the experts that `table` `[V, K]` has for each of `tokens` `[T]`; `logits` `[T, E]` give their weights.

    Ids out of range give the last row.
    """
    return _weighted(cfg, _SCORES[cfg.scoring_func](logits), table.at[tokens].get(mode="clip"))


def by_layer(ids: jax.Array) -> jax.Array:
    """Returns expert ids `[..., L, K]` of T tokens, of any integer type, as int32 `[L, T, K]`."""
    return jnp.moveaxis(ids.astype(jnp.int32).reshape(-1, *ids.shape[-2:]), 1, 0)


def replay(cfg: ModelConfig, logits: jax.Array, own: Routing, given: jax.Array) -> Routing:
    """Returns the experts `given` `[T, K]` int32 with the weights that `logits` `[T, E]` give them (arXiv:2510.11370).

    A row with a negative id keeps the experts that the router has chosen, `own`. Gradients flow through the weights.
    Ids out of range give the last expert.
    """
    chosen = jnp.minimum(given, logits.shape[-1] - 1)
    ids = jnp.where((given >= 0).all(axis=-1, keepdims=True), chosen, own.ids)
    return _weighted(cfg, _SCORES[cfg.scoring_func](logits), ids)


_SCORES = {
    "sigmoid": jax.nn.sigmoid,
    "softmax": jax.nn.softmax,
    "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


def _weighted(cfg: ModelConfig, scores: jax.Array, ids: jax.Array) -> Routing:
    """Returns the experts `ids` `[T, K]` with their weights, from the scores `[T, E]` of all."""
    weights = jnp.take_along_axis(scores, ids, axis=-1, mode="promise_in_bounds")
    if cfg.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return Routing(ids, weights * cfg.routed_scaling_factor)


def _topk_experts(cfg: ModelConfig, scores: jax.Array, backend: Backend | None) -> jax.Array:
    """Returns the experts `[T, K]` int32 of the highest `scores` `[T, E]`, with groups within the best groups."""
    limited = _is_limited(cfg)
    if resolve_operation("choose_experts", backend) is Backend.NATIVE:
        groups = (cfg.n_group, cfg.topk_group, _experts_per_group_score(cfg)) if limited else (1, 1, 1)
        return native.choose_experts(scores, cfg.num_experts_per_tok, *groups)
    kept = _mask_other_groups(cfg, scores) if limited else scores
    return jax.lax.top_k(kept, cfg.num_experts_per_tok)[1].astype(jnp.int32)


def _experts_per_group_score(cfg: ModelConfig) -> int:
    """Returns how many of a group's best scores are summed to rank the group."""
    return 2 if cfg.topk_method == "noaux_tc" else 1


def _mask_other_groups(cfg: ModelConfig, scores: jax.Array) -> jax.Array:
    """Sets the scores `[T, E]` of experts outside of the `topk_group` best groups to minus infinity.

    Older reference code sets them to 0; a masked expert then wins over a kept one whose biased score is negative.
    """
    by_group = scores.reshape(scores.shape[0], cfg.n_group, -1)  # [T, G, E / G]
    best_in_group = jax.lax.top_k(by_group, _experts_per_group_score(cfg))[0]
    best = jax.lax.top_k(best_in_group.sum(axis=-1), cfg.topk_group)[1]
    kept = jax.nn.one_hot(best, cfg.n_group, dtype=jnp.bool).any(axis=1)  # [T, G]
    return jnp.where(kept[..., None], by_group, -jnp.inf).reshape(scores.shape)
