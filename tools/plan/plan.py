"""A plan: memory, collectives, overlap and estimated speed of a model in a deployment, and what prefill passes on.

What prefill and decode on separate instances pass on is an estimate. A request of the mean context has a prompt and an
answer in a stated proportion. While it is answered its context grows from the prompt to prompt and answer, so the mean
is the prompt and half of the answer.
"""

import dataclasses
from collections.abc import Callable, Sequence

from dsv3.config.model import ModelConfig
from dsv3.engine.device.programs import measure
from dsv3.scheduler.balance import MOST_STEPS
from pallas_kernels.multiprocessors import Multiprocessors
from tools.plan import hlo, roofline
from tools.plan.attention import SparseCore
from tools.plan.deployment import Deployment, PlannedBatch, Rates, rates_of
from tools.plan.hlo import Collective, collectives
from tools.plan.launch_order import LaunchOrder, launch_order
from tools.plan.memory import Memory, Verdict, judge, memory_of
from tools.plan.programs import CompiledProgram, LaidOut, Phase, Run, compile_step, lay_out
from tools.plan.timeline import Player, Timeline


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """One compiled program of a step; `stages`, `sparse` and the times of `timeline` are estimates.

    `sparse` is what attention consists of in a layer, where queries choose the tokens that they attend to.
    `multiprocessors` are what its kernels take, and leave to transfers. `host_waits` are the places in the program
    where the devices wait for the host (`hlo.Module.host_waits`). `order` says whether all devices meet their
    collectives in one order.
    """

    phase: Phase
    run: Run
    multiprocessors: Multiprocessors
    compile_seconds: float
    arguments: int
    results: int
    temporaries: int
    collectives: tuple[Collective, ...]
    host_waits: tuple[str, ...]
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
        """The program's part of a step, as often as it runs."""
        return self.run.times * self.timeline.step


@dataclasses.dataclass(frozen=True)
class StepPlan(ProgramPlan):
    """A step: the model's program, and `drafts`, the module's programs behind it.

    `accepted` are the shares of rows in which all drafts up to each place are right, as they were given. `floor` is
    that of the model's program alone.
    """

    drafts: tuple[ProgramPlan, ...]
    accepted: tuple[float, ...]
    floor: roofline.DecodeFloor | None
    devices_per_rank: int

    @property
    def tokens_per_row(self) -> float:
        """Tokens that a request gets in a decode step: its own, and the drafts that are right."""
        return 1 + sum(self.accepted)

    @property
    def seconds(self) -> float:
        """The whole step, an estimate."""
        return self.timeline.step + sum(program.seconds for program in self.drafts) + roofline.HOST_S

    @property
    def tokens_per_device(self) -> float:
        """Tokens per second and device: of prompts in prefill, of answers in decode."""
        rows = self.run.tokens // self.run.width
        return rows * self.tokens_per_row / self.devices_per_rank / self.seconds


@dataclasses.dataclass(frozen=True)
class Ends:
    """What the ends of prompts cost an instance of `rows` requests with `answer` tokens each, that only decodes.

    Whole pages travel. The 1 to 64 tokens behind the last one are computed by a program of `seconds`, which takes
    nearly as long for one prompt as for one per rank: it reads the same weights and crosses the same links. So prompts
    wait for each other (`dsv3.scheduler.balance`).
    """

    seconds: float
    rows: int
    answer: float

    @property
    def steps(self) -> float:
        """Decode steps per run of the program: prompts gather for `MOST_STEPS` behind the one in which one comes."""
        return MOST_STEPS + max(1.0, self.answer / self.rows)

    @property
    def per_step(self) -> float:
        """Seconds that the program adds to a decode step at the mean."""
        return self.seconds / self.steps

    def share(self, step: float) -> float:
        """Returns the share that is left of the tokens that decode steps of `step` seconds give alone.

        Steps are longer by the program, and requests that wait for others hold a row without a token.
        """
        return step / (step + self.per_step) * self.answer / (self.answer + MOST_STEPS / 2)


