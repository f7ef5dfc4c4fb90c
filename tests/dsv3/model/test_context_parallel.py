"""What devices that divide pages do together, against the same operation on whole pages."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsv3.config.model import PAGE_SIZE, ModelConfig
from dsv3.kv_cache.layout import gather_pages, page_bytes, page_cost, pool, scatter_pages, token_bytes
from dsv3.model.batch import PrefillBatch, StepRows
from dsv3.model.context_parallel import NOWHERE, ContextShards
from dsv3.model.layers.attention import LatentStep
from pallas_kernels import dsa, mla
from sharding.mesh import CONTEXT, OF_RANK, rank_mesh
from tests.dsv3.model.golden import model

HEADS, R, P = 4, 32, 16
SCALE = {"scale": 0.3, "value_width": R}
WHOLE, BY_HEAD = PartitionSpec(), PartitionSpec(None, OF_RANK)
_pack = jax.jit(lambda rows: mla.fp8_pages_of_rows(mla.pack_fp8(rows, R), R))
sizes = pytest.mark.parametrize("size", [2, 4])


def config(size: int, member: str = "deepseek_v3") -> ModelConfig:
    return dataclasses.replace(model(member)[1], context_shards=size)


def on_devices(body: Callable[..., Any], size: int, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Runs `body` on a rank of 4 devices, each `size` of which divide pages."""
    mesh = rank_mesh(jax.devices()[:4], tensor_parallel_size=4, context_shards=size)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, jnp.float32), (4, jnp.float32), (2, jnp.bfloat16), (4, jnp.uint8)],
    ids=["2", "4", "bfloat16", "fp8"],
)
def test_attention_is_that_to_whole_pages(size: int, dtype: Any) -> None:
    """Requests end in every device's part of a page, at its edges, and before the second device's first token."""
    page, rng = size * PAGE_SIZE, np.random.default_rng(size)
    lengths = np.array([0, 1, 63, 64, 65, page - 1, page, page + 1, page + 100, 2 * page], np.int32)
    compute = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    table = rng.permutation(20).reshape(10, 2).astype(np.int32)
    rows = rng.normal(size=(20 * size, PAGE_SIZE, R + P)).astype(np.float32)
    pages = _pack(rows) if dtype == jnp.uint8 else rows.astype(dtype)
    q = jnp.asarray(rng.normal(size=(10, HEADS, R + P)), compute)
    by_kernel_page = (table[:, :, None] * size + np.arange(size)).reshape(10, -1).astype(np.int32)
    attend = jax.jit(functools.partial(mla.mla_decode, pages_per_layer=len(pages), **SCALE))
    wanted = attend(q[:, None], pages, by_kernel_page, lengths)
    shards = ContextShards.of(config(size))

    def body(q: jax.Array, pages: jax.Array, table: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        own, how = shards.own_lengths(lengths), {"pages_per_layer": 20, **SCALE}
        out, lse = mla.mla_decode(shards.join_heads(q)[:, None], pages, table, own, **how)
        return shards.merge(out[:, 0], lse[:, 0])

    specs = BY_HEAD, PartitionSpec(None, CONTEXT), WHOLE, WHOLE
    whole_pages = jnp.reshape(pages, (20, page, -1))
    found = on_devices(body, size, specs, (BY_HEAD, BY_HEAD))(q, whole_pages, table, lengths)
    for got, want in zip(found, wanted, strict=True):
        tolerance = 0.02 if compute == jnp.bfloat16 else 2e-6
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want[:, 0], np.float32), atol=tolerance)


