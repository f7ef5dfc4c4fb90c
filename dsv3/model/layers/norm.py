"""Normalization by mean and variance, of the indexer's keys; `pallas_kernels.rows` has that by the mean square."""

import jax
import jax.numpy as jnp


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Returns `(x - mean(x)) / std(x) * weight + bias` over the last axis; computed in float32, dtype of x."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
