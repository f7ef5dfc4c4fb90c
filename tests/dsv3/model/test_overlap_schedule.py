"""The schedule that XLA compiles for a decode step of DeepSeek-V3's shape in FP8 on eight H200s, without a GPU.

Also a prefill step on 32, in two micro-batches of 8,192 tokens, whose rows NCCL EP carries.

The step is too small for two micro-batches; for those see (`plan/test_plan.py` and
`plan/test_plan_prefill.py`).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs.deepseek_v3 import DEEPSEEK_V3
from dsv3.model.batch import AttentionForm, DecodeBatch, PrefillBatch
from dsv3.model.layers.expert_parallel import ExpertParallel
from dsv3.model.params import Fp8Weight, declare
from dsv3.model.schedules import HOOKED, OVERLAPPED, Schedule
from dsv3.model.steps import decode, prefill
from pallas_kernels import aot, bodies
from pallas_kernels.backend import Backend
from sharding.collectives import Overlap, compiler_options, resolve_overlap
from sharding.experts.placement import Placement
from sharding.experts.traffic import LayerRows
from sharding.experts.transport import build
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import RANK_SPEC, Machine, partition, partitions
from tools.plan import hlo
from tools.plan.launch_order import launch_order

CFG = dataclasses.replace(
    DEEPSEEK_V3, num_hidden_layers=4, first_k_dense_replace=0, num_nextn_predict_layers=0, vocab_size=1024
)
RANKS, WIDTH = 8, 4
PAGES = CFG.num_cache_layers * 64
TOKENS = 64
PREFILL_TOKENS, PROMPTS = 16384, 4
MATRIX_WORK = re.compile(r"gemm_fusion|fp8_dense|fp8_contiguous|bf16_dense|bf16_heads|mla_decode|mla_prefill")
ITEM_SIZES = {"f8e4m3fn": 1, "bf16": 2, "f32": 4}

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(resolve_overlap("cuda") is not Overlap.HOOKS, reason="jax 0.11 has no collectives in halves"),
]


@functools.cache
def compiled(
    kind: TransportKind = TransportKind.ALL_TO_ALL, schedule: Schedule = HOOKED, is_prefill: bool = False
) -> jax.stages.Compiled:
    """The program of a decode step on a node, or of a prefill step on four nodes, with 32 redundant experts."""
    nodes, replicas = (4, 288) if is_prefill else (1, CFG.n_routed_experts)
    mesh = aot.gpu_mesh({"node": nodes, "gpu": RANKS, "tensor": 1, "context": 1})
    tokens = (PREFILL_TOKENS if is_prefill else TOKENS) // schedule.micro_batches
    rows = LayerRows.from_widths(tokens, CFG.num_experts_per_tok, CFG.hidden_size, fp8_dispatch=True)
    transport = build(kind, Machine.from_mesh(mesh), replicas, rows, resolve_overlap("cuda"))
    step: Any = prefill if is_prefill else decode

    def body(params, placement, batch, pages):
        batch = jax.tree.map(lambda a: a[0], batch)
        how = dict(routed=ExpertParallel(transport), placement=placement, schedule=schedule)
        out = step(params, CFG, batch, pages, backend=Backend.MOSAIC, **how)
        return out.hidden[None], out.pages, out.overflows[None]

    def array(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def integers(*shape):
        return array((nodes * RANKS, *shape), jnp.int32, RANK_SPEC)

    def parameter(spec):
        where = partition(spec.axes)
        shape = tuple(replicas if axis == "experts" else n for axis, n in zip(spec.axes, spec.shape, strict=True))
        if not spec.quantizable:
            return array(shape, stored(spec), where)
        blocks = (*shape[:-2], *(-(-n // 128) for n in shape[-2:]))
        return Fp8Weight(array(shape, jnp.float8_e4m3fn, where), array(blocks, jnp.float32, where))

    whole, (L, E) = PartitionSpec(), (CFG.num_moe_layers, CFG.n_routed_experts)
    placement = Placement(array((L, E, 1), jnp.int32, whole), array((L, E), jnp.int32, whole))
    batch: Any = DecodeBatch(integers(TOKENS, 1), integers(TOKENS), integers(TOKENS, WIDTH))
    if is_prefill:
        chunks = integers(PROMPTS + 1), integers(PROMPTS), integers(PROMPTS, PREFILL_TOKENS // PROMPTS // 64)
        both = integers(PREFILL_TOKENS), integers(PREFILL_TOKENS)
        batch = PrefillBatch(*both, *chunks, form=AttentionForm.ABSORBED)
    pages = {"latents": array((nodes * RANKS * PAGES, 64, CFG.latent_dim), jnp.bfloat16, RANK_SPEC)}
    specs = partitions(declare(CFG))
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, whole, RANK_SPEC, RANK_SPEC), out_specs=RANK_SPEC, check_vma=False
    )
    arguments = jax.tree.map(parameter, declare(CFG)), placement, batch, pages
    with bodies.left_out():
        lowered = jax.jit(mapped, donate_argnums=3).lower(*arguments)
    return aot.compile_to_read(lowered, compiler_options("cuda"))


@functools.cache
def text() -> str:
    return compiled().as_text()


def layer_loop(text: str) -> list[str]:
    """The instructions, in scheduled order, of the loop over the layers: attention, and the most collectives."""
    computations = [part.splitlines()[1:] for part in text.split("\n\n") if "/attention/" in part]
    return max(computations, key=lambda lines: sum("all-to-all-start(" in line for line in lines))


def transfers(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Gives for each all-to-all the line that starts it, and what is scheduled until it is done."""
    started: dict[str, int] = {}
    for number, line in enumerate(lines):
        if match := re.match(r"\s*%?(\S+) = .*all-to-all-start\(", line):
            started[match[1]] = number
        elif match := re.search(r"all-to-all-done\(\S*?%?(all-to-all-start[\w.]*)\)", line):
            first = started.pop(match[1])
            yield lines[first], lines[first + 1 : number]
    assert not started, "every transfer is received in the loop that sends it"