@dataclasses.dataclass(frozen=True)
class Handover:
    """A mean request of a decode unit: tokens of its prompt and of its answer, and the bytes of the prompt's pages.

    `node_seconds` and `cross_seconds` are the time that its pages take over one device's links in a node and between
    nodes. `requests_per_second` is how many a unit of `nodes` finishes, `bytes_per_second` what each of its nodes gets.
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
    """What is known of a deployment; `steps` is empty where the weights alone rule it out.

    `ends` are what the ends of prompts cost, where that was asked.
    """

    model_name: str
    model: ModelConfig
    deployment: Deployment
    memory: Memory
    steps: tuple[StepPlan, ...]
    verdict: Verdict
    ends: Ends | None = None

    @property
    def tokens_per_node(self) -> float | None:
        """Tokens of answers per second and node, with the ends of prompts; None where it decodes nothing."""
        [*decode] = (step for step in self.steps if step.phase == "decode")
        if not decode:
            return None
        share = 1.0 if self.ends is None else self.ends.share(decode[0].seconds)
        return decode[0].tokens_per_device * self.deployment.gpus_per_node * share

    @property
    def handover(self) -> Handover | None:
        """What the deployment takes over where another one computes the prompts; None where it decodes nothing."""
        per_node = self.tokens_per_node
        if per_node is None:
            return None
        return handover(self.deployment, self.memory.token, per_node)

    def prefill_nodes(self, prefill: "Plan") -> float | None:
        """Returns how many nodes of the deployment `prefill` compute this one's prompts; None where one has no step."""
        taken = self.handover
        [*steps] = (step for step in prefill.steps if step.phase == "prefill")
        if taken is None or not steps:
            return None
        per_node = steps[0].tokens_per_device * prefill.deployment.gpus_per_node
        return prefill_nodes(taken.requests_per_second, taken.prompt, prefill.deployment.prefix_hit_rate, per_node)


def make_plan(
    model: ModelConfig,
    model_name: str,
    deployment: Deployment,
    progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Compiles and reads the programs of `deployment`; `progress` gets a line before what takes long.

    What cannot fit by its weights and cache alone is not compiled. Raises DeploymentError where the model does not
    divide over the devices, `AotUnavailableError` where programs cannot be compiled.
    """
    planned = lay_out(model, deployment)
    memory = memory_of(planned)
    compiled: list[tuple[CompiledProgram, ...]] = []
    if memory.fits:
        for phase in phases(deployment):
            progress(f"compiling {phase} for {deployment.devices} x {deployment.device.name}")
            compiled.append(compile_step(planned, phase))
        progress("compiling what else takes much memory")
        memory = memory_of(planned, measure(planned.engine, planned.programs))
    steps = tuple(step_plan(planned, step) for step in compiled)
    return Plan(model_name, model, deployment, memory, steps, judge(memory, deployment, model.n_routed_experts))


def phases(deployment: Deployment) -> Sequence[Phase]:
    """Returns the kinds of steps that the deployment runs."""
    sizes: dict[Phase, int] = {"prefill": deployment.prefill_tokens, "decode": deployment.decode_requests}
    return [phase for phase, size in sizes.items() if size]


def step_plan(planned: LaidOut, compiled: Sequence[CompiledProgram]) -> StepPlan:
    """Reads what the texts of a step's programs say, and estimates how long it could take."""
    model, *drafts = (program_plan(planned, program) for program in compiled)
    deployment = planned.deployment
    return StepPlan(
        **{field.name: getattr(model, field.name) for field in dataclasses.fields(model)},
        drafts=tuple(drafts),
        accepted=deployment.accepted if model.phase == "decode" else (),
        floor=_floor(planned, compiled[0]),
        devices_per_rank=deployment.tensor_parallel,
    )


def program_plan(planned: LaidOut, compiled: CompiledProgram) -> ProgramPlan:
    """Reads one program."""
    deployment = planned.deployment
    module = hlo.parse(compiled.text)
    found = collectives(module, deployment.gpus_per_node)
    taken = planned.reserve.of(compiled.run.key.kind, compiled.run.key.size)
    rates = rates_of(deployment.device, planned.model, taken.share)
    batches = Player(module, found, {}, rates).micro_batches
    stages = stages_of(planned, compiled.phase, compiled.run, rates, batches)
    return ProgramPlan(
        phase=compiled.phase,
        run=compiled.run,
        multiprocessors=taken,
        compile_seconds=compiled.seconds,
        arguments=compiled.arguments,
        results=compiled.results,
        temporaries=compiled.temporaries,
        collectives=found,
        host_waits=module.host_waits,
        order=launch_order(module, *compiled.limits, taken.reserved),
        stages=stages,
        sparse=roofline.sparse_parts(planned.model, rates, batch_of(planned, compiled.phase, compiled.run, batches)),
        timeline=Player(module, found, stages, rates).play(),
    )


def stages_of(planned: LaidOut, phase: Phase, run: Run, rates: Rates, micro_batches: int) -> dict[str, float]:
    """Returns the seconds of each stage of a layer for one of `micro_batches`; the head's are the whole program's."""
    model, is_prefill = planned.model, computes_prompts(phase, run)
    batch = batch_of(planned, phase, run, micro_batches)
    found = (roofline.prefill_stages if is_prefill else roofline.decode_stages)(model, rates, batch)
    D = model.hidden_size
    if run.part == "model":
        return found if is_prefill else found | {"head": head_seconds(planned, rates, run.tokens)}
    rows = planned.engine.prefill_rows(run.tokens) if is_prefill else run.tokens // run.width
    return found | {
        "mlp": 0.0,
        "head": head_seconds(planned, rates, rows),
        "eh_proj": roofline.bf16_product(model, rates, run.tokens, 2 * D * D),
    }


def computes_prompts(phase: Phase, run: Run) -> bool:
    """Returns whether a program computes prompts: all of a prefill step but those that chain drafts."""
    return phase == "prefill" and run.part != "chain"


def batch_of(planned: LaidOut, phase: Phase, run: Run, micro_batches: int) -> PlannedBatch:
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
        fewest=hits * context if is_prefill else None,
        room=run.room,
    )


