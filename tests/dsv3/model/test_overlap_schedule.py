"""What XLA really schedules: the overlapped steps compiled for eight H200s, without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv3.config import ModelConfig
from dsv3.model.batch import DecodeBatch, PrefillBatch
from dsv3.model.expert_parallel import ExpertParallel
from dsv3.model.micro_batches import decode_overlapped, prefill_overlapped
from dsv3.model.params import abstract, declare
from pallas_kernels import aot
from pallas_kernels.backend import Backend
from sharding.collectives import Overlap, compiler_options, resolve_overlap
from sharding.placement import Placement
from sharding.rules import machine_of, of_ranks, partition
from sharding.transport import Kind, build, load_of

CFG = ModelConfig(
    vocab_size=128,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    intermediate_size=128,
    moe_intermediate_size=64,
    n_routed_experts=16,
    num_experts_per_tok=2,
    first_k_dense_replace=0,
)
RANKS, TOKENS, WIDTH, PAGES = 8, 64, 4, 512
MATRIX_WORK = re.compile(r"\bwhile\(|custom-call\(|fusion\(.*(gemm|dot)")


def compile_step(step) -> jax.stages.Compiled:
    mesh = aot.gpu_mesh({"node": 1, "gpu": RANKS, "tensor": 1})
    load = load_of(TOKENS // 2, CFG.num_experts_per_tok, CFG.hidden_size, fp8_dispatch=False)
    transport = build(Kind.ALL_TO_ALL, machine_of(mesh), CFG.n_routed_experts, load, resolve_overlap("cuda"))

    def body(params, placement, batch, pages):
        batch = jax.tree.map(lambda a: a[0], batch)
        routed = ExpertParallel(transport, placement)
        out = step(params, CFG, batch, pages, backend=Backend.REFERENCE, routed=routed)
        return out.hidden[None], out.pages

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def integers(*shape):
        return array((RANKS, *shape), jnp.int32, of_ranks())

    whole = PartitionSpec()
    specs = jax.tree.map(lambda spec: partition(spec.axes), declare(CFG))
    params = jax.tree.map(lambda leaf, spec: array(leaf.shape, leaf.dtype, spec), abstract(CFG, jnp.bfloat16), specs)
    L, E = CFG.num_moe_layers, CFG.n_routed_experts
    placement = Placement(array((L, E, 1), jnp.int32, whole), array((L, E), jnp.int32, whole))
    if step is prefill_overlapped:
        batch = PrefillBatch(integers(TOKENS), integers(TOKENS), integers(3), integers(2), integers(2, WIDTH))
    else:
        batch = DecodeBatch(integers(TOKENS, 1), integers(TOKENS), integers(TOKENS, WIDTH))
    pages = array((RANKS * L * PAGES, 64, CFG.latent_dim), jnp.bfloat16, of_ranks())
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, whole, of_ranks(), of_ranks()), out_specs=of_ranks(), check_vma=False
    )
    lowered = jax.jit(mapped, donate_argnums=3).lower(params, placement, batch, pages)
    return lowered.compile(compiler_options("cuda"))


def layer_loop(text: str) -> list[str]:
    """The instructions, in scheduled order, of the computation with the most collectives: the loop over the layers."""
    computations = [part.splitlines()[1:] for part in text.split("\n\n")]
    return max(computations, key=lambda lines: sum("all-to-all-start(" in line for line in lines))


def hidden_and_exposed(lines: list[str], payload: str) -> tuple[int, int]:
    """Transfers of activations (`payload` is their type) with matrix work between start and done, and without."""
    started, hidden, exposed = {}, 0, 0
    for number, line in enumerate(lines):
        if match := re.match(rf"\s*%?(\S+) = \(+{payload}\[.*all-to-all-start\(", line):
            started[match[1]] = number
        elif (match := re.search(r"all-to-all-done\(\S*?%?(all-to-all-start[\w.]*)\)", line)) and match[1] in started:
            between = lines[started[match[1]] : number]
            covered = any(MATRIX_WORK.search(other) for other in between)
            hidden, exposed = hidden + covered, exposed + (not covered)
    return hidden, exposed


@pytest.mark.aot
@pytest.mark.skipif(resolve_overlap("cuda") is not Overlap.HOOKS, reason="jax 0.11 has no collectives in two halves")
@pytest.mark.parametrize("step", [prefill_overlapped, decode_overlapped])
def test_every_transfer_of_a_layer_hides_behind_matrix_work(step) -> None:
    compiled = compile_step(step)
    text = compiled.as_text()
    assert hidden_and_exposed(layer_loop(text), "bf16") == (4, 0)  # dispatch and combine of two micro-batches
    pool = rf"bf16\[{CFG.num_moe_layers * PAGES},64,{CFG.latent_dim}\]\S* copy\("
    assert not re.findall(pool, text), "the page pool is copied"
