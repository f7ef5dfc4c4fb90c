"""The roofline model compared with published figures."""

import dataclasses

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import H200, H800
from dsv3.config.model import ModelConfig
from dsv3.kv_cache.layout import row_bytes
from tools.plan import roofline
from tools.plan.deployment import PlannedBatch, Rates, kernel_rates
from tools.plan.roofline import HOOK_S, HOST_S, TRANSFER_S

RATES = kernel_rates(H800, DEEPSEEK_V3)


def test_sizes_of_deepseek_v3() -> None:
    sizes = roofline.sizes_of(DEEPSEEK_V3)
    assert sizes.attention == pytest.approx(187.1e6, rel=1e-3)
    assert sizes.dense == pytest.approx(396.4e6, rel=1e-3)
    assert sizes.expert == sizes.shared == 44_040_192
    assert roofline.wire_rows(DEEPSEEK_V3) == (7392, 14336)
    assert 61 * row_bytes(DEEPSEEK_V3, "bfloat16") == 70_272


def test_terms_at_peak_rates() -> None:
    """88 requests a GPU at 4,989 tokens, DeepSeek's fleet."""
    floor = roofline.decode_roofline(DEEPSEEK_V3, H800, requests=88, context=4989, experts_per_device=2)
    milliseconds = {"weights": 6.6, "cache": 9.2, "core": 7.5, "products": 3.3, "wire": 17.7, "step": 19.1}
    assert {name: round(1e3 * getattr(floor, name), 1) for name in milliseconds} == milliseconds
    assert 88 / floor.wire == pytest.approx(4960, rel=1e-3)


def five_stage_layer(stages: dict[str, float], dispatch: float, combine: float) -> float:
    """Seconds of one decode layer of two micro-batches in the published pipeline."""
    attention = stages["attention"] + stages["router"]
    half = max(stages["shared_expert"] + stages["project"], dispatch) + stages["experts"] + max(attention, combine)
    return 2 * (half + 2 * HOOK_S)


def low_latency_transfers(model: ModelConfig, rates: Rates, tokens: int) -> tuple[float, float]:
    """Seconds of DeepEP's low-latency dispatch and combine of `tokens`, which send a row for each chosen expert."""
    dispatch, combine = (tokens * model.num_experts_per_tok * row for row in roofline.wire_rows(model))
    return TRANSFER_S + dispatch / rates.dispatch_link, TRANSFER_S + combine / rates.combine_link


def decode(tokens: int, context: int) -> tuple[dict[str, float], float, float]:
    """Stages, layer and step of two micro-batches of `tokens`, with DeepEP's low-latency transfers."""
    stages = roofline.decode_stages(DEEPSEEK_V3, RATES, PlannedBatch(tokens, context, experts=2))
    layer = five_stage_layer(stages, *low_latency_transfers(DEEPSEEK_V3, RATES, tokens))
    dense = 2 * 3 * (stages["project"] + stages["attention"] + stages["mlp"])
    return stages, layer, 58 * layer + dense + stages["head"] + HOST_S


def test_decode_profile_of_deepseek() -> None:
    """EP128, 128 tokens a micro-batch, 4K: measured dispatch 187, experts 128, combine 394 us, 61 layers 87.3 ms."""
    stages, layer, _ = decode(128, 4096)
    dispatch, combine = low_latency_transfers(DEEPSEEK_V3, RATES, 128)
    assert [dispatch * 1e6, combine * 1e6] == pytest.approx([189, 382], abs=1)
    assert stages["experts"] * 1e6 == pytest.approx(106, abs=1)
    assert 61 * layer / 87.3e-3 == pytest.approx(0.97, abs=0.01)


def test_decode_fleet_of_deepseek() -> None:
    """14.8k tokens/s per node; one constant of the model is fitted to it."""
    _, layer, step = decode(44, 4989)
    assert 2 * 44 * 8 / step == pytest.approx(14.8e3, rel=0.01)
    assert layer * 1e6 == pytest.approx(729, rel=0.02)


def test_decode_throughput_of_the_profile() -> None:
    """18.6k tokens/s a node in DeepSeek's profile at 64 tokens a micro-batch; the known error says +1 %."""
    _, _, step = decode(64, 4096)
    assert 2 * 64 * 8 / step / 18.6e3 == pytest.approx(1.01, abs=0.005)


def test_prefill_profile_of_deepseek() -> None:
    """4K prompts without hits: 116 us per token, 68.9k tokens/s per node, +10 % on the profile's 62.7k."""
    stages = roofline.prefill_stages(DEEPSEEK_V3, RATES, PlannedBatch(tokens=1, keys=2048, experts=9))
    step = 61 * (stages["project"] + stages["attention"]) + 58 * (stages["shared_expert"] + stages["experts"])
    step += 3 * stages["mlp"]
    assert step * 1e6 == pytest.approx(116, abs=1)
    assert 8 / step == pytest.approx(68.9e3, rel=2e-3)
    assert 8 / step / 62.7e3 == pytest.approx(1.10, abs=0.01)


def test_faster_memory_speeds_up_weights_and_not_transfers() -> None:
    faster = kernel_rates(H200, DEEPSEEK_V3)
    few = PlannedBatch(tokens=8, keys=1024, experts=32)
    slow, fast = (roofline.decode_stages(DEEPSEEK_V3, rates, few) for rates in (RATES, faster))
    assert fast["experts"] < slow["experts"]
    assert faster.dispatch_link == RATES.dispatch_link


def test_split_devices_share_attention_and_not_the_cache() -> None:
    alone, split = (
        roofline.decode_stages(DEEPSEEK_V3, RATES, PlannedBatch(64, 4096, experts=2, split=split)) for split in (1, 4)
    )
    assert split["project"] < alone["project"]
    core = 64 * 4096 * row_bytes(DEEPSEEK_V3, "bfloat16") / RATES.hbm
    assert split["attention"] > core


def test_drafts_read_the_cache_once_and_compute_for_each_token() -> None:
    one = roofline.decode_roofline(DEEPSEEK_V3, H800, 64, 4989, 2)
    two = roofline.decode_roofline(DEEPSEEK_V3, H800, 64, 4989, 2, width=2)
    assert (two.weights, two.cache) == (one.weights, one.cache)
    assert (two.core, two.products, two.wire) == pytest.approx((2 * one.core, 2 * one.products, 2 * one.wire))
    few_heads = dataclasses.replace(DEEPSEEK_V3, num_attention_heads=16)  # reading the cache takes longer there
    alone, pair = (
        roofline.decode_stages(few_heads, RATES, PlannedBatch(64 * width, 65536, experts=2, width=width))["attention"]
        for width in (1, 2)
    )
    assert pair == pytest.approx(alone)


def test_the_head_reads_its_weights_until_rows_take_longer() -> None:
    head = roofline.sizes_of(DEEPSEEK_V3).head
    seconds = [roofline.bf16_product(DEEPSEEK_V3, RATES, rows, head) for rows in (1, 128, 512, 1024)]
    assert seconds[0] == seconds[1] == pytest.approx(0.77e-3, rel=0.01)
    assert seconds[3] == pytest.approx(2 * seconds[2])
