"""The roofline model compared with published figures."""

import dataclasses

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import H200, H800
from dsv3.kv_cache.layout import row_bytes
from tools.plan import roofline
from tools.plan.deployment import PlannedBatch, kernel_rates

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
