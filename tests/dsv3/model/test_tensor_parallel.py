"""Tensor parallelism: the devices of a rank must give the result of one device."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv3.config.model import ModelConfig, QueryScaling
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.layers.expert_parallel import ExpertParallel
from dsv3.model.params import Fp8Weight, Params, ParamSpec, abstract, declare
from dsv3.model.schedules import HOOKED, OVERLAPPED
from dsv3.model.steps import decode, prefill
from dsv3.model.tensor_parallel import Shards, arrange, check_shards, row_order
from pallas_kernels import aot
from pallas_kernels.backend import Backend
from sharding.collectives import Overlap, compiler_options, resolve_overlap
from sharding.experts.placement import Placement
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import RANK_SPEC, Machine, partitions, rank_mesh, rank_size

CFG = ModelConfig(  # without a query latent, so that query and latent rows are fused
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    post_moe_norm=True,  # takes the sum of all devices
    query_scaling=QueryScaling(beta=0.5, original_max_position_embeddings=2),
)
PUBLISHED = dataclasses.replace(  # DeepSeek-V3's widths
    CFG, num_attention_heads=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536,
    kv_lora_rank=512, hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
)  # fmt: skip
T, PAGES = 10, (4, 64, CFG.latent_dim)
BATCH = PrefillBatch(  # requests of 6 and 2 tokens, and 2 rows of padding; two micro-batches of 5 cut the first
    tokens=np.arange(3, 3 + T, dtype=np.int32),
    positions=np.array([0, 1, 2, 3, 4, 5, 0, 1, 0, 0], np.int32),
    cu_lengths=np.array([0, 6, 8], np.int32),
    context_lengths=np.zeros(2, np.int32),
    page_table=np.array([[0], [1]], np.int32),
)


def parameters() -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: rng.normal(scale=0.2, size=spec.shape).astype(spec.dtype), abstract(CFG, jnp.float32)
    )


def over_mesh(cfg: ModelConfig, mesh: Mesh, tokens: int, overlap: Overlap, step, **options):
    """`step` of a rank over the devices of `mesh`, with one replica per expert; and its parameters' partitions.

    A micro-batch has `tokens` tokens.
    """
    shards = Shards(rank_size(mesh))
    rows = LayerRows.from_widths(
        -(-tokens // shards.size), cfg.num_experts_per_tok, cfg.hidden_size, fp8_dispatch=False
    )
    transport = build(TransportKind.ALL_TO_ALL, Machine.from_mesh(mesh), cfg.n_routed_experts, rows, overlap)

    def body(params, placement, batch, pages):
        routed = ExpertParallel(transport, shards)
        batch = jax.tree.map(lambda a: a[0], batch)
        out = step(params, cfg, batch, pages, routed=routed, placement=placement, **options)
        return out.hidden[None], out.expert_counts[None], out.pages

    specs = partitions(declare(cfg))
    in_specs = (specs, PartitionSpec(), RANK_SPEC, RANK_SPEC)
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=RANK_SPEC, check_vma=False), specs


def test_a_rank_of_two_devices_gives_the_result_of_one() -> None:
    """Two micro-batches have an odd number of tokens each."""
    params = parameters()
    expected = jax.jit(prefill, static_argnums=1)(params, CFG, BATCH, {"latents": jnp.zeros(PAGES)})
    mesh = rank_mesh(jax.devices()[:2], tensor_parallel_size=2)
    step, _ = over_mesh(CFG, mesh, T // 2, Overlap.NONE, prefill, schedule=OVERLAPPED)
    everywhere = np.arange(CFG.n_routed_experts, dtype=np.int32)[None]
    placement = Placement(everywhere[..., None], np.ones_like(everywhere))
    batch = jax.tree.map(lambda a: a[None], BATCH)
    hidden, counts, pages = jax.jit(step)(arrange(params, CFG, 2), placement, batch, {"latents": jnp.zeros(PAGES)})
    live = BATCH.cu_lengths[-1]
    np.testing.assert_allclose(hidden[0, :live], expected.hidden[:live], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(counts[0], expected.expert_counts)  # each token once, not once a device
    one, other = (np.asarray(shard.data) for shard in pages["latents"].addressable_shards)
    np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(one, expected.pages["latents"], rtol=1e-4, atol=1e-5)


def test_fused_rows_are_reordered_for_each_device() -> None:
    gate_up = ParamSpec((1, 8, 3), ("layers", "gate_up", None))
    assert row_order(gate_up, CFG, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    latent = list(range(8, 8 + CFG.latent_dim))
    qkv_a = ParamSpec((1, 8 + CFG.latent_dim, 3), ("layers", "heads_latent", None))
    assert row_order(qkv_a, CFG, 2).tolist() == [0, 1, 2, 3, *latent, 4, 5, 6, 7, *latent]
    assert row_order(gate_up, CFG, 1) is None
    assert row_order(ParamSpec((1, 8, 3), ("layers", "heads", None)), CFG, 2) is None


def test_the_scales_of_fp8_rows_move_with_them() -> None:
    rows, blocks = np.arange(1024), np.arange(8)
    weight = Fp8Weight(rows[None, :, None], blocks[None, :, None])
    cfg = dataclasses.replace(PUBLISHED, intermediate_size=512, num_hidden_layers=1)
    empty = jax.tree.map(lambda spec: np.zeros((1, 1, 1)), declare(cfg))
    mlp = dataclasses.replace(empty.dense.mlp, gate_up=weight)
    params = dataclasses.replace(empty, dense=dataclasses.replace(empty.dense, mlp=mlp))
    arranged = arrange(params, cfg, 2).dense.mlp.gate_up
    assert arranged.scale[0, :, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    np.testing.assert_array_equal(arranged.scale[0, :, 0].repeat(128), arranged.data[0, :, 0] // 128)


@pytest.mark.parametrize(
    ("changes", "shards", "fp8", "message"),
    [
        ({}, 3, False, "tensor_parallel_size 3 does not divide num_attention_heads 128"),
        ({"intermediate_size": 18433}, 2, False, "does not divide intermediate_size 18433"),
        ({"moe_intermediate_size": 1023}, 2, False, "does not divide n_shared_experts .* 1023"),
        (
            {"intermediate_size": 18560},
            2,
            True,
            r"9280 rows or columns of dense.mlp.gate_up, .* 128.*fp8='dequantize'",
        ),
        ({"q_lora_rank": None}, 2, True, "576 rows or columns of dense.attention.qkv_a"),
        ({}, 128, True, "192 rows or columns of dense.attention.q_b"),
    ],
)
def test_a_model_that_does_not_divide_is_rejected(changes: dict, shards: int, fp8: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_shards(dataclasses.replace(PUBLISHED, **changes), shards, fp8=fp8)


def test_deepseek_v3_divides_by_eight_in_fp8() -> None:
    check_shards(PUBLISHED, 8, fp8=True)


@pytest.mark.aot
def test_decode_over_four_ranks_of_two_gpus_reduces_twice_a_layer_and_copies_no_page() -> None:
    cfg, B, pages = dataclasses.replace(CFG, num_hidden_layers=3), 8, 128
    mesh = aot.gpu_mesh({"node": 1, "gpu": 4, "tensor": 2, "context": 1})
    overlap = resolve_overlap("cuda")
    step, specs = over_mesh(cfg, mesh, B, overlap, decode, schedule=HOOKED, backend=Backend.REFERENCE)

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes = jax.eval_shape(lambda p: arrange(p, cfg, 2), abstract(cfg, jnp.bfloat16))
    params = jax.tree.map(lambda leaf, spec: array(leaf.shape, leaf.dtype, spec), shapes, specs)
    L, E = cfg.num_moe_layers, cfg.n_routed_experts
    placement = Placement(*(array(s, jnp.int32, PartitionSpec()) for s in ((L, E, 1), (L, E))))
    batch = DecodeBatch(*(array((4, *s), jnp.int32, RANK_SPEC) for s in ((B, 1), (B,), (B, 2))))
    pool = {"latents": array((4 * cfg.num_cache_layers * pages, 64, cfg.latent_dim), jnp.bfloat16, RANK_SPEC)}
    lowered = aot.lower_for(step, params, placement, batch, pool, mesh=mesh, donate_argnums=(3,))
    text = aot.compile_to_read(lowered, compiler_options("cuda")).as_text()
    reductions = re.findall(rf"bf16\[{B},{cfg.hidden_size}\]\S* all-reduce", text)
    assert len(reductions) == 4  # two in the loop over dense layers, two in that over the others
    pool_type = rf"bf16\[{cfg.num_cache_layers * pages},64,{cfg.latent_dim}\]"
    assert re.search(pool_type, text)
    assert not re.search(rf"{pool_type}\S* copy\(", text), "the page pool is copied"