def head_seconds(planned: LaidOut, rates: Rates, rows: int) -> float:
    """Returns the seconds of the head for `rows` of each rank: a device computes its vocabulary share for all ranks."""
    shared, elements = planned.functions.vocabulary, roofline.sizes_of(planned.model).head
    return roofline.bf16_product(planned.model, rates, rows * shared.ranks, elements // shared.devices)


def experts_per_device(planned: LaidOut) -> int:
    """Returns the copies of experts in each layer on one device."""
    deployment, experts = planned.deployment, planned.model.n_routed_experts
    spread = deployment.devices if deployment.expert_parallel else 1
    return (experts + deployment.redundant_experts) // spread


def _floor(planned: LaidOut, compiled: CompiledProgram) -> roofline.DecodeFloor | None:
    deployment = planned.deployment
    if compiled.phase == "prefill" or deployment.tensor_parallel > 1:
        return None
    return roofline.floor_decode(
        planned.model,
        deployment.device,
        deployment.decode_requests,
        deployment.context_length,
        experts_per_device(planned),
        deployment.kv_cache_dtype,
        compiled.run.width,
        planned.functions.vocabulary.devices,
    )


def lengths(deployment: Deployment) -> tuple[float, float]:
    """Returns the mean tokens of a prompt and of an answer."""
    answer = deployment.context_length / (deployment.prompt_per_answer + 0.5)
    return deployment.context_length - answer / 2, answer


def handover(deployment: Deployment, token_bytes: int, tokens_per_node: float) -> Handover:
    """Returns what a decode deployment takes over: `token_bytes` in all layers, `tokens_per_node` per second."""
    prompt, answer = lengths(deployment)
    nbytes = prompt * token_bytes
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
    """Returns how many prefill nodes compute the prompts of a decode unit, `tokens_per_node` tokens per second each.

    DeepSeek's fleet had 95.5 prefill nodes for 131.25 of decode, so 13.1 for each unit of 18.
    """
    return requests_per_second * prompt * (1 - hit_rate) / tokens_per_node
