"""A plan: memory, collectives, overlap and estimated speed of a model in a deployment, and the transfer of KV pages.

The transfer from prefill to decode instances is an estimate for a request of the mean context. The context grows from
the prompt to prompt and answer, so its mean is the prompt and half of the answer.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsv3.config.model import ModelConfig
from dsv3.engine.device.programs import measure
from dsv3.scheduler.balance import MOST_STEPS
from pallas_kernels.multiprocessors import Multiprocessors
from tools.plan import hlo, nccl_ep, roofline
from tools.plan.attention import SparseCore
from tools.plan.deployment import PHASES, Deployment, Phase, PlannedBatch, Rates, kernel_rates
from tools.plan.hlo import Collective, collectives
from tools.plan.launch_order import LaunchOrder, launch_order
from tools.plan.memory import Memory, Verdict, judge, memory_of
from tools.plan.programs import CompiledProgram, PlannedModel, Run, compile_step, lay_out
from tools.plan.timeline import ScheduleSimulator, Timeline

_UNBOUNDED = ("router", "head")  # in prefill: the overhead of its products includes routing, and few rows have a head


@dataclasses.dataclass(frozen=True)
class ProgramPlan(CompiledProgram):
    """A compiled program of a step, analyzed; `stages`, `sparse` and the times of `timeline` are estimates.

    `sparse` has the parts of a layer's attention with top-k selection. `multiprocessors` says how many the kernels use
    and how many they leave to transfers. `host_waits` are instructions at which devices wait for the host
    (`hlo.Module.host_waits`). `kernels` counts what the program launches, by stage. `order` says whether all devices
    launch their collectives in one order.
    """

    multiprocessors: Multiprocessors
    collectives: tuple[Collective, ...]
    host_waits: tuple[str, ...]
    kernels: Mapping[str, int]
    order: LaunchOrder
    stages: dict[str, float]
    sparse: SparseCore | None
    timeline: Timeline

    @property
    def tokens(self) -> int:
        """Tokens of one rank."""
        return self.run.tokens

    @property
    def seconds(self) -> float:
        """The program's time in a step, over all its runs."""
        return self.run.times * self.timeline.step


@dataclasses.dataclass(frozen=True)
class StepPlan(ProgramPlan):
    """A step: the model's program, and `drafts`, the MTP module's programs after it.

    `accepted` has for each position the share of rows in which all drafts up to it are accepted, as given. `floor` is
    the roofline of the model's program alone.
    """

    drafts: tuple[ProgramPlan, ...]
    accepted: tuple[float, ...]
    floor: roofline.DecodeRoofline | None
    devices_per_rank: int

    @property
    def tokens_per_row(self) -> float:
        """Tokens per request and decode step: one, and the accepted drafts."""
        return 1 + sum(self.accepted)

    @property
    def seconds(self) -> float:
        """Estimated time of the whole step."""
        return self.timeline.step + sum(program.seconds for program in self.drafts) + roofline.HOST_S

    @property
    def tokens_per_device(self) -> float:
        """Tokens per second and device: of prompts in prefill, of answers in decode."""
        rows = self.run.tokens // self.run.width
        return rows * self.tokens_per_row / self.devices_per_rank / self.seconds


@dataclasses.dataclass(frozen=True)
class PartialPageCost:
    """What partial last pages of prompts cost a decode instance of `rows` requests with `answer` tokens each.

    Prefill instances transfer whole pages. A program of `seconds` computes the remaining 1 to 64 tokens. It takes
    nearly as long for one prompt as for one per rank, so prompts are batched (`dsv3.scheduler.balance`).
    """

    seconds: float
    rows: int
    answer: float

    @property
    def steps(self) -> float:
        """Decode steps per run of the program: `MOST_STEPS` after the step in which a prompt arrives."""
        return MOST_STEPS + max(1.0, self.answer / self.rows)

    @property
    def per_step(self) -> float:
        """Mean seconds that the program adds to a decode step."""
        return self.seconds / self.steps

    def share(self, step: float) -> float:
        """Returns the throughput as a share of that of decode steps of `step` seconds alone.

        The program makes steps longer, and waiting requests occupy rows without producing tokens.
        """
        return step / (step + self.per_step) * self.answer / (self.answer + MOST_STEPS / 2)


