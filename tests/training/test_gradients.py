"""Gradients written by hand compared with JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np

from dsv3.model.layers.uncached_attention import softmax_attention
from pallas_kernels import dense
from pallas_kernels.backend import Backend


def test_gradients_of_a_bfloat16_product_equal_those_of_float32_up_to_rounding() -> None:
    rng = np.random.default_rng(1)
    x, w, dy = (rng.normal(size=shape).astype(jnp.bfloat16) for shape in ((12, 16), (2, 8, 16), (12, 8)))

    def gradients(dtype: str) -> tuple[jax.Array, ...]:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            stacked = dense.layer_gemm(x, w, 1, out_dtype=jnp.float32, backend=Backend.REFERENCE)
            return ((stacked + dense.plain_gemm(x, w[0], out_dtype=jnp.float32)) * dy.astype(jnp.float32)).sum()

        return jax.jit(jax.grad(product, (0, 1)))(x.astype(dtype), w.astype(dtype))

    for narrow, wide in zip(gradients("bfloat16"), gradients("float32"), strict=True):
        assert narrow.dtype == jnp.bfloat16
        np.testing.assert_allclose(narrow.astype(np.float32), wide, rtol=0.02, atol=0.05)


def test_gradients_of_attention_equal_those_of_its_definition() -> None:
    rng = np.random.default_rng(2)
    q, k, v, dy = (rng.normal(size=(2, 6, 3, width)).astype(np.float32) for width in (8, 8, 4, 4))
    pairs = np.tril(np.ones((1, 6, 6), np.bool))

    def definition(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.where(pairs[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.3, -jnp.inf)
        return (jnp.einsum("bhqk,bkhv->bqhv", jax.nn.softmax(scores, axis=-1), v) * dy).sum()

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (softmax_attention(q, k, v, pairs, 0.3) * dy).sum()

    values = jax.jit(lambda *heads: [jax.value_and_grad(f, (0, 1, 2))(*heads) for f in (ours, definition)])(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *values)
