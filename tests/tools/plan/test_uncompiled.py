"""Plans of DeepSeek-V4 from shapes: memory by the published figures, what fits, and what requests get."""

import dataclasses
import io
import json
from typing import Any

import jax
import pytest
from rich.console import Console

from configs.deepseek_v4 import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_FLASH_0731, DEEPSEEK_V4_PRO
from configs.deployments import (
    V4_FLASH_2XH200,
    V4_FLASH_4XH200,
    V4_FLASH_4XH200_TP4,
    V4_FLASH_8XH100,
    V4_FLASH_DECODE_EP32,
    V4_PRO_8XH200,
    V4_PRO_16XH200,
    V4_PRO_16XH200_TP8,
)
from dsv3.engine.memory import local_bytes
from pallas_kernels import bodies
from tools.plan.deployment import Deployment, DeploymentError
from tools.plan.memory import memory_of
from tools.plan.plan import step_roofline
from tools.plan.programs import compile_step, lay_out
from tools.plan.uncompiled import UncompiledPlan, mixed_rate, uncompiled_plan
from tools.plan.uncompiled_report import as_json, cache_pages, render

PAGE, WINDOW, STATE = 985_664, 3_845_312, 14_581_760
"""Bytes of DeepSeek-V4-Flash in FP8, without an MTP module: 3,850.25 per token."""
LEAST = 4 * 64 + 8  # window pages of 64 slots
WITHOUT_MODULE = dataclasses.replace(DEEPSEEK_V4_FLASH, num_nextn_predict_layers=0)


def plan(deployment: Deployment, **changes) -> UncompiledPlan:
    model = DEEPSEEK_V4_PRO if "pro" in deployment.name else DEEPSEEK_V4_FLASH
    return uncompiled_plan(model, "deepseek_v4", dataclasses.replace(deployment, **changes))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("deployment", "fp4", "fp8"),
    [(V4_FLASH_2XH200, 82.4e9, 147.4e9), (V4_FLASH_4XH200, 45.6e9, 78.1e9), (V4_FLASH_8XH100, 27.2e9, 43.5e9)],
    ids=lambda value: getattr(value, "name", None),
)
def test_weights_of_a_gpu(deployment: Deployment, fp4: float, fp8: float) -> None:
    """Dense weights replicated, experts spread. The expected bytes are those of files.

    Here GPUs also share the vocabulary, and a projection is bfloat16.
    """
    for mode, expected in (("keep", fp4), ("fp8", fp8)):
        memory = plan(deployment, fp4=mode).memory
        whole = 2 * 2 * 129280 * 4096 - memory.weights["embedding and head"]
        in_bf16 = 43 * 33_554_432
        assert memory.account.weights + whole - in_bf16 == pytest.approx(expected, rel=3e-3)


@pytest.mark.aot
def test_a_step_with_fp4_experts_compiles_and_has_the_planned_bytes() -> None:
    """One layer that chooses entries, of the published widths: its arguments are the weights and the cache."""
    compressed = dataclasses.replace(WITHOUT_MODULE.compressed, ratios=(4,))  # type: ignore[type-var]
    model = dataclasses.replace(WITHOUT_MODULE, num_hidden_layers=1, num_hash_layers=0, compressed=compressed)
    planned = lay_out(model, dataclasses.replace(V4_FLASH_4XH200, prefill_tokens=0))
    with bodies.left_out():
        [compiled] = compile_step(planned, "decode")
    assert "fp4_grouped_gemm" in compiled.text
    held = planned.params, planned.layout.pages, planned.layout.state
    computed = sum(local_bytes(leaf) for leaf in jax.tree.leaves(held))
    assert 0 <= compiled.arguments - computed < 1e6
    assert memory_of(planned).account.weights == sum(local_bytes(leaf) for leaf in jax.tree.leaves(planned.params))


