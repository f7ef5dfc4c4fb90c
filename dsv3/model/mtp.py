"""Multi-token prediction modules (DeepSeek-V3 report, arXiv:2412.19437, 2.2)."""

from typing import Any

import jax
import jax.numpy as jnp

from dsv3.model.decoder import Step, embed, run_layer
from dsv3.model.experts import Tally
from dsv3.model.linear import at
from dsv3.model.norm import rms_norm
from dsv3.model.params import Params


def predict(
    params: Params, step: Step, depth: int, hidden: jax.Array, next_tokens: jax.Array, state: Any
) -> tuple[jax.Array, Any, Tally | None]:
    """Module `depth` (0 is the first): from the hidden state of token i and token i + 1 to the state for token i + 2.

    Args:
      hidden: `[T, D]`, of the main model after its final norm, or this function's own result one module earlier.
      next_tokens: `[T]` int32, for each row the token one further than the last that `hidden` has seen.
      state: what `step.attend` carries; module `depth` owns the cache layer `num_hidden_layers + depth`.

    Returns:
      hidden `[T, D]` after the module's own norm, ready for `logits`; the state; the experts' tally.

    Raises:
      ValueError: the model has no MTP modules.
    """
    mtp, cfg = params.mtp, step.cfg
    if mtp is None:
        raise ValueError("the model has no multi-token prediction modules")
    # Embedding first: the order of the checkpoint's eh_proj columns, although equation 21 of the report has it last.
    both = jnp.concatenate(
        [
            rms_norm(embed(params, next_tokens), at(mtp.embed_norm, depth), cfg.rms_norm_eps),
            rms_norm(hidden, at(mtp.hidden_norm, depth), cfg.rms_norm_eps),
        ],
        axis=-1,
    )
    x = jnp.einsum("ti,oi->to", both, at(mtp.proj, depth))
    x, state, tally = run_layer(mtp.layers, depth, step, x, state, cfg.num_hidden_layers + depth)
    return rms_norm(x, at(mtp.norm, depth), cfg.rms_norm_eps), state, tally
