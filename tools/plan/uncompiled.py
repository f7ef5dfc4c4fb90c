"""A plan from shapes and formulas alone: memory, bytes on the wire and estimated speed of DeepSeek-V4.

Its stages run one after the other. In two micro-batches each transfer of experts' rows hides behind a stage of the
other one, as in the engine's overlapped schedule; other transfers hide behind nothing. Working memory, which compilers
say, is assumed.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from dsv3.config.device_rates import LAUNCH_S
from dsv3.config.engine import ForwardProgram
from dsv3.config.model import ModelConfig
from dsv3.kv_cache.layout import page_bytes
from sharding.experts.traffic import Traffic
from tools.plan import nccl_ep, roofline
from tools.plan.attention import SparseCore
from tools.plan.deployment import Deployment, Phase, Rates, kernel_rates
from tools.plan.memory import Memory, Verdict, judge, memory_of
from tools.plan.plan import (
    Handover,
    bounded_stages,
    handover,
    lengths,
    phases,
    planned_batch,
    stage_seconds,
    step_roofline,
    with_keys,
)
from tools.plan.programs import PlannedModel, Run, lay_out, runs
from tools.plan.roofline import HOOK_S, HOST_S, TRANSFER_S, wire_rows

WORKING = 4_750_747_968
"""Bytes of working memory: those of DeepSeek's prefill unit, the most that a plan of DeepSeek-V3 has compiled."""
_OF_STEP = ("head", "eh_proj")  # stages that are no part of every layer
_SUMS = 2  # over the devices of a rank in a layer: of what attention gives, and of the shared expert
_JOINS = 1  # of the rows whose routed experts each of them has sent
_LSE_WORDS, _BEST_BYTES = 2, 8  # 16-bit words of a log-sum-exp; a score and its position
_WRITE_LAUNCHES = 3  # of a projection into a stage's cache: product, norm and rotation, write
_CHOICE_LAUNCHES = 4  # of a draft of a block: embedding, product, the best of a device, the best of all


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """One kind of step. `stages` are seconds of a layer, `head` included for the step; `sparse` are parts of attention.

    A device sends `traffic` to experts and back, and `sums` bytes to others of its rank; parts of attention are among
    them where these divide pages. `transfers` are the seconds of a step in which nothing else runs. `drafts` are the
    seconds of what makes drafts, `accepted` the shares of rows in which all drafts up to each position are accepted.
    """

    phase: Phase
    tokens: int
    width: int
    layers: int
    stages: Mapping[str, float]
    sparse: SparseCore | None
    traffic: Traffic
    sums: int
    transfers: float
    drafts: float
    accepted: tuple[float, ...]
    floor: roofline.DecodeRoofline | None
    devices_per_rank: int

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by what takes them."""
        layers = {name: each * (1 if name in _OF_STEP else self.layers) for name, each in self.stages.items() if each}
        return layers | {"transfers": self.transfers, "drafts": self.drafts, "host": HOST_S}

    @property
    def seconds(self) -> float:
        """Estimated time of the whole step."""
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """What takes most of a step."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def tokens_per_row(self) -> float:
        """Tokens per request and decode step: one, and the accepted drafts."""
        return 1 + sum(self.accepted)

    @property
    def tokens_per_device(self) -> float:
        """Tokens per second and device: of prompts in prefill, of answers in decode."""
        return self.tokens / self.width * self.tokens_per_row / self.devices_per_rank / self.seconds


@dataclasses.dataclass(frozen=True)
class MixedRate:
    """An instance that computes prompts and answers, always with as many requests as its decode steps have.

    `per_answer` is the time from one token of a request to the next, prefill steps of others between them included.
    `tokens_per_device` counts tokens of prompts and answers.
    """

    prompt: float
    answer: float
    per_answer: float
    tokens_per_device: float


@dataclasses.dataclass(frozen=True)
class UncompiledPlan:
    """The plan of a deployment from shapes; `steps` is empty if weights and cache do not fit."""

    model_name: str
    model: ModelConfig
    deployment: Deployment
    memory: Memory
    steps: tuple[StepEstimate, ...]
    verdict: Verdict

    def step(self, phase: Phase) -> StepEstimate | None:
        """Returns the step of a phase, None if the deployment runs none."""
        return next((step for step in self.steps if step.phase == phase), None)

    @property
    def mixed(self) -> MixedRate | None:
        """The rate of prompts and answers together; None unless the deployment computes both."""
        prefill, decode = self.step("prefill"), self.step("decode")
        return None if prefill is None or decode is None else mixed_rate(self.deployment, prefill, decode)

    @property
    def handover(self) -> Handover | None:
        """The transfer of a prompt's pages, and of the window page behind which it goes on, to a decode instance."""
        decode, deployment = self.step("decode"), self.deployment
        if decode is None or deployment.prefill_tokens:
            return None
        context, window = (page_bytes(self.model, deployment.kv_cache_dtype, name) for name in ("context", "window"))
        per_node = decode.tokens_per_device * deployment.gpus_per_node
        return handover(deployment, context / self.model.page_size, per_node, window)


