"""The plan of sparse attention: dense for short contexts, else scores, top-k, copies and attention."""

import dataclasses

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3, DEEPSEEK_V32
from configs.deployments import H200
from dsv3.config.device_rates import PEAKS
from dsv3.model.forms import masked_capacity
from tools.plan import roofline
from tools.plan.attention import attended_keys, index_weights
from tools.plan.deployment import PlannedBatch, kernel_rates
from tools.plan.roofline import decode_stages, prefill_stages, sparse_parts

MODEL = DEEPSEEK_V32
RATES = kernel_rates(H200, MODEL)
STAGES = {"decode": decode_stages, "prefill": prefill_stages}


def batch(tokens: int, keys: float, min_keys: float | None = None, **changes) -> PlannedBatch:
    return PlannedBatch(tokens, keys, experts=32, cache_dtype="fp8", min_keys=min_keys, **changes)


@pytest.mark.parametrize("phase", STAGES)
def test_short_contexts_have_deepseek_v3s_attention(phase: str) -> None:
    """The indexer computes its keys, 0.9 of 14 million weights, and no queries."""
    few = batch(64, 1024, 0 if phase == "prefill" else None)
    assert few.max_keys <= 2048 and sparse_parts(MODEL, RATES, few) is None
    ours, dense = (STAGES[phase](model, RATES, few) for model in (MODEL, DEEPSEEK_V3))
    assert {name for name in ours if ours[name] != dense[name]} == {"project"}
    assert index_weights(MODEL, use_topk=False) == 128 * 7168
    assert index_weights(MODEL, use_topk=True) == 64 * 128 * 1536 + 128 * 7168 + 64 * 7168
    assert ours["project"] - dense["project"] < 5e-6


def test_queries_of_a_prompt_attend_to_all_keys_up_to_topk() -> None:
    """4,096 tokens: the first 2,048 attend to all tokens before them, the others to 2,048."""
    assert attended_keys(MODEL, 2048, min_keys=0) == (1024 + 2048) / 2
    assert attended_keys(MODEL, 3000, min_keys=2500) == 2048
    assert attended_keys(MODEL, 500, min_keys=0) == 500
    assert attended_keys(DEEPSEEK_V3, 50_000, min_keys=0) == 50_000


def test_the_parts_of_a_long_context() -> None:
    """48 requests of 100,000 tokens, by hand: bytes of 132 and 656, operations, and cycles of one multiprocessor."""
    parts = sparse_parts(MODEL, RATES, batch(48, 100_000))
    assert parts is not None
    pairs = 48 * 100_000
    assert parts.scores == pytest.approx(max(pairs * (132 + 4) / 4.8e12, pairs * 2 * 64 * 128 / RATES.fp8_core_flops))
    assert parts.choice == pytest.approx(100_000 * 1.35 / 1.83e9)
    assert parts.copies == pytest.approx(2 * 48 * 2048 * 656 / 4.8e12)
    assert parts.attention == pytest.approx(48 * 2048 * 2 * 128 * (576 + 512) / RATES.decode_core_flops)
    assert parts.launches == pytest.approx(5 * 3e-6), "48 rows are copied at once"
    assert parts.seconds == pytest.approx(sum(dataclasses.astuple(parts)))
    stages = decode_stages(MODEL, RATES, batch(48, 100_000)), decode_stages(DEEPSEEK_V3, RATES, batch(48, 100_000))
    assert parts.seconds < stages[0]["attention"] < stages[1]["attention"] / 3


def test_only_scores_and_topk_grow_with_the_context() -> None:
    near, far = (sparse_parts(MODEL, RATES, batch(48, keys)) for keys in (10_000, 100_000))
    assert near is not None and far is not None
    assert (far.scores, far.choice) == pytest.approx((10 * near.scores, 10 * near.choice))
    assert (far.copies, far.attention, far.launches) == (near.copies, near.attention, near.launches)


