"""The gradient in three programs: equal to `jax.vjp`, without repeated products."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.pipeline.split import Split, split

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)


def weights(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def mlp(params: Any, x: Any, data: Any) -> tuple[jax.Array, Any]:
    """Two products with a named part between them, whose equations belong to different programs."""
    hidden = jax.jit(lambda h: jax.nn.silu(h) * h)(x @ params[0])
    return hidden @ params[1], data


def run(parts: Split, params: Any, x: Any, data: Any, dy: Any) -> tuple[Any, Any, Any, Any]:
    y, extra, saved = jax.jit(parts.forward)(params, x, data)
    dx, made = jax.jit(parts.input_gradient)(params, saved, dy)
    dparams = jax.jit(parts.weight_gradient)(params, parts.keep(saved, made))
    return y, extra, dx, dparams


def products(function: Any, *arguments: Any) -> int:
    return jax.jit(function).lower(*arguments).compile().as_text().count(" dot(")


def assert_split_equals_vjp(function: Any, params: Any, x: Any, data: Any = ()) -> None:
    def only_y(params: Any, x: Any) -> Any:
        return function(params, x, data)[0]

    y, pullback = jax.vjp(only_y, params, x)
    dy = jax.tree.map(lambda leaf: leaf + 1, y)
    dparams, dx = pullback(dy)
    got = run(split(function, params, x, data), params, x, data, dy)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), (got[0], *got[2:]), (y, dx, dparams)
    )


def test_an_mlp_has_two_products_in_each_program() -> None:
    params = weights((8, 16), (16, 8))
    parts = split(mlp, params, X, 7)
    y, extra, saved = parts.forward(params, X, 7)
    dx, made = parts.input_gradient(params, saved, y)
    kept = parts.keep(saved, made)
    assert products(parts.forward, params, X, 7) == 2
    assert products(parts.input_gradient, params, saved, y) == 2
    assert products(parts.weight_gradient, params, kept) == 2
    whole = jax.jit(lambda p, s, dy: parts.weight_gradient(p, parts.keep(s, parts.input_gradient(p, s, dy)[1])))
    assert products(whole, params, saved, y) == 3  # without dx: what a program for W alone would compute again
    assert extra == 7
    assert dx.shape == X.shape
    assert_split_equals_vjp(mlp, params, X)


def test_saved_values_contain_no_weights() -> None:
    """A slice or a cast of a parameter is repeated, not kept per micro-batch."""
    stack = weights((2, 8, 16))[0]

    def layer(params: Any, x: Any, data: Any) -> tuple[jax.Array, Any]:
        weight = jax.lax.dynamic_index_in_dim(params.astype(jnp.float32), 1, keepdims=False).T
        return jnp.sin(x @ weight.T) @ weight, None

    parts = split(layer, stack, X, ())
    _, _, saved = parts.forward(stack, X, ())
    assert {value.shape for value in saved} == {(3, 8), (3, 16)}
    assert_split_equals_vjp(layer, stack, X)


def test_a_product_of_weights_is_computed_once() -> None:
    """It follows from the parameters alone, but is too expensive to repeat in each program."""

    def layer(params: Any, x: Any, data: Any) -> tuple[jax.Array, Any]:
        return x @ (params[0] @ params[1]), None

    params = weights((8, 16), (16, 8))
    parts = split(layer, params, X, ())
    y, _, saved = parts.forward(params, X, ())
    _, made = parts.input_gradient(params, saved, y)
    assert products(parts.forward, params, X, ()) == 2
    assert products(parts.input_gradient, params, saved, y) == 1
    assert products(parts.weight_gradient, params, parts.keep(saved, made)) == 3
    assert_split_equals_vjp(layer, params, X)


def branching(params: Any, x: Any, data: Any) -> tuple[Any, Any]:
    left, right = x["left"] @ params["a"], x["right"] * params["b"]
    return {"sum": left + right, "product": left * right}, None


def looping(params: Any, x: Any, data: Any) -> tuple[Any, Any]:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0], None


def choosing(params: Any, x: Any, data: Any) -> tuple[Any, Any]:
    return jnp.take(params, jnp.argsort(x, axis=-1), axis=0).sum(axis=-1) * x.sum(axis=1, keepdims=True), None


def masked(params: Any, x: Any, data: Any) -> tuple[Any, Any]:
    return jnp.where(jnp.tril(jnp.ones((3, 8))) > 0, x @ params + data, 0.5), None


@pytest.mark.parametrize(
    ("function", "params", "x", "data"),
    [
        (branching, dict(zip("ab", weights((8, 8), (8,)), strict=True)), {"left": X, "right": X[::-1]}, ()),
        (looping, weights((4, 8, 8))[0], X, ()),
        (choosing, weights((8, 4))[0], X, ()),
        (masked, weights((8, 8))[0], X, np.float32(0.5)),
        (lambda params, x, data: (x, None), weights((2,))[0], X, ()),
        (lambda params, x, data: (params * 2, None), weights((2,))[0], X, ()),
    ],
    ids=["branching", "looping", "choosing", "masked", "identity", "constant"],
)
def test_any_function_is_split_correctly(function: Any, params: Any, x: Any, data: Any) -> None:
    assert_split_equals_vjp(function, params, x, data)


def test_cheap_values_are_computed_again_from_smaller_ones() -> None:
    """A gate saves the product's result alone, an up-projection what it projects."""

    def layer(params: Any, x: Any, data: Any) -> tuple[jax.Array, Any]:
        up, down = params
        gate, value = jnp.split(x @ up, 2, axis=1)
        wide = (jax.nn.silu(gate) * value) @ down
        return jnp.tanh(wide) * jnp.sin(wide), None

    params = [0.1 * each for each in weights((8, 16), (8, 64))]
    parts = split(layer, params, X, ())
    y, _, saved = parts.forward(params, X, ())
    assert [value.shape for value in saved] == [(3, 8)] * 3  # x, gate and value
    assert products(parts.forward, params, X, ()) == 2
    assert products(parts.input_gradient, params, saved, y) == 3
    assert_split_equals_vjp(layer, params, X)