@dataclasses.dataclass(frozen=True)
class Handover:
    """The KV transfer of a mean request: tokens of its prompt and answer, and the bytes of the prompt's pages.

    `node_seconds` and `cross_seconds` are the time of its pages over one device's links inside and between nodes.
    The deployment finishes `requests_per_second`; each of its nodes receives `bytes_per_second`.
    """

    prompt: float
    answer: float
    nbytes: float
    node_seconds: float
    cross_seconds: float
    requests_per_second: float
    bytes_per_second: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a deployment; `steps` is empty if weights and cache alone do not fit.

    `partial_pages` is given for decode instances that receive pages from prefill instances.
    """

    model_name: str
    model: ModelConfig
    deployment: Deployment
    memory: Memory
    steps: tuple[StepPlan, ...]
    verdict: Verdict
    partial_pages: PartialPageCost | None = None

    @property
    def tokens_per_node(self) -> float | None:
        """Output tokens per second and node, including the cost of partial pages; None without decode steps."""
        [*decode] = (step for step in self.steps if step.phase == "decode")
        if not decode:
            return None
        share = 1.0 if self.partial_pages is None else self.partial_pages.share(decode[0].seconds)
        return decode[0].tokens_per_device * self.deployment.gpus_per_node * share

    @property
    def handover(self) -> Handover | None:
        """The KV transfer if another deployment computes the prompts; None without decode steps."""
        per_node = self.tokens_per_node
        if per_node is None:
            return None
        token = self.memory.token * self.deployment.decode_context_parallel
        return handover(self.deployment, token, per_node)

    def prefill_nodes(self, prefill: "Plan") -> float | None:
        """Returns how many nodes of the deployment `prefill` compute this one's prompts; None if either has no step."""
        transfer = self.handover
        [*steps] = (step for step in prefill.steps if step.phase == "prefill")
        if transfer is None or not steps:
            return None
        per_node = steps[0].tokens_per_device * prefill.deployment.gpus_per_node
        hits = prefill.deployment.prefix_hit_rate
        return prefill_nodes(transfer.requests_per_second, transfer.prompt, hits, per_node)


