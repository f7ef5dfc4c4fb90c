"""Memory of a device, compared with DeepSeek-V3's known figures, and the advice if it does not fit."""

import dataclasses

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144, H200, H800, NODE_8XH200, NODE_8XH800, PREFILL_EP32
from configs.kimi import KIMI_K2_THINKING
from tools.plan.deployment import Deployment, DeploymentError
from tools.plan.memory import Memory, judge, memory_of
from tools.plan.programs import cache_tokens, lay_out, runs

EXPERT = 3 * 7168 * 2048
SCALES = 4 / 128**2
"""Bytes of scales for each FP8 element."""
WITH_DRAFTS = dataclasses.replace(DECODE_EP144, speculative_config={"method": "mtp"}, acceptance=0.85)


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
    vocabulary = 2 * 2 * 129280 * 7168  # which the published figure counts whole on each device
    assert weights["embedding and head"] == vocabulary / 8
    in_bf16 = 61 * 2 * 128 * 128 * 512  # key and value up-projections, which the published figure counts in FP8
    router = weights["router, norms, expert map"]
    assert sum(weights.values()) - router - in_bf16 + vocabulary * 7 / 8 == pytest.approx(published, rel=2e-3)


@pytest.mark.aot
def test_int4_experts_take_four_and_a_half_bits() -> None:
    """48 of 384 experts on each of eight devices; other weights are bfloat16."""
    found = memory_of(lay_out(KIMI_K2_THINKING, NODE_8XH200))
    assert found.weights["routed experts"] == 60 * 48 * EXPERT * 4.5 / 8
    assert found.weights["shared experts"] == 60 * EXPERT * 2
    assert found.fits and sum(found.weights.values()) < 100e9


@pytest.mark.aot
def test_cache_of_a_token() -> None:
    decode = memory(DECODE_EP144)
    assert decode.token == 70_272
    assert decode.cache_tokens == 128 * 78 * 64  # 4,989 tokens are 78 pages
    assert decode.fits
    assert decode.tokens_left == decode.account.pages * 64 >= decode.cache_tokens


@pytest.mark.aot
def test_drafts_add_a_module_and_its_cache_layer() -> None:
    """The module has two physical experts per device, a shared expert, attention, eh_proj, and no own head."""
    plain, drafts = memory(DECODE_EP144), memory(WITH_DRAFTS)
    assert (plain.token, drafts.token) == (61 * 1152, 62 * 1152)
    more = {name: size for name, size in drafts.weights.items() if plain.weights.get(name) != size}
    assert more["draft layers, routed experts"] == 2 * EXPERT * (1 + SCALES)
    attention = plain.weights["attention"] / 61
    rest = attention + EXPERT * (1 + SCALES) + 2 * 2 * 7168 * 7168 + 2 * 256 * 7168
    assert more["draft layers, all else"] == pytest.approx(rest, rel=1e-3)
    assert set(more) == {"draft layers, routed experts", "draft layers, all else", "router, norms, expert map"}


@pytest.mark.aot
def test_spreading_includes_the_module() -> None:
    """The advised deployment fits, including the module's experts."""
    one = dataclasses.replace(NODE_8XH800, speculative_config={"method": "mtp"}, acceptance=0.8)
    [advice] = [c for c in judge(memory(one), one, 256).changes if "spread" in c]
    nodes, redundant = (int(advice.split(word)[1].split()[0]) for word in ("at least ", "redundant_experts "))
    assert memory(dataclasses.replace(one, nodes=nodes, redundant_experts=redundant)).fits
    assert nodes == 7 and not memory(dataclasses.replace(one, nodes=6, redundant_experts=32)).fits


@pytest.mark.aot
def test_a_model_without_a_module_makes_no_drafts() -> None:
    with pytest.raises(DeploymentError, match=r"decode_ep144: speculative_config: .* needs a model with a multi-token"):
        lay_out(dataclasses.replace(DEEPSEEK_V3, num_nextn_predict_layers=0), WITH_DRAFTS)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("drafts", "phase", "expected"),
    [
        (1, "decode", [("model", 256, 2, 1), ("module", 256, 2, 1)]),
        (3, "decode", [("model", 512, 4, 1), ("module", 512, 4, 1), ("chain", 128, 1, 2)]),
        (3, "prefill", [("model", 4096, 1, 1), ("module", 4096, 1, 1), ("chain", 16, 1, 2)]),
    ],
)
def test_a_step_has_the_programs_that_the_engine_runs(drafts: int, phase, expected: list) -> None:
    config = {"method": "mtp", "num_speculative_tokens": drafts}
    deployment = dataclasses.replace(DECODE_EP144, prefill_tokens=4096, speculative_config=config, acceptance=0.8)
    planned = lay_out(DEEPSEEK_V3, deployment)
    found = runs(planned, phase)
    assert [(run.part, run.tokens, run.width, run.times) for run in found] == expected
    assert {run.key for run in found} <= set(planned.programs.keys())


def test_prefill_holds_the_prompts_of_a_step() -> None:
    assert cache_tokens(PREFILL_EP32, 64) == 4 * 4096
    assert cache_tokens(dataclasses.replace(PREFILL_EP32, prefix_hit_rate=0.5), 64) == 8 * 4096


@pytest.mark.aot
def test_one_node_of_80_gb_is_refused_with_numbers() -> None:
    held = memory(NODE_8XH800)
    verdict = judge(held, NODE_8XH800, 256)
    assert not verdict.fits
    assert "needs 143.6 GB of 76.4 GB (0.9 of 84.9 GB): weights 98.6, cache 44.9" in verdict.why
    assert held.tokens_left == 0
    assert any("at least 7 nodes (56 devices) with redundant_experts 24" in change for change in verdict.changes)


@pytest.mark.aot
def test_fp8_pages_fit_more_tokens() -> None:
    half, eight = memory(DECODE_EP144), memory(dataclasses.replace(DECODE_EP144, kv_cache_dtype="fp8"))
    assert (half.token, eight.token) == (61 * 1152, 61 * 656)
    assert eight.tokens_left > 1.7 * half.tokens_left


@pytest.mark.aot
def test_the_advised_deployment_fits() -> None:
    advised = dataclasses.replace(NODE_8XH800, nodes=7, redundant_experts=24)
    assert memory(advised).fits
    assert not memory(dataclasses.replace(NODE_8XH800, nodes=6, redundant_experts=32)).fits
    larger = dataclasses.replace(NODE_8XH800, device=dataclasses.replace(H200, memory_bytes=160_000_000_000))
    assert memory(larger).fits


@pytest.mark.aot
def test_a_too_large_batch_gets_the_advice_of_one_that_fits() -> None:
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
        ({"expert_combine": "fp8"}, "'fp8' is not one of auto, int8"),
    ],
)
def test_invalid_deployments_are_refused(change, message) -> None:
    with pytest.raises(DeploymentError, match="decode_ep144") as caught:
        lay_out(DEEPSEEK_V3, dataclasses.replace(DECODE_EP144, **change))
    assert message in str(caught.value)


@pytest.mark.aot
def test_replicated_experts_are_advised_to_spread() -> None:
    alone = Deployment("alone", H800, 1, decode_requests=1, context_length=64, expert_parallel=False)
    held = memory(alone)
    assert held.weights["routed experts"] == 58 * 256 * EXPERT * (1 + SCALES)
    assert any("set expert_parallel" in change for change in judge(held, alone, 256).changes)
