"""Multi-token prediction modules (DeepSeek-V3 report, arXiv:2412.19437, 2.2)."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv3.model.decoder import LayerContext, Residual, Stack, embed, norm, run_layer
from dsv3.model.layers.experts import RouterStats
from dsv3.model.layers.linear import layer_slice
from dsv3.model.params import Params
from pallas_kernels import dense
from sharding.experts.placement import Placement


def predict(
    params: Params,
    context: LayerContext,
    depth: int,
    hidden: jax.Array,
    next_tokens: jax.Array,
    state: Any,
    placement: Placement | None = None,
) -> tuple[jax.Array, Any, RouterStats | None]:
    """Runs module `depth` (0 is the first): from the hidden state of token i and token i + 1 to the state for i + 2.

    Args:
      hidden: `[T, D]`, of the main model after its final norm, or this function's own result one module earlier.
      next_tokens: `[T]` int32, for each row the token one further than the last that `hidden` has seen.
      state: what `context.attend` updates; module `depth` owns the cache layer `num_hidden_layers + depth`.
      placement: where the replicas of the modules' own experts stand, None where they are local.

    Returns:
      hidden `[T, D]` after the module's own norm, ready for `logits`; the state; the experts' tally.

    Raises:
      ValueError: the model has no MTP modules, or `context.routed` spreads experts that have no `placement`.
    """
    mtp, cfg = params.mtp, context.cfg
    if mtp is None:
        raise ValueError("the model has no multi-token prediction modules")
    # Embedding first: the order of the checkpoint's eh_proj columns, although equation 21 of the report has it last.
    both = jnp.concatenate(
        [
            norm(embed(params, next_tokens), mtp.embed_norm, depth, context),
            norm(hidden, mtp.hidden_norm, depth, context),
        ],
        axis=-1,
    )
    with jax.named_scope("eh_proj"):
        x = dense.plain_gemm(both, layer_slice(mtp.proj, depth), backend=context.numerics.backend)
    stack = Stack(mtp.layers, cfg.num_hidden_layers, placement)
    out, state, router_stats = run_layer(stack, depth, context, Residual.start(x), state)
    return norm(out.end(), mtp.norm, depth, context), state, router_stats