def test_layers_without_an_indexer_have_no_scores_and_16_bits_take_longer() -> None:
    assert MODEL.indexer is not None
    half = dataclasses.replace(MODEL.indexer, shared_layers=tuple(range(1, 61, 2)))
    long = batch(48, 50_000)
    every, some = (
        sparse_parts(dataclasses.replace(MODEL, indexer=indexer), RATES, long) for indexer in (MODEL.indexer, half)
    )
    wide = sparse_parts(MODEL, RATES, dataclasses.replace(long, cache_dtype="bfloat16"))
    assert every is not None and some is not None and wide is not None
    assert (some.scores, some.choice) == pytest.approx((31 / 61 * every.scores, 31 / 61 * every.choice))
    assert (some.copies, some.attention) == (every.copies, every.attention)
    assert wide.copies / every.copies == pytest.approx(1152 / 656) and wide.scores > 1.9 * every.scores


def test_prompts_copy_rows_in_groups_and_select_on_one_multiprocessor_per_row() -> None:
    """4,096 rows copy 1.34 MB each, 199 at once; 132 multiprocessors select for 4,096 rows in 32 rounds."""
    parts = sparse_parts(MODEL, RATES, batch(4096, 4096, 0))
    assert parts is not None
    assert parts.launches == pytest.approx(21 * 5 * 3e-6)
    assert parts.choice == pytest.approx(32 * 4096 * 1.35 / 1.83e9)
    assert parts.copies == pytest.approx(2 * 4096 * attended_keys(MODEL, 4096, 0) * 656 / 4.8e12)


def test_masked_prompts_materialize_all_tokens_once_and_attend_to_all_visible_ones() -> None:
    """The last 4,096 tokens of 10,000, with a capacity of 10,240, by hand."""
    copied, masked = (sparse_parts(MODEL, RATES, batch(4096, 7952, 5904, kv_capacity=room)) for room in (0, 10_240))
    assert copied is not None and masked is not None and masked.masked and not copied.masked
    assert (masked.scores, masked.choice, masked.copies) == (copied.scores, copied.choice, 0)
    token = 1.25 * 2 * 128 * 256 * 512 / (RATES.prefill_flops / 2)  # k_up and v_up are bfloat16
    assert masked.expansion == pytest.approx(10_240 * token)
    assert masked.attention == pytest.approx(
        1.25 * 1.2021 * 4096 * 7952 * 2 * 128 * 320 / RATES.prefill_core_flops, 1e-4
    )
    assert masked.mask == pytest.approx((4096 * 2048 * 68 + 4096 * 10_240 / 8) / 4.8e12)
    assert masked.launches == pytest.approx(10 * 3e-6), "all scores, 168 MB, are there at once"
    with_room, without = (batch(4096, 7952, 5904, kv_capacity=room) for room in (10_240, 0))
    around = prefill_stages(MODEL, RATES, without)["attention"] - copied.seconds
    assert prefill_stages(MODEL, RATES, with_room)["attention"] == pytest.approx(masked.seconds + around - 4096 * token)


@pytest.mark.parametrize("tokens", [1024, 4096, 16_384])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8"])
def test_both_forms_are_equally_fast_at_the_crossover(tokens: int, cache_dtype: str) -> None:
    """The crossover ignores launches: the plan agrees with it within a twentieth."""
    rates, room = kernel_rates(H200, MODEL, 108 / 132), masked_capacity(MODEL, PEAKS["H200"], cache_dtype, tokens)
    prompt = PlannedBatch(tokens, room - tokens / 2, 32, cache_dtype=cache_dtype, min_keys=room - tokens)
    forms = [dataclasses.replace(prompt, kv_capacity=each) for each in (0, room)]
    copied, masked = (prefill_stages(MODEL, rates, form)["attention"] for form in forms)
    assert copied / masked == pytest.approx(1, abs=0.05)


def test_the_roofline_reads_index_keys_only_for_topk_selection() -> None:
    short, dense = (roofline.decode_roofline(model, H200, 64, 2048, 32, "fp8") for model in (MODEL, DEEPSEEK_V3))
    assert (short.cache, short.core) == (dense.cache, dense.core)
    long = roofline.decode_roofline(MODEL, H200, 64, 50_000, 32, "fp8")
    assert long.cache == pytest.approx(64 * 61 * (2048 * 656 + 50_000 * 132) / 4.8e12)
