"""Step times from a plan: equal to the plan's for its batch, and monotonic in buckets and keys."""

import dataclasses
import types
from typing import Any

import pytest

from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deepseek_v4_flash import DEEPSEEK_V4_FLASH
from configs.deployments import DECODE_EP144, PREFILL_EP32, V4_FLASH_4XH200
from dsv3.engine.device.programs import Key
from dsv3.model.vocabulary import WHOLE
from tests.tools.plan.test_timeline import BYTES, EXPERTS, RATES, TRIPS, program_text
from tools.plan.deployment import Deployment, DeploymentError
from tools.plan.plan import StepPlan, step_plan
from tools.plan.programs import CompiledProgram, Phase, PlannedModel, Run, engine_config
from tools.plan.roofline import TRANSFER_S
from tools.plan.simulated import SimulatedProgram
from tools.simulate.from_plan import compute_times, times_digest
from tools.simulate.times import KEYS

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
    program = SimulatedProgram(laid_out(DECODE_EP144), compiled("decode", 128))
    at_plan = plan("decode", dataclasses.replace(DECODE_EP144, context_length=4096), 128)
    [times] = program.table([128], KEYS).values()
    assert times[4] == pytest.approx(at_plan.seconds)
    whole = PREFILL_EP32.prefill_tokens
    program = SimulatedProgram(laid_out(PREFILL_EP32), compiled("prefill", whole))
    at_plan = plan("prefill", dataclasses.replace(PREFILL_EP32, context_length=4096), whole)
    assert program.table([whole], KEYS)[whole][3] == pytest.approx(at_plan.seconds)  # 2,048 keys at the mean


def test_smaller_buckets_send_less_and_more_keys_are_not_faster() -> None:
    small, whole = SimulatedProgram(laid_out(DECODE_EP144), compiled("decode", 128)).table([16, 128], KEYS).values()
    assert all(a <= b for a, b in zip(small, whole, strict=True))
    assert list(whole) == sorted(whole)
    sent = TRIPS * BYTES / 2 / RATES.dispatch_link
    assert whole[0] - small[0] >= sent * (1 - 16 / 128) * 0.99
    assert small[0] > TRIPS * TRANSFER_S


def test_a_small_prefill_takes_the_time_to_read_its_weights() -> None:
    """64 tokens take more than a 256th of the time of 16,384: each layer's experts are read."""
    few, many = SimulatedProgram(laid_out(PREFILL_EP32), compiled("prefill", 16_384)).table([64, 16_384], KEYS).values()
    assert few[0] > SLOW * many[0] * 64 / 16_384


def test_drafts_are_refused_before_compiling() -> None:
    drafting = dataclasses.replace(DECODE_EP144, speculative_config={"method": "mtp"}, acceptance=0.8)
    with pytest.raises(DeploymentError, match="drafts cannot be simulated"):
        compute_times(DEEPSEEK_V3, drafting, lambda what: None)


def test_deepseek_v4_is_refused_before_compiling() -> None:
    with pytest.raises(DeploymentError, match="DeepSeek-V4 cannot be simulated"):
        compute_times(DEEPSEEK_V4_FLASH, V4_FLASH_4XH200, lambda what: None)


def test_another_deployment_has_another_digest() -> None:
    found = {times_digest(DEEPSEEK_V3, each) for each in (DECODE_EP144, PREFILL_EP32)}
    assert len(found) == 2
    assert times_digest(dataclasses.replace(DEEPSEEK_V3, vocab_size=7), DECODE_EP144) not in found
