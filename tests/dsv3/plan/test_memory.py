"""Bytes a device, against DeepSeek-V3's known figures; what does not fit, and what is said then."""

import dataclasses

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144, H200, H800, NODE_8XH800, PREFILL_EP32
from dsv3.plan.deployment import Deployment, DeploymentError
from dsv3.plan.memory import Memory, memory_of
from dsv3.plan.programs import cache_tokens, lay_out
from dsv3.plan.verdict import judge

EXPERT = 3 * 7168 * 2048
SCALES = 4 / 128**2
"""Bytes of scales for each FP8 element."""


def memory(deployment: Deployment) -> Memory:
    return memory_of(lay_out(DEEPSEEK_V3, deployment))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("deployment", "replicas", "published"), [(DECODE_EP144, 2, 24.0e9), (PREFILL_EP32, 9, 41.9e9)]
)
def test_weights_of_the_published_deployments(deployment, replicas, published) -> None:
    weights = memory(deployment).weights
    assert weights["routed experts"] == 58 * replicas * EXPERT * (1 + SCALES)
    assert weights["shared experts"] == 58 * EXPERT * (1 + SCALES)
    assert weights["embedding and head"] == 2 * 2 * 129280 * 7168
    in_bf16 = 61 * 2 * 128 * 128 * 512  # key and value up-projections, which the published figure counts in FP8
    router = weights["router, norms, expert map"]
    assert sum(weights.values()) - router - in_bf16 == pytest.approx(published, rel=2e-3)


@pytest.mark.aot
def test_cache_of_a_token() -> None:
    decode = memory(DECODE_EP144)
    assert decode.token == 70_272
    assert decode.cache_tokens == 128 * 78 * 64  # 4,989 tokens are 78 pages
    assert decode.fits
    assert decode.tokens_left == (decode.budget - decode.fixed) // 70_272 >= decode.cache_tokens


def test_prefill_holds_the_prompts_of_a_step() -> None:
    assert cache_tokens(PREFILL_EP32) == 4 * 4096
    assert cache_tokens(dataclasses.replace(PREFILL_EP32, prefix_hit_rate=0.5)) == 8 * 4096


@pytest.mark.aot
def test_one_node_of_80_gb_is_refused_with_numbers() -> None:
    held = memory(NODE_8XH800)
    verdict = judge(held, NODE_8XH800, 256)
    assert not verdict.fits
    assert "needs 146.9 GB of 72.0 GB (0.9 of 80 GB): weights 101.9, cache 44.9" in verdict.why
    assert held.tokens_left == 0
    assert any("at least 16 nodes (128 devices) with redundant_experts 0" in change for change in verdict.changes)


@pytest.mark.aot
def test_fp8_pages_leave_room_for_more_tokens() -> None:
    half, eight = memory(DECODE_EP144), memory(dataclasses.replace(DECODE_EP144, kv_cache_dtype="fp8"))
    assert (half.token, eight.token) == (61 * 1152, 61 * 656)
    assert eight.tokens_left > 1.7 * half.tokens_left


@pytest.mark.aot
def test_what_is_advised_fits() -> None:
    advised = dataclasses.replace(NODE_8XH800, nodes=16)
    assert memory(advised).fits
    assert not memory(dataclasses.replace(NODE_8XH800, nodes=8)).fits
    larger = dataclasses.replace(NODE_8XH800, device=dataclasses.replace(H200, memory_bytes=164_000_000_000))
    assert memory(larger).fits


@pytest.mark.aot
def test_too_large_a_batch_is_told_the_batch_that_fits() -> None:
    greedy = dataclasses.replace(DECODE_EP144, decode_requests=200)
    held = memory(greedy)
    verdict = judge(held, greedy, 256)
    requests = held.tokens_left // (78 * 64)
    assert verdict.changes[0].startswith(f"lower decode_requests to {requests} or context_length to ")
    assert memory(dataclasses.replace(greedy, decode_requests=requests)).fits
    context = int(verdict.changes[0].rpartition(" ")[2])
    assert memory(dataclasses.replace(greedy, context_length=context)).fits


@pytest.mark.aot
def test_tensor_parallelism_splits_attention_and_keeps_the_cache() -> None:
    split = dataclasses.replace(DECODE_EP144, tensor_parallel=4)
    one, four = memory(DECODE_EP144), memory(split)
    assert four.weights["attention"] < one.weights["attention"] / 2
    assert four.weights["routed experts"] == one.weights["routed experts"]
    assert four.cache == one.cache


@pytest.mark.aot
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"redundant_experts": 30}, "add redundant experts to reach 288"),
        ({"tensor_parallel": 8, "nodes": 16, "gpus_per_node": 24}, "add redundant experts to reach 384"),
        ({"expert_transport": "pigeon"}, "'pigeon' is not one of auto, ring, all_to_all"),
    ],
)
def test_what_cannot_be_laid_out(change, message) -> None:
    with pytest.raises(DeploymentError, match="decode_ep144") as caught:
        lay_out(DEEPSEEK_V3, dataclasses.replace(DECODE_EP144, **change))
    assert message in str(caught.value)


@pytest.mark.aot
def test_replicated_experts_are_advised_to_spread() -> None:
    alone = Deployment("alone", H800, 1, decode_requests=1, context_length=64, expert_parallel=False)
    held = memory(alone)
    assert held.weights["routed experts"] == 58 * 256 * EXPERT * (1 + SCALES)
    assert any("set expert_parallel" in change for change in judge(held, alone, 256).changes)