@sizes
def test_every_token_is_written_by_one_device_and_read_in_order(size: int) -> None:
    """What devices write of positions 0, 1, ... and join again is 0, 1, ... in pages of either kind."""
    cfg = config(size)
    count = 2 * cfg.page_size
    positions = np.arange(count, dtype=np.int32)
    rows = np.repeat(positions[:, None], R + P, axis=1).astype(np.float32)

    def body(positions: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        ends = jnp.array([0, count])
        batch = PrefillBatch(positions, positions, ends, ends[:1], jnp.arange(2, dtype=jnp.int32)[None])
        where, how = LatentStep.of(cfg, StepRows.of(batch), 2, None).positions, {"pages_per_layer": 2, "value_width": R}
        pages = mla.write_pages(jnp.full((2, PAGE_SIZE, R + P), -1.0), rows, *where, **how)
        own = ContextShards.of(cfg).own_lengths(positions + 1)
        joined = ContextShards.of(cfg).join_tokens(pages.reshape(-1, R + P))
        return joined, jax.lax.psum(own, CONTEXT), own[None]

    found = on_devices(body, size, (WHOLE, WHOLE), (WHOLE, WHOLE, PartitionSpec(CONTEXT)))(positions, rows)
    np.testing.assert_array_equal(found[0], rows)
    np.testing.assert_array_equal(found[1], positions + 1)
    assert (np.diff(np.asarray(found[2]), axis=1) <= 1).all() and (found[2][:, -1] == count // size).all()
    assert (np.ptp(found[2], axis=0) <= PAGE_SIZE).all(), "a query's keys are spread evenly: no device waits long"


def test_the_best_tokens_are_those_of_all_devices() -> None:
    """Integers have many ties, which the first tokens win; some rows see fewer tokens than are chosen."""
    size = 4
    cfg, topk, rng = config(size), 16, np.random.default_rng(0)
    shards, visible = ContextShards.of(cfg), np.array([0, 5, 16, 70, 2 * cfg.page_size], np.int32)
    scores = rng.integers(0, 9, (len(visible), 2 * cfg.page_size)).astype(np.float32)
    seen = np.where(np.arange(scores.shape[1]) < visible[:, None], scores, -np.inf)
    wanted = np.asarray(dsa.select_topk(seen, visible, topk))
    own_scores = seen.reshape(len(visible), 2, size, PAGE_SIZE).swapaxes(1, 2).reshape(len(visible), size, -1)

    def body(scores: jax.Array, visible: jax.Array) -> tuple[jax.Array, ...]:
        own = shards.own_lengths(visible)
        places = dsa.select_topk(scores[:, 0], own, topk)
        best = jnp.take_along_axis(scores[:, 0], jnp.minimum(places, scores.shape[2] - 1), axis=1)
        valid = places < own[:, None]
        best = jnp.where(valid, best, -jnp.inf)
        found = shards.best_tokens(jnp.where(valid, places, NOWHERE), best, topk)
        places, counts = shards.own_tokens(found, found < visible[:, None])
        return found, places[None], counts[None]

    each = PartitionSpec(CONTEXT)
    found, places, counts = on_devices(body, size, (PartitionSpec(None, CONTEXT), WHOLE), (WHOLE, each, each))(
        own_scores, visible
    )
    valid = np.arange(topk) < np.minimum(visible, topk)[:, None]
    np.testing.assert_array_equal(np.where(valid, found, -1), np.where(valid, wanted, -1))
    assert (np.asarray(found)[~valid] >= visible.max()).all()
    np.testing.assert_array_equal(np.sum(counts, axis=0), np.minimum(visible, topk))
    for row, chosen in enumerate(np.asarray(found)):
        held = [(p // PAGE_SIZE * size + d) * PAGE_SIZE + p % PAGE_SIZE for d in range(size)
                for p in np.asarray(places)[d, row, : counts[d, row]]]  # fmt: skip
        assert sorted(held) == chosen[valid[row]].tolist()


@pytest.mark.parametrize(("size", "member"), [(4, "deepseek_v3"), (2, "deepseek_v32")], ids=["one group", "two groups"])
def test_a_payload_is_a_page_with_its_tokens_in_order(size: int, member: str) -> None:
    """Tiers and other instances get the bytes of whole pages, and bring them back."""
    cfg = config(size, member)
    groups, rng = cfg.cache_groups("bfloat16"), np.random.default_rng(0)
    arrays = {n: jnp.asarray(rng.normal(size=s.shape), s.dtype) for n, s in pool(cfg, "bfloat16", 3).items()}
    pages = np.array([2, -1, 0], np.int32)
    divided = dict.fromkeys(arrays, PartitionSpec(None, CONTEXT))
    out = on_devices(functools.partial(gather_pages, groups, context_shards=size), size, (divided, WHOLE), WHOLE)
    into = on_devices(
        functools.partial(scatter_pages, groups, context_shards=size), size, (divided, WHOLE, WHOLE), (divided, WHOLE)
    )
    values = out(arrays, pages)
    gather, scatter = (jax.jit(functools.partial(body, groups)) for body in (gather_pages, scatter_pages))
    np.testing.assert_array_equal(values, gather(arrays, pages))
    back, _ = into(jax.tree.map(np.zeros_like, arrays), pages, values)
    wanted, _ = scatter(jax.tree.map(np.zeros_like, arrays), pages, values)
    jax.tree.map(np.testing.assert_array_equal, back, wanted)


@sizes
def test_a_token_takes_a_devices_share(size: int) -> None:
    cfg, plain = config(size), config(1)
    assert cfg.page_size == size * plain.page_size and page_cost(cfg, "bfloat16") == page_cost(plain, "bfloat16")
    assert token_bytes(cfg, "bfloat16") == token_bytes(plain, "bfloat16"), "that of all devices together"
    assert page_bytes(cfg, "fp8") == size * page_bytes(plain, "fp8")
