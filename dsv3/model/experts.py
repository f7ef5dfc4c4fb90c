"""Routed and shared experts of one layer on one device."""

import jax
import jax.numpy as jnp

from dsv3.model.linear import Index, at, linear, swiglu
from dsv3.model.params import MlpParams, MoeParams
from pallas_kernels.backend import Backend


def moe(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    params: MoeParams,
    layer: Index,
    backend: Backend | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of each token's routed experts.

    Args:
      x: `[T, D]`.
      topk_ids: `[T, K]` int32, experts of this layer, each in 0..E-1; -1 takes no expert (padding).
      topk_weights: `[T, K]` float32.
      params: the stack of layers; `gate_up` `[L, E, 2 * I, D]`, `down` `[L, E, D, I]`.
      layer: index of the layer in the stack, may be traced.

    Returns:
      y `[T, D]` in the dtype of x, and counts `[E]` int32, the (token, expert) pairs each expert worked on.
    """
    E = params.router.shape[1]
    chosen = jax.nn.one_hot(topk_ids, E, dtype=jnp.float32)  # [T, K, E]
    inner = swiglu(jnp.einsum("td,eid->tei", x, at(params.gate_up, layer)))
    out = jnp.einsum("tei,edi->ted", inner, at(params.down, layer))
    weights = jnp.einsum("tk,tke->te", topk_weights, chosen)
    y = jnp.einsum("te,ted->td", weights, out.astype(jnp.float32))
    return y.astype(x.dtype), chosen.sum(axis=(0, 1)).astype(jnp.int32)


def mlp(x: jax.Array, params: MlpParams, layer: Index, backend: Backend | None = None) -> jax.Array:
    """SwiGLU of `x` `[T, D]`: a dense layer's MLP, or the shared expert."""
    return linear(swiglu(linear(x, params.gate_up, layer, backend)), params.down, layer, backend)
