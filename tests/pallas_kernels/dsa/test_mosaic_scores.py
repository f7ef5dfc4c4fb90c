"""The kernel of index scores in the Mosaic interpreter, with race detection, against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dsa import mosaic_scores
from pallas_kernels.dsa.keys import fp8_queries, keys_of_pages, queries_for, write_keys
from pallas_kernels.mosaic import interpret_params, reset_interpreter
from tests.pallas_kernels.mla.cases import PAGE, UNUSED_PAGE


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    reset_interpreter()


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
def test_scores_in_the_interpreter(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six pages over two blocks of four, so that a ring of two wraps around; and a query without visible tokens.

    FP8 queries and keys are compared after rounding: their products are exact in float32.
    """
    monkeypatch.setattr(mosaic_scores, "PAGES", 4)
    monkeypatch.setattr(mosaic_scores, "STAGES", 2)
    rng, visible, heads, width = np.random.default_rng(0), [350, 0, 64], 16, 128 if fp8 else 64
    q, weights = rng.normal(size=(3, heads, width)), rng.normal(size=(3, heads)).astype(np.float32)
    pool, table = rng.normal(size=(20, PAGE, width)), np.full((3, 6), UNUSED_PAGE, np.int32)
    table[0], table[2, 0] = rng.permutation(9)[:6], 9
    q, pool = jnp.asarray(q, jnp.bfloat16), jnp.asarray(pool, jnp.bfloat16)
    if fp8:
        places = np.arange(20 * PAGE, dtype=np.int32)
        empty = np.zeros((20, PAGE, width + 4), np.uint8)
        keys = pool.reshape(-1, width)
        write = jax.jit(functools.partial(write_keys, layer=0, pages_per_layer=20))
        pool = write(empty, keys, places // PAGE, places % PAGE)
    kernel = jax.jit(functools.partial(mosaic_scores.index_scores_mosaic, interpret=interpret_params()))
    operands = jax.jit(fp8_queries)(q, weights) if fp8 else (q, weights)
    found = np.asarray(kernel(*operands, pool, table, np.array(visible, np.int32), first_page=10))
    q = np.asarray(jax.jit(queries_for)(pool, q), np.float64)
    keys_of = jax.jit(keys_of_pages, static_argnums=(2, 3))
    known = np.asarray(keys_of(pool, np.arange(20), width, jnp.float32), np.float64)
    for row, count in ((row, count) for row, count in enumerate(visible) if count):
        keys = known[10 + table[row, : -(-count // PAGE)]].reshape(-1, width)[:count]
        wanted = weights[row] @ np.maximum(q[row] @ keys.T, 0)
        np.testing.assert_allclose(found[row, :count], wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("q", "pool", "message"),
    [
        (((8, 128), jnp.bfloat16), jnp.uint8, None),
        (((4, 128), jnp.bfloat16), jnp.uint8, "4 heads of 128 on FP8 keys"),
        (((8, 64), jnp.bfloat16), jnp.uint8, "8 heads of 64 on FP8 keys"),
        (((8, 128), jnp.float32), jnp.float32, "not of one type of 16 bits"),
        (((4, 128), jnp.bfloat16), jnp.bfloat16, "4 heads of 128 are no multiples"),
        (((64, 128), jnp.bfloat16), jnp.bfloat16, None),
    ],
)
def test_what_the_kernel_supports(q, pool, message) -> None:
    why = mosaic_scores.unsupported(jax.ShapeDtypeStruct((2, *q[0]), q[1]), jax.ShapeDtypeStruct((4, PAGE, 128), pool))
    assert why is None if message is None else message in why