@pytest.mark.aot
@pytest.mark.parametrize(
    ("deployment", "fp4", "fits"),
    [
        (V4_FLASH_2XH200, "keep", True),
        (V4_FLASH_2XH200, "fp8", False),
        (V4_FLASH_4XH200, "fp8", True),
        (V4_FLASH_8XH100, "fp8", True),
        (V4_PRO_8XH200, "keep", True),
        (V4_PRO_8XH200, "fp8", False),
        (V4_PRO_16XH200, "keep", True),
        (V4_PRO_16XH200, "fp8", False),
        (V4_PRO_16XH200_TP8, "fp8", True),
        (V4_FLASH_DECODE_EP32, "keep", True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_fits(deployment: Deployment, fp4: str, fits: bool) -> None:
    found = plan(deployment, fp4=fp4)
    assert found.verdict.fits == fits and bool(found.steps) == fits
    assert fits or found.verdict.changes


@pytest.mark.aot
def test_pro_needs_one_rank_on_one_node() -> None:
    """A rank per GPU holds the weights that are not experts eight times."""
    alone = plan(V4_PRO_8XH200, tensor_parallel=1, decode_requests=1, prefill_tokens=0)
    assert alone.memory.account.weights > 1.19 * plan(V4_PRO_8XH200).memory.account.weights


@pytest.mark.aot
def test_memory_adds_up() -> None:
    found = plan(V4_FLASH_4XH200)
    account, (pages, windows) = found.memory.account, cache_pages(found)
    assert not found.memory.compiled and "working memory 4.8 (assumed)" in found.verdict.why
    assert pages == account.pages and windows > LEAST
    cache = pages * PAGE + (windows - LEAST) * WINDOW
    used = account.weights + account.state + account.working + cache
    assert account.pool - 2 * account.page - WINDOW < used <= account.pool
    assert account.state >= 64 * (STATE + 3 * WINDOW)


@pytest.mark.aot
def test_bytes_on_the_wire() -> None:
    """Each GPU sends a row to every other one that has an expert of it, FP8 there and bfloat16 back, or more."""
    decode = plan(V4_FLASH_4XH200).step("decode")
    assert decode is not None and decode.sums == decode.traffic.node_bytes == 0
    least = 43 * 64 * 3 * (1 - (3 / 4) ** 6) * (4096 + 128 + 2 * 4096)
    assert least < decode.traffic.device_bytes < 1.5 * least
    shared = plan(V4_FLASH_4XH200_TP4).step("decode")
    assert shared is not None and shared.sums == 43 * 5 * 3 / 4 * 16 * 2 * 4096


@pytest.mark.aot
def test_a_step_is_the_sum_of_its_parts() -> None:
    found = plan(V4_FLASH_4XH200)
    for step in found.steps:
        assert step.seconds == pytest.approx(sum(step.parts.values()))
        assert step.parts["attention"] == 43 * step.stages["attention"]
        assert step.parts[step.bound] == max(step.parts.values())
        assert step.floor is None or step.floor.step < step.seconds


@pytest.mark.aot
def test_the_floor_sends_rows_over_the_links_that_there_are() -> None:
    """NVLink in one node, the network between several, nothing where each GPU has all experts."""
    rows = 43 * 64 * 6 * (4096 + 128 + 2 * 4096)
    for changes, rate in (({}, 360e9), ({"nodes": 2}, 50e9), ({"expert_parallel": False, "gpus_per_node": 1}, None)):
        decode_only: dict[str, Any] = {"prefill_tokens": 0, "decode_requests": 64} | changes
        planned = lay_out(WITHOUT_MODULE, dataclasses.replace(V4_FLASH_4XH200, **decode_only))
        floor = step_roofline(planned, "decode", 1)
        assert floor is not None and floor.wire == pytest.approx(rows / rate if rate else 0)


@pytest.mark.aot
def test_prompts_and_answers_together() -> None:
    """A token of each of 64 requests takes a step, and the 512 prompt tokens that belong to them a share of another."""
    found = plan(V4_FLASH_4XH200)
    prefill, decode, mixed = found.step("prefill"), found.step("decode"), found.mixed
    assert prefill is not None and decode is not None and mixed is not None
    assert (mixed.prompt, mixed.answer) == (8192, 1024)
    assert mixed.per_answer == pytest.approx(decode.seconds + 512 * prefill.seconds / 4096)
    assert mixed.tokens_per_device == pytest.approx(64 * 9 / mixed.per_answer)
    cached = dataclasses.replace(found.deployment, prefix_hit_rate=0.5)
    per_answer = decode.seconds + 256 * prefill.seconds / 4096
    assert mixed_rate(cached, prefill, decode).per_answer == pytest.approx(per_answer)


@pytest.mark.aot
def test_drafts_add_a_module_and_tokens() -> None:
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    plain = plan(V4_FLASH_4XH200).step("decode")
    drafting = plan(V4_FLASH_4XH200, speculative_config=drafts, acceptance=0.7).step("decode")
    assert plain is not None and drafting is not None
    assert (plain.drafts, plain.tokens_per_row) == (0, 1)
    assert (drafting.tokens, drafting.width, drafting.tokens_per_row) == (256, 4, pytest.approx(2.533))
    assert 0 < drafting.drafts < drafting.seconds / 5 and drafting.tokens_per_device > plain.tokens_per_device
    with pytest.raises(DeploymentError, match="needs a model with a multi-token prediction module"):
        uncompiled_plan(
            WITHOUT_MODULE,
            "deepseek_v4",
            dataclasses.replace(V4_FLASH_4XH200, speculative_config=drafts, acceptance=0.7),
        )


@pytest.mark.aot
def test_dspark_adds_stages_and_a_block_per_request() -> None:
    """Three layers with experts of their own: more weights, and less time than as many layers of the model take."""
    drafts = {"method": "dspark", "num_speculative_tokens": 5}

    def planned(**changes) -> UncompiledPlan:
        return uncompiled_plan(DEEPSEEK_V4_FLASH_0731, "0731", dataclasses.replace(V4_FLASH_4XH200, **changes))

    plain, found = planned(), planned(speculative_config=drafts, acceptance=0.8)
    added = found.memory.account.weights - plain.memory.account.weights
    experts = 3 * 256 * 25_165_824  # spread over 4 devices; the rest of 10.9 GB in files is not
    assert added == pytest.approx(experts * 4.25 / 8 / 4 + 10.9e9 - experts * 4.25 / 8, rel=0.02)
    assert found.memory.account.page == plain.memory.account.page, "stages see a window alone"
    prefill, decode = found.step("prefill"), found.step("decode")
    assert prefill is not None and decode is not None
    assert (decode.tokens, decode.width) == (384, 6)
    assert decode.tokens_per_row == pytest.approx(sum(0.8**n for n in range(6)))
    layers = sum(seconds for name, seconds in decode.parts.items() if name not in ("head", "drafts", "host"))
    assert 0 < decode.drafts < 3 * layers / 43 + 2 * decode.parts["head"]
    assert 0 < prefill.drafts < prefill.seconds / 4
    with pytest.raises(DeploymentError, match="has none"):
        plan(V4_FLASH_4XH200, speculative_config=drafts, acceptance=0.8)
    with pytest.raises(DeploymentError, match="7 is more than the 5 tokens"):
        planned(speculative_config=drafts | {"num_speculative_tokens": 7}, acceptance=0.8)


@pytest.mark.aot
def test_a_decode_unit_receives_pages_and_a_window() -> None:
    found = plan(V4_FLASH_DECODE_EP32)
    assert found.mixed is None and found.handover is not None
    assert found.handover.nbytes == 8192 / 256 * PAGE + WINDOW


@pytest.mark.aot
def test_report_and_json() -> None:
    for deployment in (V4_FLASH_4XH200, V4_FLASH_DECODE_EP32, dataclasses.replace(V4_FLASH_2XH200, fp4="fp8")):
        found = plan(deployment)
        console = Console(width=140, record=True, file=io.StringIO())
        console.print(render(found))
        text = console.export_text()
        assert "a page: 3,850 B per token" in text and "14,581,760" in text
        assert ("known error" in text) == found.verdict.fits
        written = json.loads(json.dumps(as_json(found)))
        assert written["verdict"]["fits"] == found.verdict.fits and len(written["steps"]) == len(found.steps)
        assert sum(row["B in all layers"] for row in written["cache"]) == PAGE + WINDOW + STATE
