"""Experts spread over ranks must give each rank what it would compute alone."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsv3.config import ModelConfig
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.layers.expert_parallel import ExpertParallel
from dsv3.model.params import Params, abstract, declare
from dsv3.model.schedules import HOOKED, OVERLAPPED, PLAIN, Schedule
from dsv3.model.steps import decode, prefill
from sharding.experts.eplb import ExpertMap, rebalance_experts
from sharding.experts.kind import Kind
from sharding.experts.placement import placement_of
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.mesh import RANK_SPEC, Machine, partitions, rank_mesh

CFG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=64,
    moe_intermediate_size=16,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
REDUNDANT, T, MP = 8, 48, 2
PAIRS = 300
"""What the experts of a device have room for, in one of the cases: random tokens of 8 ranks want fewer."""
PAGES = (CFG.num_cache_layers * 2 * MP, 64, CFG.latent_dim)


@functools.cache
def parameters() -> Params:
    """Random parameters in numpy: jax would compile a generator, and a gather in `spread`, for each shape."""
    rng = np.random.default_rng(0)
    specs = abstract(CFG, jnp.float32)
    return jax.tree.map(lambda spec: rng.normal(scale=0.2, size=spec.shape).astype(spec.dtype), specs)


def spread(params: Params, phy2log: np.ndarray) -> Params:
    """The parameters with the replicas of their experts `[L, Er, ...]`."""
    layer = np.arange(len(phy2log))[:, None]
    specs = declare(CFG)
    return jax.tree.map(lambda spec, a: a[layer, phy2log] if "experts" in spec.axes else a, specs, params)


def batches(ranks: int) -> tuple[PrefillBatch, DecodeBatch]:
    """Each rank has requests of 30 and 14 tokens and 4 rows of padding, then for each one more token and a draft."""
    rng = np.random.default_rng(0)
    lengths = np.array([30, 14], np.int32)
    positions = np.concatenate([np.arange(30), np.arange(14), np.zeros(4)]).astype(np.int32)
    table = np.arange(2 * MP, dtype=np.int32).reshape(2, MP)
    first = PrefillBatch(None, positions, np.array([0, 30, 44], np.int32), 0 * lengths, table)
    second = DecodeBatch(None, lengths + 2, table)
    first, second = jax.tree.map(lambda a: np.broadcast_to(a, (ranks, *a.shape)), (first, second))
    return (
        dataclasses.replace(first, tokens=rng.integers(0, CFG.vocab_size, (ranks, T)).astype(np.int32)),
        dataclasses.replace(second, tokens=rng.integers(0, CFG.vocab_size, (ranks, 2, 2)).astype(np.int32)),
    )


def run_rank(params: Params, first: PrefillBatch, second: DecodeBatch, **options) -> tuple[jax.Array, jax.Array, tuple]:
    """Prefill and one decode step of one rank: hidden states [T + 4, D], those of padding rows 0, counts, overflows."""
    out = prefill(params, CFG, first, jnp.zeros(PAGES), **options)
    after = decode(params, CFG, second, out.pages, **options)
    live = jnp.arange(T)[:, None] < first.cu_lengths[-1]
    hidden = jnp.concatenate([jnp.where(live, out.hidden, 0), after.hidden.reshape(-1, CFG.hidden_size)])
    return hidden, out.expert_counts + after.expert_counts, (out.overflows, after.overflows)


_alone = jax.jit(lambda *arguments: run_rank(*arguments)[:2])


@functools.cache
def alone(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    results = [_alone(parameters(), *jax.tree.map(lambda a, r=rank: a[r], batches(ranks))) for rank in range(ranks)]
    return tuple(np.stack(part) for part in zip(*results, strict=True))


@functools.cache
def spread_step(nodes: int, gpus: int, kind: Kind, schedule: Schedule) -> tuple[Callable, ExpertMap]:
    """The jitted step of all ranks on parameters and batches, with room for what random weights choose, and its map."""
    ranks = nodes * gpus
    mesh = rank_mesh(jax.devices()[:ranks], nodes)
    hot = np.random.default_rng(1).lognormal(sigma=2, size=(CFG.num_moe_layers, CFG.n_routed_experts))
    expert_map = rebalance_experts(hot, CFG.n_routed_experts + REDUNDANT, CFG.n_group, nodes, ranks)
    placement = placement_of(expert_map, REDUNDANT + 1)
    rows = LayerRows.from_widths(4 * T, CFG.num_experts_per_tok, CFG.hidden_size, fp8_dispatch=False)
    transport = build(kind, Machine.from_mesh(mesh), CFG.n_routed_experts + REDUNDANT, rows)
    if kind is Kind.HIERARCHICAL:
        transport = dataclasses.replace(transport, pairs=PAIRS)

    def body(params, placement, first, second):
        first, second = jax.tree.map(lambda a: a[0], (first, second))
        how = dict(routed=ExpertParallel(transport), placement=placement, schedule=schedule)
        results = run_rank(params, first, second, **how)
        return jax.tree.map(lambda a: a[None], results)

    specs = partitions(declare(CFG))
    step = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(), RANK_SPEC, RANK_SPEC),
            out_specs=RANK_SPEC,
            check_vma=False,
        )
    )
    return lambda params: step(spread(params, expert_map.phy2log), placement, *batches(ranks)), expert_map


@pytest.mark.parametrize(
    ("nodes", "gpus", "kind", "schedule"),
    [
        (1, 1, Kind.ALL_TO_ALL, PLAIN),
        (1, 2, Kind.RING, HOOKED),
        (2, 4, Kind.ALL_TO_ALL, OVERLAPPED),
        (2, 4, Kind.HIERARCHICAL, OVERLAPPED),
    ],
)
def test_every_rank_computes_what_it_would_alone(nodes: int, gpus: int, kind: Kind, schedule: Schedule) -> None:
    step, _ = spread_step(nodes, gpus, kind, schedule)
    hidden, counts, overflows = step(parameters())
    expected, expected_counts = alone(nodes * gpus)
    np.testing.assert_allclose(hidden, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(counts, expected_counts)
    assert not any(np.asarray(each).any() for each in overflows)


def test_a_device_that_all_tokens_choose_says_that_its_experts_lack_room() -> None:
    """The same program, whose hops hold all rows. A device has two or three pairs of each token of 8 ranks."""
    step, expert_map = spread_step(2, 4, Kind.HIERARCHICAL, OVERLAPPED)
    held = expert_map.phy2log[0].reshape(8, -1)
    device = (1 / expert_map.logcnt[0][held]).sum(axis=1).argmax()
    params = parameters()
    bias = np.zeros_like(params.moe.moe.router_bias)
    bias[:, held[device]] = 100
    moe = dataclasses.replace(params.moe, moe=dataclasses.replace(params.moe.moe, router_bias=bias))
    _, _, (prefill_overflows, _) = step(dataclasses.replace(params, moe=moe))
    assert prefill_overflows[device] > 0
