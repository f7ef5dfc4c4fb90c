"""Plans of DeepSeek-V4: what fits, and speeds beside SGLang's and DeepGEMM's. Estimates; nothing is timed.

    JAX_PLATFORMS=cpu python -m benchmarks.plan_deepseek_v4

It needs the extra `aot`. SGLang's figures (pull request 33109, v0.5.16) are of DeepSeek-V4-Flash-0731 with DSpark on
4 H200, for random prompts of up to 8,192 tokens and answers of up to 1,024. The estimates are for prompts and answers
of these lengths. They have five drafts of DSpark, as often accepted as on SGLang's data, where DSpark gave 5.45 tokens
per step at 64 and 256 requests; three drafts of the first release's MTP module, each accepted with a chance of 0.7 if
those before it are; or none.

DeepGEMM's figures (its pull request 323) are of a layer's experts in FP8 with dispatch and combine on 8 H20: for
DeepEP's low-latency transfers around grouped products, and for one kernel that does everything.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from benchmarks.record import Cell, Report, arguments, run
from configs.deepseek_v4 import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_FLASH_0731, DEEPSEEK_V4_PRO
from configs.deployments import H100, V4_DEPLOYMENTS, V4_FLASH_4XH200, V4_FLASH_4XH200_TP4, device
from dsv3.config.model import ModelConfig
from tools.plan.deployment import Deployment, PlannedBatch, kernel_rates
from tools.plan.roofline import HOOK_S, TRANSFER_S, decode_stages, wire_rows
from tools.plan.uncompiled import StepEstimate, UncompiledPlan, uncompiled_plan
from tools.plan.uncompiled_report import cache_pages

MODELS = {"Flash": DEEPSEEK_V4_FLASH, "Pro": DEEPSEEK_V4_PRO}
SGLANG = {1: (1.72, 606), 16: (8.39, 2538), 64: (38.05, 2994), 256: (104.53, 4872), 1024: (123.81, 4573)}
"""Milliseconds from token to token, and tokens of prompts and answers per second and GPU, by requests at once. The last
has no drafts."""
DEEPGEMM = {1: (250.1, 188.0), 2: (299.9, 239.0), 4: (416.0, 361.1), 8: (494.8, 432.2)}
"""Microseconds by tokens per GPU: of low-latency transfers and grouped products, and of one kernel."""
H20 = device("H20", H100.memory_bytes, multiprocessors=78)
Drafter = Literal["DSpark", "MTP"]
DRAFTS: dict[Drafter, tuple[ModelConfig, dict[str, Any], float]] = {
    "DSpark": (DEEPSEEK_V4_FLASH_0731, {"method": "dspark", "num_speculative_tokens": 5}, 0.9614),
    "MTP": (DEEPSEEK_V4_FLASH, {"method": "mtp", "num_speculative_tokens": 3}, 0.7),
}
"""The model that drafts, how, and the chance of each draft if those before it are accepted; 0.9614 gives 5.45 tokens
per step."""
GB = 1e9


def main(report: Report) -> None:
    arguments(__doc__)
    plans = [each for deployment in V4_DEPLOYMENTS for each in _both(deployment)]
    columns = ["deployment", "experts", "weights (GB)", "requests per rank", "needed (GB)", "of (GB)", "fits",
               "tokens of cache that fit a rank", "window pages that fit"]  # fmt: skip
    report.table("Memory of one GPU, FP8 cache", columns, map(_memory, plans))
    columns = ["deployment", "experts", "prompts (tokens/s per GPU)", "decode step (ms)", "takes most",
               "answers (tokens/s per GPU)", "both, 8 to 1 (tokens/s per GPU)", "roofline (ms)"]  # fmt: skip
    report.table("Speed (estimate)", columns, (_speed(plan) for plan in plans if plan.steps))
    columns = ["requests", "SGLang: token to token (ms)", "ours, DSpark", "MTP", "without drafts",
               "SGLang: tokens/s per GPU", "ours, DSpark", "MTP", "without drafts", "DSpark to SGLang's",
               "ranks, experts"]  # fmt: skip
    report.table("DeepSeek-V4-Flash on 4 H200: SGLang's figures, and ours (estimate)", columns, map(_compared, SGLANG))
    columns = ["tokens per GPU", "transfers and products (us)", "one kernel (us)", "ours (us)", "of the first"]
    report.table("Experts of a layer of DeepSeek-V4-Flash on 8 H20, FP8: DeepGEMM's figures, and ours (estimate)",
                 columns, map(_experts_compared, DEEPGEMM))  # fmt: skip
    drafters: list[Drafter | None] = [None, "MTP", "DSpark"]
    steps = [(requests, drafts, _decode(requests, drafts)) for requests in (1, 16, 256) for drafts in drafters]
    columns = ["requests", "drafts", *(f"{name} (ms)" for name in steps[-1][2].parts)]
    report.table("What takes the time of these decode steps (estimate)", columns, (_parts(*step) for step in steps))


def _both(deployment: Deployment, model: ModelConfig | None = None) -> Iterator[UncompiledPlan]:
    """Returns the plans of a deployment with FP4 experts, and with FP8 ones."""
    model = model or MODELS["Pro" if "pro" in deployment.name else "Flash"]
    for fp4 in ("keep", "fp8"):
        yield uncompiled_plan(model, model.family or "", dataclasses.replace(deployment, fp4=fp4))


def _experts(plan: UncompiledPlan) -> str:
    return "FP4" if plan.deployment.fp4 == "keep" else "FP8"


def _memory(plan: UncompiledPlan) -> list[Cell]:
    memory, account = plan.memory, plan.memory.account
    fits = [memory.tokens_left, cache_pages(plan)[1]] if memory.fits else [None, None]
    sizes = [account.weights / GB, plan.deployment.decode_requests, memory.needed / GB, account.pool / GB]
    return [plan.deployment.name, _experts(plan), *sizes, "yes" if memory.fits else "no", *fits]


def _speed(plan: UncompiledPlan) -> list[Cell]:
    prefill, decode, mixed = plan.step("prefill"), plan.step("decode"), plan.mixed
    assert decode is not None
    return [
        plan.deployment.name,
        _experts(plan),
        prefill and prefill.tokens_per_device,
        decode.seconds * 1e3,
        decode.bound,
        decode.tokens_per_device,
        mixed and mixed.tokens_per_device,
        decode.floor and decode.floor.step * 1e3,
    ]


def fastest(requests: int, drafts: Drafter | None) -> UncompiledPlan:
    """Returns the fastest plan of so many requests at once: by one rank or four, FP4 experts or FP8 ones."""
    plans, (model, speculative, acceptance) = [], DRAFTS[drafts or "MTP"]
    for unit in (V4_FLASH_4XH200_TP4, V4_FLASH_4XH200):
        if requests % unit.ranks:
            continue
        changes: dict[str, Any] = {"speculative_config": speculative, "acceptance": acceptance} if drafts else {}
        unit = dataclasses.replace(unit, decode_requests=requests // unit.ranks, **changes)
        plans += [plan for plan in _both(unit, model) if plan.mixed]
    return max(plans, key=lambda plan: plan.mixed.tokens_per_device)


def _compared(requests: int) -> list[Cell]:
    milliseconds, rate = SGLANG[requests]
    plans = [fastest(requests, drafts) for drafts in ("DSpark", "MTP", None)]
    times = [plan.mixed.per_answer * 1e3 for plan in plans]
    rates = [plan.mixed.tokens_per_device for plan in plans]
    layout = f"{plans[0].deployment.ranks}, {_experts(plans[0])}"
    return [requests, milliseconds, *times, rate, *rates, rates[0] / rate, layout]


def experts_seconds(tokens: int) -> float:
    """Returns the estimate of a layer's experts with dispatch and combine, `tokens` on each of 8 H20."""
    model = dataclasses.replace(DEEPSEEK_V4_FLASH, fp4_experts=False)
    rates, rows = kernel_rates(H20, model), sum(wire_rows(model))
    products = decode_stages(model, rates, PlannedBatch(tokens, 0, model.n_routed_experts // 8))["experts"]
    return products + 2 * (TRANSFER_S + HOOK_S) + tokens * model.num_experts_per_tok * rows / rates.node_link


def _experts_compared(tokens: int) -> list[Cell]:
    apart, fused = DEEPGEMM[tokens]
    ours = experts_seconds(tokens) * 1e6
    return [tokens, apart, fused, ours, ours / apart]


def _decode(requests: int, drafts: Drafter | None) -> StepEstimate:
    step = fastest(requests, drafts).step("decode")
    assert step is not None
    return step


def _parts(requests: int, drafts: Drafter | None, step: StepEstimate) -> list[Cell]:
    return [requests, drafts or "none", *(seconds * 1e3 for seconds in step.parts.values())]


if __name__ == "__main__":
    run(main)
