"""The forward pass of training: whole sequences, no cache, differentiable."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model import mtp
from dsv3.model.compressed import RowContext, hidden_states, run_compressed
from dsv3.model.decoder import LayerContext, Residual, embed, final_norm, logits, run_decoder
from dsv3.model.layers.compressed_attention import rotations
from dsv3.model.layers.compressed_uncached import uncached_attend
from dsv3.model.layers.experts import LOCAL_EXPERTS, RoutedExperts
from dsv3.model.layers.hyper_connections import Streams, hyper_of
from dsv3.model.layers.linear import Numerics
from dsv3.model.layers.rope import rotation
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
) -> ForwardOutput:
    """Runs `tokens` `[B, S]` int32 from position 0. Activations have the dtype of `params.embed`.

    `fp8_products` is that of `Numerics`.

    Raises:
      ValueError: `with_mtp` for DeepSeek-V4, whose modules are not computed.
    """
    B, S = tokens.shape
    if cfg.compressed is not None:
        return _compressed_forward(params, cfg, tokens, with_mtp, backend, routed, fp8_products)
    context = uncached_context(cfg, B, S, backend, routed, fp8_products)
    start = (Residual.start(embed(params, tokens.reshape(-1))),)
    (x,), _, router_stats = run_decoder(params, (context,), start, initial_topk_mask(cfg, B, S), PLAIN.prefill)
    counts = None if router_stats is None else router_stats.counts
    how: dict[str, Any] = {"backend": backend, "routed": routed, "fp8_products": fp8_products}
    return predict(params, cfg, tokens, x, counts, with_mtp=with_mtp, **how)


def _compressed_forward(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    with_mtp: bool,
    backend: Backend | None,
    routed: RoutedExperts,
    fp8_products: bool,
) -> ForwardOutput:
    """Runs a model with compressed attention."""
    if with_mtp:
        raise ValueError(f"with_mtp: the MTP modules of {cfg.family} are not computed; leave it out")
    assert params.moe is not None  # all layers have experts
    (B, S), flat = tokens.shape, tokens.reshape(-1)
    numerics = dataclasses.replace(Numerics.from_config(cfg, backend), fp8_products=fp8_products)
    positions = jnp.tile(jnp.arange(S, dtype=jnp.int32), B)
    context = RowContext(
        cfg,
        flat,
        positions,
        rotations(cfg, positions),
        jnp.ones(B * S, jnp.bool),
        uncached_attend(cfg, B),
        numerics,
        routed,
    )
    start = Streams.start(embed(params, flat), hyper_of(cfg).streams)
    x, _, counts = run_compressed(params.moe, context, start, None)
    hidden = hidden_states(params, cfg, x, numerics).reshape(B, S, -1)
    return ForwardOutput(hidden, logits(params, cfg, hidden, backend), (), counts)


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
    hidden = final_norm(params, cfg, x, backend).reshape(*tokens.shape, -1)
    mtp_logits, mtp_counts = (
        _mtp_chain(params, cfg, tokens, hidden, backend, routed, fp8_products) if with_mtp else ((), [])
    )
    return ForwardOutput(
        hidden=hidden,
        logits=logits(params, cfg, hidden, backend),
        mtp_logits=mtp_logits,
        expert_counts=_stack_counts(counts, mtp_counts),
    )


def _stack_counts(counts: jax.Array | None, mtp_counts: list[Any]) -> jax.Array | None:
    parts = ([] if counts is None else [counts]) + [c[None] for c in mtp_counts]
    return jnp.concatenate(parts) if parts else None


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
    return LayerContext(
        cfg,
        rotation(cfg, positions),
        causal_attend(cfg, batch, numerics),
        jnp.ones(batch * length, jnp.bool),
        numerics,
        routed,
    )


def _mtp_chain(
    params: Params,
    cfg: ModelConfig,
    tokens: jax.Array,
    hidden: jax.Array,
    backend: Backend | None,
    routed: RoutedExperts,
    fp8_products: bool,
) -> tuple[tuple[jax.Array, ...], list[Any]]:
    """Runs module d on positions 0 .. S - 2 - d; the causal chain is complete at each depth (report, figure 3)."""
    (B, S), D = tokens.shape, cfg.hidden_size
    predictions: list[jax.Array] = []
    counts: list[Any] = []
    for depth in range(cfg.num_nextn_predict_layers):
        length = S - 1 - depth
        context = uncached_context(cfg, B, length, backend, routed, fp8_products)
        hidden = hidden[:, :length].reshape(B * length, D)
        hidden, _, router_stats = mtp.predict(params, context, depth, hidden, tokens[:, depth + 1 :].reshape(-1), None)
        hidden = hidden.reshape(B, length, D)
        predictions.append(logits(params, cfg, hidden, backend))
        assert router_stats is not None  # MTP modules have routed experts
        counts.append(router_stats.counts)
    return tuple(predictions), counts
