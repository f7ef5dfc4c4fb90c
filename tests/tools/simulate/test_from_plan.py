"""Step times from a plan: equal to the plan's for its batch, and monotonic in buckets and keys."""

import dataclasses
import functools
import types
from typing import Any

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deepseek_v4 import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_FLASH_0731
from configs.deployments import DECODE_EP144, PREFILL_EP32, V4_FLASH_4XH200
from dsv3.engine.device.programs import Key
from dsv3.model.vocabulary import WHOLE
from tests.tools.plan.test_timeline import BYTES, EXPERTS, RATES, TRIPS, program_text
from tools.plan.deployment import Deployment, DeploymentError, Phase
from tools.plan.plan import StepPlan, program_seconds, step_plan
from tools.plan.programs import CompiledProgram, PlannedModel, Run, engine_config
from tools.plan.roofline import TRANSFER_S
from tools.plan.uncompiled import uncompiled_plan
from tools.plan.uncompiled_report import cache_pages
from tools.simulate.from_plan import compute_times, table, times_digest
from tools.simulate.options import SimulateOptions
from tools.simulate.simulation import simulate
from tools.simulate.times import KEYS, InstanceTimes

SLOW = 4


def laid_out(deployment: Deployment) -> PlannedModel:
    functions: Any = types.SimpleNamespace(overlaps=lambda program: not program.of_module, vocabulary=WHOLE)
    return PlannedModel(DEEPSEEK_V3, deployment, engine_config(DEEPSEEK_V3, deployment), None, functions, None)  # type: ignore[arg-type]


def compiled(phase: Phase, tokens: int) -> CompiledProgram:
    """Ten layers of experts, with transfers that are exposed for half of the experts' time."""
    run = Run("model", Key(phase, tokens), tokens)
    return CompiledProgram(phase, run, 1.0, 0, 0, 0, (4, 8), program_text(after=EXPERTS))


def plan(phase: Phase, deployment: Deployment, tokens: int) -> StepPlan:
    return step_plan(laid_out(deployment), [compiled(phase, tokens)])


def test_the_plans_batch_takes_the_plans_time() -> None:
    seconds = program_seconds(laid_out(DECODE_EP144), compiled("decode", 128))
    at_plan = plan("decode", dataclasses.replace(DECODE_EP144, context_length=4096), 128)
    [times] = table(seconds, [128]).values()
    assert times[4] == pytest.approx(at_plan.seconds)
    whole = PREFILL_EP32.prefill_tokens
    seconds = program_seconds(laid_out(PREFILL_EP32), compiled("prefill", whole))
    at_plan = plan("prefill", dataclasses.replace(PREFILL_EP32, context_length=4096), whole)
    assert table(seconds, [whole])[whole][3] == pytest.approx(at_plan.seconds)  # 2,048 keys at the mean


def test_smaller_buckets_send_less_and_more_keys_are_not_faster() -> None:
    small, whole = table(program_seconds(laid_out(DECODE_EP144), compiled("decode", 128)), [16, 128]).values()
    assert all(a <= b for a, b in zip(small, whole, strict=True))
    assert list(whole) == sorted(whole)
    sent = TRIPS * BYTES / 2 / RATES.dispatch_link
    assert whole[0] - small[0] >= sent * (1 - 16 / 128) * 0.99
    assert small[0] > TRIPS * TRANSFER_S


def test_a_small_prefill_takes_the_time_to_read_its_weights() -> None:
    """64 tokens take more than a 256th of the time of 16,384: each layer's experts are read."""
    seconds = program_seconds(laid_out(PREFILL_EP32), compiled("prefill", 16_384))
    few, many = table(seconds, [64, 16_384]).values()
    assert few[0] > SLOW * many[0] * 64 / 16_384


def test_drafts_are_refused_before_compiling() -> None:
    drafting = dataclasses.replace(DECODE_EP144, speculative_config={"method": "mtp"}, acceptance=0.8)
    with pytest.raises(DeploymentError, match="drafts are simulated for DeepSeek-V4"):
        compute_times(DEEPSEEK_V3, drafting, lambda what: None)


@functools.cache
def flash_times() -> InstanceTimes:
    return compute_times(DEEPSEEK_V4_FLASH, V4_FLASH_4XH200, lambda what: pytest.fail(what))


@pytest.mark.aot
def test_deepseek_v4_has_the_times_of_its_plan_from_shapes() -> None:
    """A fleet then serves with the plan's window pages: prompts that share a prefix find it."""
    deployment = V4_FLASH_4XH200
    found = flash_times()
    planned = uncompiled_plan(DEEPSEEK_V4_FLASH, "", dataclasses.replace(deployment, context_length=8192))
    prefill, decode = planned.step("prefill"), planned.step("decode")
    assert prefill is not None and decode is not None
    assert found.decode[64][KEYS.index(8192)] == pytest.approx(decode.seconds)
    assert found.prefill[4096][KEYS.index(4096)] == pytest.approx(prefill.seconds)
    for row in (*found.prefill.values(), *found.decode.values()):
        assert list(row) == sorted(row)
    assert (found.num_pages, found.num_window_pages) == cache_pages(uncompiled_plan(DEEPSEEK_V4_FLASH, "", deployment))
    traffic: dict[str, Any] = {"request_rate": 10.0, "seconds": 20.0, "prompt": 4000, "answer": 20, "num_prefixes": 4}
    options = SimulateOptions(instances="v4", shared=0.9, kv_offloading_size=1.0, **traffic)
    figures, *_ = simulate(options, {"v4": found})
    assert figures["hit_rate"] > 0.5 and figures["tiers"]["host"]["stored_bytes"]


@pytest.mark.aot
def test_a_step_with_drafts_takes_its_time_per_token() -> None:
    drafting = {"speculative_config": {"method": "dspark"}, "acceptance": 0.9}
    deployment = dataclasses.replace(V4_FLASH_4XH200, context_length=8192, **drafting)
    model = DEEPSEEK_V4_FLASH_0731
    found, step = (
        compute_times(model, deployment, lambda what: None),
        uncompiled_plan(model, "", deployment).step("decode"),
    )
    assert step is not None and step.tokens_per_row > 4
    assert found.decode[64][KEYS.index(8192)] == pytest.approx(step.seconds / step.tokens_per_row)
    assert found.decode[1][0] < flash_times().decode[1][0], "drafts pay for one request"


def test_another_deployment_has_another_digest() -> None:
    found = {times_digest(DEEPSEEK_V3, each) for each in (DECODE_EP144, PREFILL_EP32)}
    assert len(found) == 2
    assert times_digest(dataclasses.replace(DEEPSEEK_V3, vocab_size=7), DECODE_EP144) not in found
