"""Batch-invariant kernels: the same bits of a row among any number of rows. Tiles: `test_invariant_programs.py`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpus, invariance, mla
from pallas_kernels.backend import Backend
from pallas_kernels.dense import layer_gemm, plain_gemm
from pallas_kernels.dsa.keys import queries_for
from pallas_kernels.grouped import int4_grouped_gemm_contiguous
from pallas_kernels.mixing import doubly_stochastic
from pallas_kernels.mla.schedule import schedule_pages
from tests.pallas_kernels.gemm.interpreted import bfloat16, interpret
from tests.pallas_kernels.numerics import normal

bf16, i32 = jnp.bfloat16, jnp.int32


def test_rows_of_products_have_the_same_bits() -> None:
    (x, _), (w, _) = bfloat16(0, 70, 80), bfloat16(1, 2, 136, 80)

    def product(x: jax.Array) -> jax.Array:
        with invariance.batch_invariant():
            return layer_gemm(x, w, 1, backend=Backend.MOSAIC)

    many = np.asarray(interpret(product, x), np.float32)
    for first, last in ((0, 1), (69, 70), (5, 12)):
        np.testing.assert_array_equal(np.asarray(interpret(product, x[first:last]), np.float32), many[first:last])


@pytest.mark.parametrize("lengths", [[5000, 1, 0, 64, 900, 3], [0] * 6, [64 * 700, 0, 0, 0, 0, 0], [100] * 6])
def test_no_request_is_split(lengths: list[int]) -> None:
    with invariance.batch_invariant():
        cuts, last = map(np.asarray, schedule_pages(np.asarray(lengths, np.int32), 7))
    assert (cuts[0] == 0).all() and cuts[-1].tolist() == [len(lengths), 0] and not cuts[:, 1].any()
    assert (np.diff(cuts[:, 0]) >= 0).all()
    for request, length in enumerate(lengths):
        (part,) = (p for p, (a, b) in enumerate(itertools.pairwise(cuts[:, 0])) if a <= request < b)
        assert not length or last[request] == part


def test_attention_splits_no_request_on_other_gpus() -> None:
    """Triton's kernel has a grid of (requests, parts, tiles of rows)."""

    def parts(requests: int) -> set[int]:
        def decode(q, pages, table, lengths):
            return mla.mla_decode(q, pages, table, lengths, scale=1.0, pages_per_layer=9, backend=Backend.TRITON)

        shapes = (((requests, 1, 16, 576), bf16), ((9, 64, 576), bf16), ((requests, 40), i32), ((requests,), i32))
        with gpus.compiling_for(gpus.by_number(80)):
            traced = jax.make_jaxpr(decode)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        shapes = [v.aval.shape for e in traced.jaxpr.eqns for v in e.outvars if len(v.aval.shape) == 4]
        return {shape[1] for shape in shapes if shape[0] == requests and shape[3] == 512}

    assert parts(2) != parts(400)
    with invariance.batch_invariant():
        assert parts(2) == parts(400) == {1}


@pytest.mark.optimised
def test_xlas_own_loops_on_a_cpu_give_rows_the_same_bits() -> None:
    """`CPU_OPTIONS` make it so; by default XLA differs below 4,096 values and at the end of a loop."""
    scores, angles = jnp.asarray(normal(0, 80, 4, 33)), jnp.asarray(normal(1, 80, 4, 4))

    @functools.partial(jax.jit, compiler_options=dict(invariance.CPU_OPTIONS))
    def made(scores: jax.Array, angles: jax.Array) -> tuple[jax.Array, ...]:
        mixed = scores[..., :5] * 1.3 + scores[..., 4::-1] * 0.7
        return jax.nn.softmax(scores), scores.sum(-1), mixed, doubly_stochastic(angles, 20, 1e-6)

    many = made(scores, angles)
    for first, last in ((0, 1), (77, 80), (3, 76)):
        for few, all_of_them in zip(made(scores[first:last], angles[first:last]), many, strict=True):
            np.testing.assert_array_equal(few, all_of_them[first:last])


def test_rows_of_a_cpu_have_the_same_bits_in_any_tile() -> None:
    """Products of many rows, of experts of four bits, the rotation of index keys, and XLA's products in blocks."""
    x, w = jnp.asarray(normal(0, 200, 256)), jnp.asarray(normal(1, 24, 256))
    words = jnp.asarray(np.random.default_rng(2).integers(0, 2**31, (1, 24, 32)), jnp.int32)
    scale, pool = jnp.ones((1, 8, 24), bf16), jnp.zeros((1, 64, 132), jnp.uint8)

    def products(x: jax.Array, tile: int) -> tuple[jax.Array, ...]:
        padded = jnp.pad(x, ((0, -len(x) % tile), (0, 0)))
        groups = jnp.zeros(len(padded) // tile, i32)
        four_bits = int4_grouped_gemm_contiguous(padded, words, scale, groups, tile_m=tile)[: len(x)]
        blocks = invariance.in_blocks(lambda rows: rows @ w.T, x)
        return plain_gemm(x, w), four_bits, queries_for(pool, x[:, None, :128]), blocks

    with invariance.batch_invariant():
        many = products(x, 64)
        for first, last, tile in ((0, 1, 1), (199, 200, 4), (60, 93, 16)):
            for few, all_of_them in zip(products(x[first:last], tile), many, strict=True):
                np.testing.assert_array_equal(few, all_of_them[first:last])