def test_nothing_waits_for_the_host() -> None:
    """No condition or loop of the exchange or of attention waits for the host."""
    assert hlo.parse(text()).host_waits == ()
    assert "all-reduce" not in text(), "overflow is reported once, after the step"


def test_a_step_of_one_batch_has_one_collective_in_flight() -> None:
    """All steps have this schedule with --noexpert_overlap, where XLA allows one."""
    order = launch_order(hlo.parse(text()))
    assert (order.in_flight, order.faults) == (1, ())


def test_the_shared_expert_hides_the_combine_of_a_small_step() -> None:
    found = list(transfers(layer_loop(text())))
    assert len(found) == 2, "rows go in one piece, and come back"
    (combine,) = [between for start, between in found if "bf16" in start]
    work = [line for line in combine if MATRIX_WORK.search(line)]
    assert sum("custom-call(" in line for line in work) == 2, "gate and up, and down"
    assert all("shared_expert" in line for line in work)


def test_a_micro_batch_computes_while_nccl_ep_carries_the_other() -> None:
    """The five stages: each call that sends is completed after matrix work, and XLA moves none of its results."""
    text = compiled(TransportKind.NCCL_EP, OVERLAPPED).as_text()
    halves = "Dispatch 0, work, Complete 0, work, Combine 0, work, Dispatch 1, work, Complete 0, work, Complete 1, work"
    assert calls_in_order(text) == f"{halves}, Combine 1, work, Complete 1"
    moved = [shape for _, shape in written(text, "copy") if shape[:2] == (RANKS, TOKENS // 2)]
    assert not moved, "a call's results are written where its completion finds them"


def test_prefill_computes_while_nccl_ep_carries_rows_of_the_other_micro_batch() -> None:
    """High throughput, in four chunks; a call and its completion have the same arrays."""
    text = compiled(TransportKind.NCCL_EP, OVERLAPPED, is_prefill=True).as_text()
    assert calls_in_order(text) == (
        "Combine 0, work, Complete 0, Dispatch 1, work, Dispatch 0, Complete 1, work, Combine 1, Complete 0, work, "
        "Complete 1"
    )
    read = [set(operands) for name in ("Dispatch", "Combine") for operands in operands_of(text, name)]
    completed = [set(operands) for operands in operands_of(text, "Complete")]
    assert len(read) == len(completed) == 5, "the last combine of micro-batch 0 is after the loop"
    assert all(any(mine <= theirs for theirs in completed) for mine in read), "what a call reads lives until then"
    assert not re.search(r"all-to-all|ragged", text)


def operands_of(text: str, name: str) -> list[list[str]]:
    """The operands of each call of NCCL EP's handler `name`."""
    calls = re.findall(rf'custom-call\(([^)]*)\), custom_call_target="dsv3_nccl_ep_{name}_', text)
    return [re.findall(r"%?([\w.-]+)(?:,|$)", call) for call in calls]


def calls_in_order(text: str) -> str:
    """NCCL EP's calls in the loop over the layers, each with its micro-batch, and matrix work between them."""
    computations = [part.splitlines() for part in text.split("\n\n")]
    loop = max(computations, key=lambda lines: sum("dsv3_nccl_ep" in line for line in lines))
    found: list[str] = []
    for line in loop:
        if match := re.search(r'target="dsv3_nccl_ep_([A-Z][a-z]+)_.*micro_batch_(\d)/', line):
            found.append(f"{match[1]} {match[2]}")
        elif MATRIX_WORK.search(line) and "custom-call(" in line and found[-1:] != ["work"]:
            found.append("work")
    return ", ".join(found)


def test_the_page_pool_is_not_copied() -> None:
    assert compiled().memory_analysis().alias_size_in_bytes == PAGES * 64 * CFG.latent_dim * 2
    elements = [math.prod(shape) for _, shape in written(text(), "copy")]
    assert list(written(text(), "custom-call"))
    assert PAGES * 64 * CFG.latent_dim not in elements


def test_no_weight_is_copied() -> None:
    """Our kernels address the layer in the stack; XLA would copy a slice before its own product."""
    assert not copied_weights(text(), CFG.n_routed_experts // RANKS)


def copied_weights(text: str, local_experts: int) -> set[tuple[str, tuple[int, ...]]]:
    """Returns the weights of a layer, by type and shape, that the program writes anywhere."""
    heads, latent, hidden = CFG.num_attention_heads, CFG.kv_lora_rank, CFG.hidden_size
    up_projection, router = (heads, CFG.v_head_dim, latent), (CFG.n_routed_experts, hidden)
    together = ("bf16", (heads * CFG.v_head_dim, latent))  # prefill takes the heads together
    weights = {*weights_of_a_layer(local_experts), together}
    assert {("bf16", up_projection), ("bf16", router)} < weights
    assert {("f8e4m3fn", (2 * CFG.moe_intermediate_size, hidden)), ("f8e4m3fn", (24576, 1536))} < weights
    return {found for found in written(text, "copy|fusion") if found in weights}


def stored(spec):
    """Type of a parameter of DeepSeek-V3's checkpoint that is not FP8: bfloat16, but the router's bias."""
    return spec.dtype_in(jnp.bfloat16, checkpoint=[jnp.bfloat16])


def weights_of_a_layer(local_experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Type and shape, as in compiled text, of each matrix of a layer, of its experts together and of each one."""
    for spec in jax.tree.leaves(declare(CFG).moe):
        kind = "f8e4m3fn" if spec.quantizable else "f32" if stored(spec) == jnp.float32 else "bf16"
        shape = spec.shape[1:]
        if "experts" in spec.axes:
            yield kind, shape[1:]
            shape = (local_experts, *shape[1:])
        if math.prod(shape) * ITEM_SIZES[kind] >= 1 << 20:  # norms and biases are small
            yield kind, shape


def written(text: str, operations: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Type and shape, without ones, of every array that an instruction of these kinds writes, alone or in a tuple."""
    for result in re.findall(rf"^\s*(?:ROOT )?%?\S+ = (\S+|\(.*?\)) (?:{operations})\(", text, flags=re.MULTILINE):
        for kind, shape in re.findall(r"(\w+)\[([\d,]+)\]", result):
            yield kind, tuple(n for n in map(int, shape.split(",")) if n != 1)
