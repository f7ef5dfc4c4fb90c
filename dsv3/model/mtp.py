"""Multi-token prediction modules (DeepSeek-V3 report, arXiv:2412.19437, 2.2), also those of DeepSeek-V4's previews."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv3.model.decoder import DecoderLayer, LayerContext, Stack, embed, norm
from dsv3.model.layers.experts import RouterStats
from dsv3.model.layers.hyper_connections import OneStream, Residual, residual_of
from dsv3.model.layers.linear import layer_slice
from dsv3.model.params import MtpParams, Params
from pallas_kernels import dense
from sharding.experts.placement import Placement


def draft_input(x: Residual, hidden: jax.Array) -> jax.Array:
    """Returns what layers that make drafts take of those before them, `[T, draft_input_width]`.

    Of one stream it is `hidden` `[T, D]`, the states after their norm. Of several it is all streams, or their means
    behind target layers in a model that has such (`dspark`).
    """
    if isinstance(x, OneStream):
        return hidden
    return jnp.concatenate(x.means, axis=-1) if x.means else x.flat()


def predict(
    params: Params,
    context: LayerContext,
    depth: int,
    before: jax.Array,
    next_tokens: jax.Array,
    state: Any,
    placement: Placement | None = None,
) -> tuple[jax.Array, jax.Array, Any, RouterStats | None]:
    """Runs module `depth` (0 is the first): from what is known of token i, and token i + 1, to the state for i + 2.

    Each of several streams is normed and projected by itself, and the embedding is added to all.

    Args:
      before: `draft_input` of the main model, or of this function one module earlier, `[T, residual_width]`.
      next_tokens: `[T]` int32, for each row the token after the last one that `before` has seen.
      state: the attention state; module `depth` owns the cache layer `num_hidden_layers + depth`.
      placement: replicas of the modules' own experts, None if they are local.

    Returns:
      hidden `[T, D]` after the module's own norm, ready for `logits`; its `draft_input`; the state; the router
      statistics.

    Raises:
      ValueError: the model has no MTP modules, or `context.routed` is expert-parallel and `placement` is None.
    """
    mtp, cfg, backend = params.mtp, context.cfg, context.numerics.backend
    if not isinstance(mtp, MtpParams):
        raise ValueError("the model has no multi-token prediction modules (num_nextn_predict_layers is 0)")
    streams = norm(before.reshape(-1, cfg.hidden_size), mtp.hidden_norm, depth, context)
    embedded = norm(embed(params, next_tokens), mtp.embed_norm, depth, context)
    # Embedding first, as in the columns of the checkpoint's eh_proj; equation 21 of the report has it last.
    both = jnp.concatenate([jnp.repeat(embedded, len(streams) // len(embedded), axis=0), streams], axis=-1)
    with jax.named_scope("eh_proj"):
        projected = dense.plain_gemm(both, layer_slice(mtp.proj, depth), backend=backend)
    stack = Stack(mtp.layers, cfg.num_hidden_layers, placement)
    x = residual_of(cfg, projected.reshape(before.shape))
    x, state, router_stats = DecoderLayer(stack, stack.place(depth), context).run(x, state)
    mixing = jax.tree.map(lambda a: a[depth], mtp.head_mixing)
    hidden = norm(x.end(mixing, cfg, backend), mtp.norm, depth, context)
    return hidden, draft_input(x, hidden), state, router_stats