def mixed_rate(deployment: Deployment, prefill: StepEstimate, decode: StepEstimate) -> MixedRate:
    """Returns the rate of prompts and answers together, where prefill steps stop decode steps.

    There is always a next request, and steps are full: no ramp, no tail, no queue.
    """
    prompt, answer = lengths(deployment)
    rows = decode.tokens / decode.width  # of a rank
    per_prompt = (1 - deployment.prefix_hit_rate) * prompt * prefill.seconds / prefill.tokens
    per_answer = decode.seconds / decode.tokens_per_row + rows * per_prompt / answer
    rate = rows * (prompt + answer) / (answer * per_answer) / decode.devices_per_rank
    return MixedRate(prompt, answer, per_answer, rate)


def uncompiled_plan(model: ModelConfig, model_name: str, deployment: Deployment) -> UncompiledPlan:
    """Returns the plan of `deployment`; raises as `tools.plan.programs.lay_out` does."""
    planned = lay_out(model, deployment)
    memory = dataclasses.replace(memory_of(planned, WORKING), compiled=False)
    verdict = judge(memory, deployment, model.n_routed_experts)
    steps = tuple(step_estimate(planned, phase) for phase in phases(deployment)) if verdict.fits else ()
    return UncompiledPlan(model_name, planned.model, deployment, memory, steps, verdict)


def step_estimate(planned: PlannedModel, phase: Phase) -> StepEstimate:
    """Returns the estimate of a kind of step, with its largest bucket."""
    rates = kernel_rates(planned.deployment.device, planned.model)
    run, *drafts = runs(planned, phase)
    seconds = sum(_draft_seconds(planned, phase, each, rates) for each in drafts)
    if planned.model.dspark is not None:
        seconds += _block_seconds(planned, run.tokens, drafts, rates)
    return _estimate(planned, phase, run, _traffic(planned, run), seconds)


def bucket_seconds(planned: PlannedModel, phase: Phase, size: int, keys: int) -> float:
    """Returns the seconds of a step of a bucket of `size` tokens or rows per rank, which see `keys` keys each.

    Where rows have drafts, it is the time of a step per token that it gives a row in the mean.
    """
    given = {"prefill_tokens" if phase == "prefill" else "decode_requests": size}
    step = step_estimate(with_keys(planned, phase, keys, **given), phase)
    return step.seconds / step.tokens_per_row


def _estimate(planned: PlannedModel, phase: Phase, run: Run, traffic: Traffic, drafts: float) -> StepEstimate:
    """Returns the estimate of a step whose program of the model is `run`, and whose drafts take `drafts` seconds."""
    deployment, rates = planned.deployment, kernel_rates(planned.deployment.device, planned.model)
    batch, L = planned_batch(planned, phase, run, 1), planned.model.num_hidden_layers
    micro_batches = 2 if _is_overlapped(planned, run) else 1
    found = bounded_stages(planned, phase, run, rates, micro_batches)
    stages = {name: each * (1 if name in _OF_STEP else micro_batches) for name, each in found.items()}
    exchanges = _exchange_seconds(planned, rates, run.tokens, traffic, L, micro_batches)
    if micro_batches > 1:
        exchanges = L * _not_hidden(planned.model, phase, exchanges / L, stages)
    sums, of_rank = _sums(planned, rates, run.tokens, L)
    parts, of_parts = _parts(planned, rates, run.tokens)
    return StepEstimate(
        phase=phase,
        tokens=run.tokens,
        width=run.width,
        layers=L,
        stages=stages,
        sparse=roofline.sparse_parts(planned.model, rates, batch),
        traffic=traffic,
        sums=sums + parts,
        transfers=exchanges + of_rank + of_parts,
        drafts=drafts,
        accepted=deployment.accepted if phase == "decode" else (),
        floor=step_roofline(planned, phase, run.width),
        devices_per_rank=deployment.tensor_parallel,
    )


def _is_overlapped(planned: PlannedModel, run: Run) -> bool:
    """Returns whether the program runs two micro-batches, each of which computes while the other communicates."""
    overlaps = planned.functions.overlaps
    return overlaps is not None and planned.deployment.devices > 1 and overlaps(_program(planned, run)) > 0


def _not_hidden(model: ModelConfig, phase: Phase, exchange: float, stages: Mapping[str, float]) -> float:
    """Returns the seconds of a layer in which it only waits for experts' rows, of `exchange` for all of them.

    Each transfer hides behind the stages that the overlapped schedule runs beside it (`dsv3.model.schedules`), of which
    both micro-batches have half.
    """
    dispatch, combine = wire_rows(model)
    attention, experts = stages["project"] + stages["attention"], stages["experts"]
    if phase == "decode":
        beside = stages["shared_expert"] + stages["project"], stages["attention"] + stages["router"]
    else:
        beside = min(attention, experts), stages["shared_expert"] + min(attention, experts)
    seconds = (exchange * row / (dispatch + combine) for row in (dispatch, combine))
    return sum(max(0.0, each - hidden) for each, hidden in zip(seconds, beside, strict=True))


