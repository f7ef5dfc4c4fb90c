"""Routed and shared experts of one layer on one device."""

import jax
import jax.numpy as jnp

from dsv3.model.linear import Index, linear, swiglu
from dsv3.model.params import MlpParams, MoeParams
from pallas_kernels.backend import Backend
from pallas_kernels.grouped import align_groups, choose_tile_m, grouped_gemm_contiguous


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
    (T, K), E = topk_ids.shape, params.gate_up.shape[1]
    tile_m = choose_tile_m(T * K, E, backend=backend)
    aligned = align_groups(topk_ids.reshape(-1), E, tile_m)
    token = aligned.row_of_slot // K  # T in padding slots

    def product(rows: jax.Array, stack: jax.Array) -> jax.Array:
        flat = stack.reshape(-1, *stack.shape[2:])  # [L * E, N, K], addressed in place
        return grouped_gemm_contiguous(
            rows, flat, aligned.tile_group, tile_m=tile_m, group_offset=layer * E, backend=backend
        )

    rows = x.at[token].get(mode="fill", fill_value=0)
    out = product(swiglu(product(rows, params.gate_up)), params.down)
    picked = out.at[aligned.slot_of_row].get(mode="fill", fill_value=0).reshape(T, K, -1)
    y = jnp.einsum("tk,tkd->td", topk_weights, picked.astype(jnp.float32))
    return y.astype(x.dtype), aligned.counts


def mlp(x: jax.Array, params: MlpParams, layer: Index, backend: Backend | None = None) -> jax.Array:
    """SwiGLU of `x` `[T, D]`: a dense layer's MLP, or the shared expert."""
    return linear(swiglu(linear(x, params.gate_up, layer, backend)), params.down, layer, backend)
