"""The kernel of index scores in the Mosaic interpreter, with race detection, against numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dsa import mosaic_scores
from pallas_kernels.mosaic import interpret_params, reset_interpreter
from tests.pallas_kernels.mla.cases import PAGE, UNUSED_PAGE


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    reset_interpreter()


def test_scores_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs six pages over two blocks of four, so that a ring of two goes round; and a query that sees nothing."""
    monkeypatch.setattr(mosaic_scores, "PAGES", 4)
    monkeypatch.setattr(mosaic_scores, "STAGES", 2)
    rng, visible, heads, width = np.random.default_rng(0), [350, 0, 64], 16, 64
    q, weights = rng.normal(size=(3, heads, width)), rng.normal(size=(3, heads)).astype(np.float32)
    pool, table = rng.normal(size=(20, PAGE, width)), np.full((3, 6), UNUSED_PAGE, np.int32)
    table[0], table[2, 0] = rng.permutation(9)[:6], 9
    q, pool = jnp.asarray(q, jnp.bfloat16), jnp.asarray(pool, jnp.bfloat16)
    kernel = jax.jit(functools.partial(mosaic_scores.index_scores_mosaic, interpret=interpret_params()))
    found = np.asarray(kernel(q, weights, pool, table, np.array(visible, np.int32), first_page=10))
    for row, count in enumerate(visible):
        keys = np.asarray(pool, np.float64)[10 + table[row, : -(-count // PAGE)]].reshape(-1, width)[:count]
        wanted = weights[row] @ np.maximum(np.asarray(q, np.float64)[row] @ keys.T, 0)
        np.testing.assert_allclose(found[row, :count], wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("q", "pool", "message"),
    [
        (((8, 128), jnp.bfloat16), jnp.uint8, "bfloat16 and index keys of uint8 are not of one type"),
        (((8, 128), jnp.float32), jnp.float32, "not of one type of 16 bits"),
        (((4, 128), jnp.bfloat16), jnp.bfloat16, "4 heads of 128 are no multiples"),
        (((64, 128), jnp.bfloat16), jnp.bfloat16, None),
    ],
)
def test_what_the_kernel_takes(q, pool, message) -> None:
    why = mosaic_scores.unsupported(jax.ShapeDtypeStruct((2, *q[0]), q[1]), jax.ShapeDtypeStruct((4, PAGE, 128), pool))
    assert why is None if message is None else message in why