def _draft_seconds(planned: PlannedModel, phase: Phase, run: Run, rates: Rates) -> float:
    """Returns the seconds of the layers of a program that makes drafts: each sees its window alone."""
    compressed = planned.model.compressed
    assert compressed is not None
    window_alone = dataclasses.replace(compressed, ratios=(0,))
    model = dataclasses.replace(planned.model, num_hidden_layers=1, compressed=window_alone)
    stages = stage_seconds(dataclasses.replace(planned, model=model), phase, run, rates, 1)
    layers = planned.model.num_draft_layers
    transfers = _exchange_seconds(planned, rates, run.tokens, _traffic(planned, run), layers)
    transfers += _sums(planned, rates, run.tokens, layers)[1]
    seconds = sum(each * (1 if name in _OF_STEP else layers) for name, each in stages.items())
    return run.times * (seconds + transfers)


def _block_seconds(planned: PlannedModel, written: int, drafts: Sequence[Run], rates: Rates) -> float:
    """Returns the seconds of DSpark beside its layers, for a step that computes `written` tokens.

    The stages' cache gets what they see of these tokens, and each draft gets a correction of all scores from the one
    before it.
    """
    model, dspark, chosen = planned.model, planned.model.dspark, planned.engine.tokens_per_row - 1
    assert dspark is not None
    D, n = model.hidden_size, planned.functions.vocabulary.devices
    elements = len(dspark.target_layers) * D * D + dspark.stages * D * model.latent_dim
    projected = max(elements / rates.dense_bandwidth, 2 * written * elements / rates.dense_flops)
    rows = planned.functions.vocabulary.ranks * sum(run.tokens // run.width for run in drafts)
    corrected = roofline.bf16_product(model, rates, rows, model.vocab_size * dspark.markov_rank // n)
    launches = (1 + dspark.stages) * _WRITE_LAUNCHES + chosen * _CHOICE_LAUNCHES
    return projected + chosen * corrected + launches * LAUNCH_S


def _traffic(planned: PlannedModel, run: Run) -> Traffic:
    """Returns what a device sends to experts and back in a program; nothing where each device has all of them."""
    if planned.functions.traffic is None or planned.deployment.devices == 1:
        return Traffic()
    if (library := nccl_ep.exchange(planned.model, planned.deployment, run.tokens)) is not None:
        layers = planned.model.num_moe_layers if run.part == "model" else 1
        sent = Traffic(library.node_bytes + library.cross_bytes, library.cross_bytes, 2 * planned.deployment.devices)
        return sent * layers
    return planned.functions.traffic(_program(planned, run))


def _program(planned: PlannedModel, run: Run) -> ForwardProgram:
    programs = planned.layout.cfg.forward_programs
    return next(each for each in programs if (each.kind, each.size) == (run.key.kind, run.key.size))


def _exchange_seconds(
    planned: PlannedModel, rates: Rates, tokens: int, traffic: Traffic, layers: int, micro_batches: int = 1
) -> float:
    """Returns the seconds of all transfers of experts' rows in `layers`."""
    library = nccl_ep.exchange(planned.model, planned.deployment, tokens // micro_batches)
    if library is not None:
        return micro_batches * layers * (sum(library.seconds.values()) + 2 * HOOK_S)
    if not traffic.messages:
        return 0.0
    seconds = (traffic.device_bytes - traffic.node_bytes) / rates.node_link + traffic.node_bytes / rates.combine_link
    return seconds + 2 * micro_batches * layers * (TRANSFER_S + HOOK_S)


def _sums(planned: PlannedModel, rates: Rates, tokens: int, layers: int) -> tuple[int, float]:
    """Returns the bytes that a device sends to others of its rank in `layers`, and the seconds of that."""
    n = planned.deployment.tensor_parallel
    if n == 1:
        return 0, 0.0
    rows = layers * tokens * 2 * planned.model.hidden_size
    sums = round((2 * _SUMS + _JOINS) * (n - 1) / n * rows)
    return sums, layers * (_SUMS + _JOINS) * TRANSFER_S + sums / rates.node_link


def _parts(planned: PlannedModel, rates: Rates, tokens: int) -> tuple[int, float]:
    """Returns bytes and seconds of what devices that divide pages send each other in the layers with entries.

    They are queries, what their heads see and its log-sum-exps, and the best entries with their scores.
    """
    model, n = planned.model, planned.model.context_shards
    if n == 1:
        return 0, 0.0
    assert model.compressed is not None
    sparse, layers = model.compressed.num_sparse, model.compressed.num_sparse + model.compressed.num_heavy
    heads = model.num_attention_heads // planned.deployment.tensor_parallel
    row = (
        layers * heads * 2 * (2 * model.latent_dim + _LSE_WORDS) + sparse * _BEST_BYTES * model.compressed.indexer.topk
    )
    size = (n - 1) * row * tokens
    return size, (2 * layers + 2 * sparse) * TRANSFER_S + size / rates.node_link
