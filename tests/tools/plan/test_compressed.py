"""The roofline of DeepSeek-V4's attention: what a decoded token reads, and what binds its stages."""

import dataclasses

import pytest

from configs.deepseek_v4 import DEEPSEEK_V4_FLASH
from configs.deployments import H200
from dsv3.config.device_rates import FP4_PRODUCTS
from dsv3.config.model import itemsizes
from tools.plan.attention import cache_reads, core_operations, product_elements, rows_seen
from tools.plan.deployment import PlannedBatch, kernel_rates
from tools.plan.roofline import decode_roofline, decode_stages, prefill_stages, sparse_parts

MODEL = DEEPSEEK_V4_FLASH
RATES = kernel_rates(H200, MODEL)
FP8_EXPERTS = dataclasses.replace(MODEL, fp4_experts=False)


@pytest.mark.parametrize(("context", "rows", "keys"), [(2**17, 21e6, 91e6), (2**20, 105e6, 727e6)], ids=["128K", "1M"])
def test_bytes_that_a_token_reads(context: int, rows: float, keys: float) -> None:
    """Windows of 43 layers, 512 chosen entries of 21, all entries of 20; and index keys of 132 bytes."""
    assert cache_reads(MODEL, context, "fp8") == pytest.approx((rows, keys), rel=0.025)


def test_rows_of_a_short_context_are_its_tokens_and_entries() -> None:
    assert rows_seen(MODEL, 64) == (43 * 64 + 21 * 16 + 20 * 0.5, 21 * 16)
    assert rows_seen(MODEL, 2**20) == (43 * 128 + 21 * 512 + 20 * 8192, 21 * 2**18)


def test_queries_of_a_prompt_see_their_own_part_of_it() -> None:
    """The mean over the tokens of a prompt of what each sees."""
    length = 4096
    each = [rows_seen(MODEL, keys) for keys in range(1, length + 1)]
    rows, keys = (sum(column) / length for column in zip(*each, strict=True))
    assert rows_seen(MODEL, length / 2, 0) == pytest.approx((rows, keys), rel=2e-3)


def test_the_floor_counts_the_whole_model() -> None:
    """Many requests on one GPU with all experts: 6.2 B weights that all tokens meet, 277 B of 4.25 bits, the head."""
    floor = decode_roofline(MODEL, H200, 1024, 2**17, 256, "fp8")
    assert floor.weights * 4.8e12 == pytest.approx(6.2e9 + 277.03e9 * 4.25 / 8 + 2 * 0.53e9, rel=5e-3)
    assert floor.cache * 4.8e12 == pytest.approx(1024 * 112e6, rel=0.02)
    assert floor.core * 989e12 == pytest.approx(1024 * core_operations(MODEL, 2**17))


def test_an_estimate_is_no_faster_than_its_floor() -> None:
    for rows in (1, 16, 256):
        stages = decode_stages(MODEL, RATES, PlannedBatch(rows, 8192, 64, cache_dtype="fp8"))
        layers = 43 * sum(seconds for name, seconds in stages.items() if name != "head")
        assert layers + stages["head"] > decode_roofline(MODEL, H200, rows, 8192, 64, "fp8").step


def test_few_rows_read_few_experts() -> None:
    """One row chooses 6 of 64 experts of a device, and none of them twice."""
    few, many = (decode_stages(MODEL, RATES, PlannedBatch(rows, 8192, 64))["experts"] for rows in (1, 128))
    one = 25_165_824 * 4.25 / 8 / RATES.grouped_bandwidth
    assert few - 15e-6 == pytest.approx(6 * one, rel=0.05)
    assert many - 15e-6 == pytest.approx(64 * one, rel=0.01)


def test_fp4_is_read_faster_and_multiplied_slower() -> None:
    assert itemsizes(MODEL) == (4.25 / 8, 1) and itemsizes(FP8_EXPERTS) == (1, 1)
    few, prompt = PlannedBatch(16, 8192, 64, cache_dtype="fp8"), PlannedBatch(4096, 4096, 64, min_keys=0.0)
    assert decode_stages(MODEL, RATES, few)["experts"] < decode_stages(FP8_EXPERTS, RATES, few)["experts"]
    fp4, fp8 = (prefill_stages(model, RATES, prompt)["experts"] for model in (MODEL, FP8_EXPERTS))
    assert fp4 == pytest.approx(fp8 / FP4_PRODUCTS)


def test_devices_of_a_rank_share_heads_and_not_entries() -> None:
    alone, split = (
        sparse_parts(MODEL, RATES, PlannedBatch(256, 2**16, 64, split=n, cache_dtype="fp8")) for n in (1, 4)
    )
    assert alone is not None and split is not None
    assert (split.scores, split.choice, split.pooling) == (alone.scores, alone.choice, alone.pooling)
    assert split.attention < alone.attention


def test_long_lists_are_attended_to_for_groups_of_queries() -> None:
    """4,096 queries whose page tables hold 2^20 tokens: 1 MiB of scores each, and 8 shares of 64 heads' sums.

    A layer that chooses launches three kernels for each of 16 groups, one that sees all two for each of 17, and a
    compressor two: 42 of these are in layers that choose. The kernel reads rows where they are.
    """
    parts = sparse_parts(MODEL, RATES, PlannedBatch(4096, 4352, 64, min_keys=0.0, cache_dtype="fp8"))
    assert parts is not None and parts.copies == 0
    assert pytest.approx(248, abs=1) == 256 * 2**20 / (4 * (8320 + 8 * 64 * 513))
    assert parts.launches == pytest.approx((21 * 16 * 3 + 20 * 17 * 2 + 2 + (42 + 20) * 2) / 43 * 3e-6)


def test_indexers_and_compressors_are_the_rest_of_attention() -> None:
    """Queries of the indexer are FP8; products of compressors and of the indexer's weights are not."""
    fp8, bf16 = product_elements(MODEL)
    assert fp8 == 21 * 64 * 128 * 1024
    assert bf16 == 21 * (8_388_608 + 64 * 4096 + 4 * 128 * 4096) + 20 * 4_194_304


def test_every_stage_of_a_layer_takes_time() -> None:
    """No layer has a dense MLP."""
    stages = decode_stages(MODEL, RATES, PlannedBatch(64, 8192, 64, cache_dtype="fp8"))
    assert {name for name, seconds in stages.items() if not seconds} == {"mlp"}
    assert {"mixing", "project", "attention"} <= {name for name, seconds in stages.items() if seconds > 20e-6}


def test_devices_that_divide_pages_read_their_share() -> None:
    """All their keys and rows, and the choice among the best of all devices; products are split either way."""
    batch = PlannedBatch(4, 2**20, 64, split=8, cache_dtype="fp8")
    whole, share = (sparse_parts(MODEL, RATES, dataclasses.replace(batch, context_split=n)) for n in (1, 8))
    assert whole is not None and share is not None
    assert whole.scores == pytest.approx(8 * share.scores)
    assert whole.choice / 8 < share.choice < whole.choice / 4
    assert share.attention < whole.attention and share.pooling == whole.pooling
