"""Plans of the deployments that DeepSeek published, beside what it published. Estimates; nothing is timed.

    JAX_PLATFORMS=cpu python -m benchmarks.plan_published

It needs the extra `aot` and some ten minutes of one core: DeepSeek-V3's programs are compiled for each deployment.
`python -m launch.plan` prints the same plans one by one, with their memory, transfers and stages.
"""

import dataclasses
from collections.abc import Iterator

from benchmarks.record import Cell, Report, arguments, run
from configs.deepseek_v3 import DEEPSEEK_V3
from configs.deployments import DECODE_EP144, H800, PREFILL_EP32
from dsv3.config.model import ModelConfig
from tools.plan import published_day, roofline, training
from tools.plan.deployment import PlannedBatch, Rates, kernel_rates
from tools.plan.plan import Plan, make_plan, partial_page_cost
from tools.plan.roofline import HOOK_S, HOST_S, TRANSFER_S

ACCEPTANCES = (0.6, 0.65, 0.7, 0.85)
"""Chances that a draft of the MTP module is accepted; DeepSeek published 0.85 to 0.9 of its own."""
COLUMNS = {
    "rates": ["what", "published", "estimate", "estimate to published", "command"],
    "errors": ["what", "published", "estimate", "error (%)"],
    "drafts": ["acceptance", "tokens per step and request", "tokens/s per node", "to no drafts"],
}
_PROFILE_PREFILL, _PROFILE_DECODE = published_day.PUBLISHED_RATES["profile"]
_FLEET_PREFILL, _FLEET_DECODE = published_day.PUBLISHED_RATES["fleet"]


def main(report: Report) -> None:
    arguments(__doc__)
    report.table("The estimate's errors against DeepSeek's profiles (H800)", COLUMNS["errors"], errors())
    decode, prefill = plan(), make_plan(DEEPSEEK_V3, "deepseek_v3", PREFILL_EP32)
    report.table(
        "DeepSeek's deployments, tokens per second and node of 8 H800", COLUMNS["rates"], rates(decode, prefill)
    )
    report.table("Decode unit with drafts of the MTP module", COLUMNS["drafts"], drafts(decode))


def plan(acceptance: float | None = None) -> Plan:
    """Returns the plan of the decode unit, with one draft of the MTP module if an acceptance is given."""
    unit = DECODE_EP144
    if acceptance is not None:
        unit = dataclasses.replace(unit, speculative_config={"method": "mtp"}, acceptance=acceptance)
    return make_plan(DEEPSEEK_V3, "deepseek_v3", unit)


def errors() -> Iterator[list[Cell]]:
    """Yields the estimate's parts beside DeepSeek's profiles; the decode fleet is what one constant is fitted to."""
    _, layer, _ = decode_step(128, 4096)
    yield _against("decode, 61 layers of 128 tokens per micro-batch (ms)", 87.3, 61e3 * layer)
    for name, tokens, rate in (("profile", 64, _PROFILE_DECODE), ("fleet, fitted", 44, _FLEET_DECODE)):
        step = decode_step(tokens, published_day.CONTEXT if rate is _FLEET_DECODE else 4096)[2]
        yield _against(f"decode, {name} (tokens/s per node)", rate.tokens_per_node, 2 * tokens * 8 / step)
    yield _against("prefill, profile (tokens/s per node)", _PROFILE_PREFILL.tokens_per_node, 8 / prefill_token())
    for name, (estimate, published) in training.against_profile(DEEPSEEK_V3, H800).items():
        yield _against(f"training, {name} of a layer (ms)", 1e3 * published, 1e3 * estimate)


def _against(what: str, published: float, estimate: float) -> list[Cell]:
    return [what, published, estimate, 100 * (estimate / published - 1)]


