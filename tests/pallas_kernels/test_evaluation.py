"""Programs evaluated with numpy give XLA's results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from pallas_kernels.evaluation import evaluate


def arithmetic(x, n):
    """Signs, rounding towards zero, bits, types, shapes and out-of-range indices."""
    bits = lax.shift_right_logical(-n, 28) + lax.shift_right_arithmetic(-n, 2) + (n << 3)
    whole = lax.div(-n, jnp.int32(4)) + lax.rem(-n, jnp.int32(4)) + jnp.clip(n, 2, 5)
    rows = jnp.broadcast_to(x.max(1, keepdims=True), x.shape) + jnp.arange(x.shape[1])[None]
    chosen = jnp.where(x > 0, jnp.exp2(x), x.astype(jnp.bfloat16).astype(jnp.float32))
    part = lax.dynamic_slice(x.T, (n[0] + 90, -n[0]), (2, 3))
    same = lax.bitcast_convert_type(x, jnp.int32)[::2, 1:3].reshape(-1)
    return bits, whole, rows, lax.select_n(n % 3, n, -n, 2 * n), chosen, jnp.concatenate([part, part + 1], 1), same


def control(x, n):
    """Branches, and loops of both kinds, forwards and backwards."""
    total = lax.fori_loop(0, n[0], lambda i, total: total + x[i % 4], jnp.zeros_like(x[0]))  # until n is reached
    steps = [lax.scan(lambda c, row: (c + row, c * 2), total, x, reverse=back) for back in (False, True)]
    return steps, lax.cond(n[0] > 3, lambda: total, lambda: -total), lax.switch(n[1], [jnp.sin, jnp.cos, jnp.exp], x)


@pytest.mark.parametrize("program", [arithmetic, control])
def test_as_in_xla(program) -> None:
    x = np.random.default_rng(0).standard_normal((4, 5), np.float32)
    n = np.array([5, 9, 2, 7], np.int32)
    jaxpr = jax.make_jaxpr(program)(x, n)
    found = evaluate(jaxpr, jaxpr.consts, x, n)
    for ours, theirs in zip(found, jax.tree.leaves(jax.jit(program)(x, n)), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_callbacks_own_their_arrays() -> None:
    """Later changes of arguments or results do not affect the callee, or the program."""
    kept = np.zeros(3, np.float32)

    def add(x):
        kept[:] += x
        return kept

    def program(x):
        first = io_callback(add, jax.ShapeDtypeStruct((3,), jnp.float32), x, ordered=True)
        return first, io_callback(add, jax.ShapeDtypeStruct((3,), jnp.float32), first, ordered=True)

    jaxpr = jax.make_jaxpr(program)(kept)
    first, second = evaluate(jaxpr, jaxpr.consts, np.arange(3, dtype=np.float32))
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [0, 2, 4])
