"""The forward pass of training: whole sequences, no cache, differentiable."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model import mtp
from dsv3.model.decoder import LayerContext, embed, final_norm, logits, run_decoder
from dsv3.model.layers.attention import Attention, LatentAttention
from dsv3.model.layers.compressed_attention import EntryAttention
from dsv3.model.layers.compressed_uncached import uncached_attend
from dsv3.model.layers.experts import LOCAL_EXPERTS, RoutedExperts
from dsv3.model.layers.hyper_connections import Residual, start
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.rope import rotation
from dsv3.model.layers.router import by_layer
from dsv3.model.layers.uncached_attention import causal_attend, initial_topk_mask
from dsv3.model.params import Params
from dsv3.model.schedules import PLAIN
from pallas_kernels.backend import Backend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """What `forward` returns.

    `hidden` `[B, S, D]` after the final norm; `logits` float32 `[B, S, W]`, those at i predict token i + 1.
    `mtp_logits[d]` float32 `[B, S - 1 - d, W]`: row i of module d predicts token i + 2 + d.
    `expert_counts` int32 `[num_moe_layers + MTP modules, E]`: (token, expert) pairs, for the update of the router's
    bias; None in a model without routed experts.
    """

    hidden: Any
    logits: Any
    mtp_logits: tuple[Any, ...]
    expert_counts: Any


def forward(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    *,
    with_mtp: bool = False,
    backend: Backend | None = None,
    routed: RoutedExperts = LOCAL_EXPERTS,
    fp8_products: bool = False,
    routed_experts: jax.Array | None = None,
) -> ForwardOutput:
    """Runs `tokens` `[B, S]` int32 from position 0. Activations have the dtype of `params.embed`.

    `fp8_products` is that of `Numerics`. `routed_experts` `[B, S, num_moe_layers, K]`, of any integer type, replay a
    rollout: the main model's layers use these experts, with the weights that the router computes for them. A token with
    a negative id in a layer gets the router's own choice there. MTP modules always choose.

    Raises ValueError for `routed_experts` of another shape.
    """
    how: dict[str, Any] = {"backend": backend, "routed": routed, "fp8_products": fp8_products}
    (B, S), flat = tokens.shape, tokens.reshape(-1)
    replayed = None if routed_experts is None else _checked(cfg, routed_experts, tokens.shape)
    context = dataclasses.replace(uncached_context(cfg, B, S, **how), tokens=flat, replayed=replayed)
    first, state = (start(cfg, embed(params, flat)),), initial_topk_mask(cfg, B, S)
    (x,), _, router_stats = run_decoder(params, (context,), first, state, PLAIN.prefill)
    counts = None if router_stats is None else router_stats.counts
    return predict(params, cfg, tokens, x, counts, with_mtp=with_mtp, **how)


def _checked(cfg: ModelConfig, routed_experts: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
    """Returns expert ids of so many `tokens` `[B, S]` by layer; raises ValueError for those of others."""
    wanted = (*tokens, cfg.num_moe_layers, cfg.num_experts_per_tok)
    if routed_experts.shape != wanted:
        raise ValueError(
            f"routed_experts: shape {routed_experts.shape} instead of {wanted} (sequences, tokens, MoE layers, experts "
            "per token); give tokens without ids -1"
        )
    return by_layer(routed_experts)


def predict(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    x: Residual,
    counts: jax.Array | None,
    *,
    with_mtp: bool,
    backend: Backend | None = None,
    routed: RoutedExperts = LOCAL_EXPERTS,
    fp8_products: bool = False,
) -> ForwardOutput:
    """Runs everything after the last layer: the final norm, the logits, and the MTP modules.

    `x` is the residual of the B * S `tokens`, `counts` `[layers, E]` the (token, expert) pairs so far.
    `routed` computes the MTP modules' routed experts, `fp8_products` is theirs.
    """
    flat = final_norm(params, cfg, x, backend)
    hidden, draft_input = (a.reshape(*tokens.shape, -1) for a in (flat, mtp.draft_input(x, flat)))
    mtp_logits, mtp_counts = (
        _mtp_chain(params, cfg, tokens, draft_input, backend, routed, fp8_products) if with_mtp else ((), [])
    )
    parts = ([] if counts is None else [counts]) + [c[None] for c in mtp_counts]
    return ForwardOutput(
        hidden=hidden,
        logits=logits(params, cfg, hidden, backend),
        mtp_logits=mtp_logits,
        expert_counts=jnp.concatenate(parts) if parts else None,
    )


def uncached_context(
    cfg: ModelConfig,
    batch: int,
    length: int,
    backend: Backend | None,
    routed: RoutedExperts = LOCAL_EXPERTS,
    fp8_products: bool = False,
) -> LayerContext:
    """Returns the layer context of `batch` sequences of `length` tokens, without a KV cache (training, inspection)."""
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), batch)
    numerics = dataclasses.replace(Numerics.from_config(cfg, backend), fp8_products=fp8_products)
    attention: Attention
    if cfg.compressed is None:
        attention = LatentAttention(cfg, rotation(cfg, positions), causal_attend(cfg, batch, numerics))
    else:
        attention = EntryAttention.at(cfg, positions, uncached_attend(cfg, batch))
    return LayerContext(cfg, attention, jnp.ones(batch * length, jnp.bool), numerics, routed)


def _mtp_chain(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    draft_input: jax.Array,
    backend: Backend | None,
    routed: RoutedExperts,
    fp8_products: bool,
) -> tuple[tuple[jax.Array, ...], list[Any]]:
    """Runs module d on positions 0 .. S - 2 - d; the causal chain is complete at each depth (report, figure 3)."""
    B, S = tokens.shape
    predictions: list[jax.Array] = []
    counts: list[Any] = []
    for depth in range(cfg.num_nextn_predict_layers):
        length = S - 1 - depth
        context = uncached_context(cfg, B, length, backend, routed, fp8_products)
        draft_input = draft_input[:, :length].reshape(B * length, -1)
        following = tokens[:, depth + 1 :].reshape(-1)
        hidden, draft_input, _, router_stats = mtp.predict(params, context, depth, draft_input, following, None)
        hidden, draft_input = (a.reshape(B, length, -1) for a in (hidden, draft_input))
        predictions.append(logits(params, cfg, hidden, backend))
        assert router_stats is not None  # MTP modules have routed experts
        counts.append(router_stats.counts)
    return tuple(predictions), counts