def rates(decode: Plan, prefill: Plan) -> Iterator[list[Cell]]:
    """Yields the plans' rates beside the published ones."""
    whole = dataclasses.replace(decode, partial_pages=partial_page_cost(DEEPSEEK_V3, DECODE_EP144, lambda what: None))
    prompts = 8 * prefill.steps[0].tokens_per_device
    token = DEEPSEEK_V3.num_hidden_layers * DEEPSEEK_V3.latent_dim * 2
    day = published_day.plan_day(_FLEET_PREFILL, _FLEET_DECODE, token, published_day.GPU_HOUR)
    nodes = published_day.PUBLISHED["nodes"], day["figures"]["nodes"]
    fleet, profile = _FLEET_DECODE.tokens_per_node, _PROFILE_DECODE.tokens_per_node
    found: list[tuple[str, float, float | None, str]] = [
        ("answers, the fleet's decode units (EP144)", fleet, decode.tokens_per_node, "decode_ep144"),
        ("the same, with partial last pages of prompts", fleet, whole.tokens_per_node,
         "decode_ep144 --prefill=prefill_ep32"),
        ("answers, profile (EP128)", profile, decode.tokens_per_node, "decode_ep144"),
        ("prompts computed, profile (EP32)", _PROFILE_PREFILL.tokens_per_node, prompts, "prefill_ep32"),
        ("prompts computed, the fleet", _FLEET_PREFILL.tokens_per_node, prompts, "prefill_ep32"),
        ("nodes for the published day", *nodes, "fleet --traffic=day6"),
    ]  # fmt: skip
    for what, published, estimate, given in found:
        yield [what, published, estimate, estimate and estimate / published, f"`python -m launch.plan {given}`"]


def drafts(without: Plan) -> Iterator[list[Cell]]:
    """Yields the decode unit's rate by how often drafts are accepted."""
    base = without.tokens_per_node
    assert base is not None
    for acceptance in ACCEPTANCES:
        found = plan(acceptance)
        rate = found.tokens_per_node
        yield [acceptance, found.steps[0].tokens_per_row, rate, rate and rate / base]


def five_stage_layer(stages: dict[str, float], dispatch: float, combine: float) -> float:
    """Returns the seconds of a decode layer of two micro-batches in the published pipeline of five stages."""
    attention = stages["attention"] + stages["router"]
    half = max(stages["shared_expert"] + stages["project"], dispatch) + stages["experts"] + max(attention, combine)
    return 2 * (half + 2 * HOOK_S)


def low_latency_transfers(model: ModelConfig, rates: Rates, tokens: int) -> tuple[float, float]:
    """Returns the seconds of DeepEP's dispatch and combine of `tokens`, which send a row for each chosen expert."""
    dispatch, combine = (tokens * model.num_experts_per_tok * row for row in roofline.wire_rows(model))
    return TRANSFER_S + dispatch / rates.dispatch_link, TRANSFER_S + combine / rates.combine_link


def decode_step(tokens: int, context: int) -> tuple[dict[str, float], float, float]:
    """Returns stages, layer and step, in seconds, of two micro-batches of `tokens` with DeepEP's transfers on H800."""
    rates = kernel_rates(H800, DEEPSEEK_V3)
    stages = roofline.decode_stages(DEEPSEEK_V3, rates, PlannedBatch(tokens, context, experts=2))
    layer = five_stage_layer(stages, *low_latency_transfers(DEEPSEEK_V3, rates, tokens))
    dense = 2 * 3 * (stages["project"] + stages["attention"] + stages["mlp"])
    return stages, layer, 58 * layer + dense + stages["head"] + HOST_S


def prefill_token() -> float:
    """Returns the seconds per token of a step of prompts of 4,096 tokens without hits, transfers hidden, on H800."""
    batch = PlannedBatch(tokens=1, keys=2048, experts=9)
    stages = roofline.prefill_stages(DEEPSEEK_V3, kernel_rates(H800, DEEPSEEK_V3), batch)
    moe = 58 * (stages["shared_expert"] + stages["experts"])
    return 61 * (stages["project"] + stages["attention"]) + moe + 3 * stages["mlp"]


if __name__ == "__main__":
    run(main)
