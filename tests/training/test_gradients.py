"""Gradients written by hand compared with JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize("length", [6, 1090])
def test_gradients_of_attention_equal_those_of_its_definition(length: int) -> None:
    """The lengths take one block of queries, and three."""
    rng = np.random.default_rng(2)
    q, k, v, dy = (rng.normal(size=(2, length, 3, width)).astype(np.float32) for width in (8, 8, 4, 4))
    pairs = np.tril(rng.random((2, length, length)) < 0.5) | np.eye(length, dtype=bool)

    def definition(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.where(pairs[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.3, -jnp.inf)
        return (jnp.einsum("bhqk,bkhv->bqhv", jax.nn.softmax(scores, axis=-1), v) * dy).sum()

    def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (softmax_attention(q, k, v, pairs, 0.3) * dy).sum()

    values = jax.jit(lambda *heads: [jax.value_and_grad(f, (0, 1, 2))(*heads) for f in (ours, definition)])(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), *values)


def test_the_gradient_of_attention_saves_no_weights() -> None:
    heads = [jax.ShapeDtypeStruct((1, 2048, 2, 4), jnp.bfloat16)] * 3
    pairs = jax.ShapeDtypeStruct((1, 2048, 2048), jnp.bool)
    _, saved = jax.eval_shape(
        lambda *given: jax.vjp(lambda *qkv: softmax_attention(*qkv, given[3], 1.0), *given[:3]), *heads, pairs
    )
    sizes = [leaf.size for leaf in jax.tree.leaves(saved) if leaf.dtype != jnp.bool]
    assert sizes and max(sizes) <= 2048 * 2 * 4