def make_plan(
    model: ModelConfig,
    model_name: str,
    deployment: Deployment,
    progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Compiles and reads the programs of `deployment`; calls `progress` with a line before each long phase.

    Compiles nothing if weights and cache alone do not fit. Raises DeploymentError if the model does not divide over
    the devices, `AotUnavailableError` if programs cannot be compiled.
    """
    planned = lay_out(model, deployment)
    memory = memory_of(planned)
    compiled: list[tuple[CompiledProgram, ...]] = []
    if memory.fits:
        for phase in phases(deployment):
            progress(f"compiling {phase} for {deployment.devices} x {deployment.device.name}")
            compiled.append(compile_step(planned, phase))
        progress("compiling the other programs that need much memory")
        memory = memory_of(planned, measure(planned.engine, planned.programs))
    steps = tuple(step_plan(planned, step) for step in compiled)
    return Plan(model_name, model, deployment, memory, steps, judge(memory, deployment, model.n_routed_experts))


def phases(deployment: Deployment) -> Sequence[Phase]:
    """Returns the kinds of steps that the deployment runs."""
    sizes = deployment.prefill_tokens, deployment.decode_requests
    return [phase for phase, size in zip(PHASES, sizes, strict=True) if size]


def step_plan(planned: PlannedModel, compiled: Sequence[CompiledProgram]) -> StepPlan:
    """Analyzes a step's compiled programs and estimates its time."""
    model, *drafts = (program_plan(planned, program) for program in compiled)
    deployment = planned.deployment
    return StepPlan(
        **vars(model),
        drafts=tuple(drafts),
        accepted=deployment.accepted if model.phase == "decode" else (),
        floor=step_roofline(planned, model.phase, model.run.width),
        devices_per_rank=deployment.tensor_parallel,
    )


def program_plan(planned: PlannedModel, compiled: CompiledProgram) -> ProgramPlan:
    """Analyzes one compiled program."""
    deployment = planned.deployment
    module = hlo.parse(compiled.text)
    found = collectives(module, deployment.gpus_per_node)
    taken = planned.reserve.of(compiled.run.key.kind, compiled.run.key.size)
    rates = kernel_rates(deployment.device, planned.model, taken.share)
    batches = ScheduleSimulator(module, found, {}, rates).micro_batches
    stages = stage_seconds(planned, compiled.phase, compiled.run, rates, batches)
    library = nccl_ep.exchange(planned.model, deployment, compiled.run.tokens // batches)
    found, transfers = (found, None) if library is None else (library.without_padding(found), library.seconds)
    return ProgramPlan(
        **vars(compiled),
        multiprocessors=taken,
        collectives=found,
        host_waits=module.host_waits,
        kernels=hlo.kernels(module),
        order=launch_order(module, *compiled.limits, taken.reserved),
        stages=stages,
        sparse=roofline.sparse_parts(
            planned.model, rates, planned_batch(planned, compiled.phase, compiled.run, batches)
        ),
        timeline=ScheduleSimulator(module, found, stages, rates, transfers).simulate(),
    )


def program_seconds(planned: PlannedModel, compiled: CompiledProgram) -> Callable[[int, int], float]:
    """Returns a function of the tokens per rank and of the keys of each: the seconds of a step, host included.

    It simulates the schedule of a program that was compiled for its largest batch. Smaller buckets are assumed to have
    the same schedule, with transfers in proportion to their tokens: capacities are rounded up, so this is approximate.
    """
    model, deployment, run = planned.model, planned.deployment, compiled.run
    module = hlo.parse(compiled.text)
    found = collectives(module, deployment.gpus_per_node)
    rates = kernel_rates(deployment.device, model, planned.reserve.of(run.key.kind, run.key.size).share)
    batches = ScheduleSimulator(module, found, {}, rates).micro_batches

    def seconds(size: int, keys: int) -> float:
        share = size / run.tokens
        scaled = [
            dataclasses.replace(c, node_bytes=int(share * c.node_bytes), cross_bytes=int(share * c.cross_bytes))
            for c in found
        ]
        library = nccl_ep.exchange(model, deployment, size // batches, run.tokens // batches)
        transfers = None if library is None else library.seconds
        at, smaller = with_keys(planned, compiled.phase, keys), dataclasses.replace(run, tokens=size)
        stages = bounded_stages(at, compiled.phase, smaller, rates, batches)
        return ScheduleSimulator(module, scaled, stages, rates, transfers).simulate().step + roofline.HOST_S

    return seconds


def with_keys(planned: PlannedModel, phase: Phase, keys: int, **changes: Any) -> PlannedModel:
    """Returns a plan of steps whose tokens see `keys` keys on average, none of them from a prefix cache."""
    context = max(1, 2 * keys if phase == "prefill" else keys)  # prefill's tokens attend to half of a prompt
    deployment = dataclasses.replace(planned.deployment, context_length=context, prefix_hit_rate=0.0, **changes)
    return dataclasses.replace(planned, deployment=deployment)


def with_partial_pages(deployment: Deployment, page_size: int) -> Deployment:
    """Returns a decode deployment with the prefill program for the partial last pages of prompts."""
    return dataclasses.replace(deployment, prefill_tokens=page_size, max_num_batched_tokens=page_size)


def partial_page_cost(model: ModelConfig, deployment: Deployment, progress: Callable[[str], None]) -> PartialPageCost:
    """Compiles a decode deployment's program for the partial last pages of prompts, and estimates its cost.

    Partial pages are half full on average; an MTP module is not counted. Raises as `make_plan` does.
    """
    page_size = model.page_size * deployment.decode_context_parallel
    planned = lay_out(model, with_partial_pages(deployment, page_size))
    progress(f"compiling prefill of partial pages for {deployment.devices} x {deployment.device.name}")
    compiled, *_ = compile_step(planned, "prefill")
    prompt, answer = lengths(deployment)
    rows = deployment.decode_requests * deployment.ranks
    return PartialPageCost(program_seconds(planned, compiled)(page_size, round(prompt / 2)), rows, answer)


def bounded_stages(planned: PlannedModel, phase: Phase, run: Run, rates: Rates, micro_batches: int) -> dict[str, float]:
    """Returns `stage_seconds`, where a small prefill takes at least the time to read its weights."""
    found = stage_seconds(planned, phase, run, rates, micro_batches)
    if phase == "decode":
        return found
    split = planned.deployment.tensor_parallel
    batch = PlannedBatch(run.tokens // micro_batches, 0, experts_per_device(planned), split)
    least = roofline.decode_stages(planned.model, rates, batch)
    return {name: s if name in _UNBOUNDED else max(s, least.get(name, 0.0)) for name, s in found.items()}


def stage_seconds(planned: PlannedModel, phase: Phase, run: Run, rates: Rates, micro_batches: int) -> dict[str, float]:
    """Returns the seconds of each stage of a layer for one of `micro_batches`; for "head" those of the program."""
    model, is_prefill = planned.model, computes_prompts(phase, run)
    batch = planned_batch(planned, phase, run, micro_batches)
    found = (roofline.prefill_stages if is_prefill else roofline.decode_stages)(model, rates, batch)
    D = model.hidden_size
    if run.part == "block":  # a block's first rows give the drafts
        drafts = run.tokens // run.width * (planned.engine.tokens_per_row - 1)
        return found | {"mlp": 0.0, "head": head_seconds(planned, rates, drafts)}
    if run.part == "model":
        return found if is_prefill else found | {"head": head_seconds(planned, rates, run.tokens)}
    rows = planned.engine.prefill_rows(run.tokens) if is_prefill else run.tokens // run.width
    return found | {
        "mlp": 0.0,
        "head": head_seconds(planned, rates, rows),
        "eh_proj": roofline.bf16_product(model, rates, run.tokens, 2 * D * D),
    }


def computes_prompts(phase: Phase, run: Run) -> bool:
    """Returns whether a program computes prompts: those of a prefill step except what drafts behind them."""
    return phase == "prefill" and run.part not in ("chain", "block")


def planned_batch(planned: PlannedModel, phase: Phase, run: Run, micro_batches: int) -> PlannedBatch:
    """Returns one of `micro_batches` of a program, at the deployment's mean lengths."""
    deployment, is_prefill = planned.deployment, computes_prompts(phase, run)
    context, hits = deployment.context_length, deployment.prefix_hit_rate
    return PlannedBatch(
        tokens=run.tokens // micro_batches,
        keys=hits * context + (1 - hits) * context / 2 if is_prefill else context,
        experts=experts_per_device(planned),
        split=deployment.tensor_parallel,
        cache_dtype=deployment.kv_cache_dtype,
        width=run.width,
        min_keys=hits * context if is_prefill else None,
        kv_capacity=run.kv_capacity,
        context_split=deployment.decode_context_parallel,
    )


def head_seconds(planned: PlannedModel, rates: Rates, rows: int) -> float:
    """Returns the seconds of the head for `rows` of each rank: devices split the vocabulary and serve all ranks."""
    shared, elements = planned.functions.vocabulary, roofline.sizes_of(planned.model).head
    return roofline.bf16_product(planned.model, rates, rows * shared.ranks, elements // shared.devices)


def experts_per_device(planned: PlannedModel) -> int:
    """Returns the physical experts of each layer on one device."""
    deployment, experts = planned.deployment, planned.model.n_routed_experts
    spread = deployment.devices if deployment.expert_parallel else 1
    return (experts + deployment.redundant_experts) // spread


def step_roofline(planned: PlannedModel, phase: Phase, width: int) -> roofline.DecodeRoofline | None:
    """Returns the roofline of a decode step of `width` tokens per request; None unless every device is a rank."""
    deployment, device = planned.deployment, planned.deployment.device
    if phase == "prefill" or deployment.tensor_parallel > 1:
        return None
    link = device.cross_link if deployment.nodes > 1 else device.node_link
    return roofline.decode_roofline(
        planned.model,
        device,
        deployment.decode_requests,
        deployment.context_length,
        experts_per_device(planned),
        deployment.kv_cache_dtype,
        width,
        planned.functions.vocabulary.devices,
        link if deployment.expert_parallel and deployment.devices > 1 else math.inf,
    )


def lengths(deployment: Deployment) -> tuple[float, float]:
    """Returns the mean tokens of a prompt and of an answer."""
    answer = deployment.context_length / (deployment.prompt_per_answer + 0.5)
    return deployment.context_length - answer / 2, answer


def handover(deployment: Deployment, token_bytes: float, tokens_per_node: float, window: int = 0) -> Handover:
    """Returns the KV transfer to a decode deployment of `tokens_per_node` per second.

    A token has `token_bytes`; a request also has `window` bytes, whatever its length.
    """
    prompt, answer = lengths(deployment)
    nbytes = prompt * token_bytes + window
    finished = tokens_per_node / answer  # requests per second and node
    return Handover(
        prompt=prompt,
        answer=answer,
        nbytes=nbytes,
        node_seconds=nbytes / deployment.device.node_link,
        cross_seconds=nbytes / deployment.device.cross_link,
        requests_per_second=finished * deployment.nodes,
        bytes_per_second=finished * nbytes,
    )


def prefill_nodes(requests_per_second: float, prompt: float, hit_rate: float, tokens_per_node: float) -> float:
    """Returns how many prefill nodes of `tokens_per_node` per second compute the prompts of a decode unit.

    DeepSeek's fleet had 95.5 prefill nodes for 131.25 of decode, so 13.1 for each unit of 18.
    """
    return requests_per_second * prompt * (1 - hit_rate) / tokens_per_node
