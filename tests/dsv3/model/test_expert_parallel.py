"""Expert parallelism: each rank must get the same result as with local experts.

The plain schedule is in engine/test_parallel.py; the others around dense layers, and an overlapped prefill that sends
all to all, in test_tensor_parallel.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dsv3.config.model import ModelConfig
from dsv3.kv_cache.layout import Pool
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.layers.expert_parallel import ExpertParallel
from dsv3.model.params import Params, abstract, declare
from dsv3.model.schedules import HOOKED, OVERLAPPED, Schedule
from dsv3.model.steps import decode, prefill
from sharding.collectives import Overlap
from sharding.experts.eplb import ExpertMap, rebalance_experts
from sharding.experts.placement import placement_of
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import RANK_SPEC, Machine, partitions, rank_mesh
from tests.sharding import nccl_ep

CFG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    first_k_dense_replace=0,
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
PAIRS = 410
"""Pair capacity of a device in one of the cases: random tokens of 8 ranks need fewer."""
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


class Step(NamedTuple):
    hidden: Any  # [tokens, D], those of padding rows 0
    counts: Any
    overflows: Any
    pages: Any
    ids: Any  # [tokens, L, K], those of padding rows 0


def run_prefill(params: Params, batch: PrefillBatch, **options) -> Step:
    batch = dataclasses.replace(batch, returns_routed_experts=True)
    out = prefill(params, CFG, batch, {"latents": jnp.zeros(PAGES)}, **options)
    live = jnp.arange(T)[:, None] < batch.cu_lengths[-1]
    ids = jnp.where(live[..., None], out.routed_experts, 0)
    return Step(jnp.where(live, out.hidden, 0), out.expert_counts, out.overflows, out.pages, ids)


def run_decode(params: Params, batch: DecodeBatch, pages: Pool, **options) -> Step:
    out = decode(params, CFG, dataclasses.replace(batch, returns_routed_experts=True), pages, **options)
    ids = out.routed_experts.reshape(-1, CFG.num_moe_layers, CFG.num_experts_per_tok)
    return Step(out.hidden.reshape(-1, CFG.hidden_size), out.expert_counts, out.overflows, (), ids)


def run_rank(params: Params, first: PrefillBatch, second: DecodeBatch, **options) -> tuple[Step, Step]:
    """Prefill and one decode step of one rank."""
    before = run_prefill(params, first, **options)
    return before, run_decode(params, second, before.pages, **options)


def run_decode_alone(params: Params, second: DecodeBatch, pages: Pool, **options) -> tuple[Step]:
    """The decode step of one rank."""
    return (run_decode(params, second, pages, **options),)


_alone = jax.jit(run_rank)


@functools.cache
def alone(ranks: int) -> tuple[Step, Step]:
    """What each rank computes by itself, `[ranks, ...]`."""
    results = [_alone(parameters(), *jax.tree.map(lambda a, r=rank: a[r], batches(ranks))) for rank in range(ranks)]
    return jax.tree.map(lambda *parts: np.stack(parts), *results)


@functools.cache
def spread_step(
    nodes: int, gpus: int, kind: TransportKind, schedule: Schedule, chunk: int = 0
) -> tuple[Callable[..., tuple[Step, ...]], ExpertMap]:
    """The jitted step of all ranks, with capacity for the experts that random weights select, and its expert map."""
    ranks = nodes * gpus
    mesh = rank_mesh(jax.devices()[:ranks], nodes)
    hot = np.random.default_rng(1).lognormal(sigma=2, size=(CFG.num_moe_layers, CFG.n_routed_experts))
    expert_map = rebalance_experts(hot, CFG.n_routed_experts + REDUNDANT, CFG.n_group, nodes, ranks)
    placement = placement_of(expert_map, REDUNDANT + 1)
    rows = LayerRows.from_widths(4 * T, CFG.num_experts_per_tok, CFG.hidden_size, fp8_dispatch=False)
    transport = build(kind, Machine.from_mesh(mesh), CFG.n_routed_experts + REDUNDANT, rows)
    if kind is TransportKind.NCCL_EP:
        hop = dataclasses.replace(transport.hops[0], overlap=Overlap.HOOKS)  # in halves, between which layers compute
        hop = dataclasses.replace(hop, chunk=chunk, received=chunk * ranks)
        transport = dataclasses.replace(transport, hops=(hop,))
        keys = [hop.of_micro_batch(number).key(CFG.num_experts_per_tok) for number in range(2)]
        nccl_ep.create_groups(mesh, keys)
    if kind is TransportKind.HIERARCHICAL:
        transport = dataclasses.replace(transport, pairs=PAIRS)

    run = run_decode_alone if schedule is HOOKED else run_rank  # hooked layers are the same in both steps

    def body(params, placement, given):
        how = dict(routed=ExpertParallel(transport), placement=placement, schedule=schedule)
        given = jax.tree.map(lambda a: a[0], given)
        return jax.tree.map(lambda a: a[None], run(params, *given, **how))

    specs = partitions(declare(CFG))
    step = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs, PartitionSpec(), RANK_SPEC),
            out_specs=RANK_SPEC,
            check_vma=False,
        )
    )
    return lambda params, given: step(spread(params, expert_map.phy2log), placement, given), expert_map


@pytest.mark.parametrize(
    ("nodes", "gpus", "kind", "schedule", "chunk"),
    [
        (1, 2, TransportKind.RING, HOOKED, 0),
        (2, 4, TransportKind.HIERARCHICAL, OVERLAPPED, 0),
        (2, 4, TransportKind.NCCL_EP, OVERLAPPED, 0),
        (2, 4, TransportKind.NCCL_EP, OVERLAPPED, 100),  # high throughput, in two calls
    ],
)
def test_every_rank_gets_the_result_of_local_experts(
    nodes: int, gpus: int, kind: TransportKind, schedule: Schedule, chunk: int
) -> None:
    step, _ = spread_step(nodes, gpus, kind, schedule, chunk)
    given, wanted_steps = batches(nodes * gpus), alone(nodes * gpus)
    if schedule is HOOKED:
        given, wanted_steps = (given[1], wanted_steps[0].pages), wanted_steps[1:]
    for mine, wanted in zip(step(parameters(), given), wanted_steps, strict=True):
        np.testing.assert_allclose(mine.hidden, wanted.hidden, rtol=2e-4, atol=2e-4)
        np.testing.assert_array_equal(mine.counts, wanted.counts)
        np.testing.assert_array_equal(np.sort(mine.ids), np.sort(wanted.ids))  # of experts, not of their replicas
        assert not np.asarray(mine.overflows).any()


def test_a_device_that_all_tokens_select_reports_overflow() -> None:
    """The hops hold all rows, but the device gets two or three pairs of each token of 8 ranks."""
    step, expert_map = spread_step(2, 4, TransportKind.HIERARCHICAL, OVERLAPPED)
    held = expert_map.phy2log[0].reshape(8, -1)
    device = (1 / expert_map.logcnt[0][held]).sum(axis=1).argmax()
    params = parameters()
    bias = np.zeros_like(params.moe.moe.router_bias)
    bias[:, held[device]] = 100
    moe = dataclasses.replace(params.moe, moe=dataclasses.replace(params.moe.moe, router_bias=bias))
    before, _ = step(dataclasses.replace(params, moe=moe), batches(8))
    assert before.overflows[device] > 0
