"""Products with stacked weights."""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend

Index = jax.Array | int
"""A layer's place in a stack: static, or traced by a scan over the layers."""


def linear(x: jax.Array, weight: jax.Array, layer: Index, backend: Backend | None) -> jax.Array:
    """`x` `[T, in]` times layer `layer` of the stack `weight` `[L, out, in]`, in the dtype of x: `[T, out]`."""
    return jnp.einsum("ti,oi->to", x, at(weight, layer))


def at(stack: jax.Array, layer: Index) -> jax.Array:
    """Layer `layer` of a stack, for parameters too small to mind the copy that a traced index costs on a GPU."""
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def swiglu(gate_up: jax.Array) -> jax.Array:
    """`silu(gate) * up` of `[T, 2 * F]`, gate columns first: `[T, F]`."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
