"""A plan: memory, collectives, overlap and estimated speed of a model in a deployment."""

import dataclasses
from collections.abc import Callable, Sequence

from dsv3.config import ModelConfig
from dsv3.plan import hlo, roofline
from dsv3.plan.collectives import Collective, collectives
from dsv3.plan.deployment import Deployment
from dsv3.plan.memory import Memory, memory_of
from dsv3.plan.programs import Compiled, LaidOut, Phase, compile_step, lay_out
from dsv3.plan.timeline import Player, Timeline
from dsv3.plan.verdict import Verdict, judge


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One compiled step. `tokens` are those of one rank; `seconds` of the step and `stages` are estimates."""

    phase: Phase
    tokens: int
    compile_seconds: float
    arguments: int
    results: int
    temporaries: int
    collectives: tuple[Collective, ...]
    stages: dict[str, float]
    timeline: Timeline
    floor: roofline.DecodeFloor | None
    seconds: float
    tokens_per_device: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a deployment; `steps` is empty where the weights alone rule it out."""

    model_name: str
    model: ModelConfig
    deployment: Deployment
    memory: Memory
    steps: tuple[StepPlan, ...]
    verdict: Verdict


def make_plan(
    model: ModelConfig,
    model_name: str,
    deployment: Deployment,
    progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Compiles and reads the programs of `deployment`; `progress` is told what is about to take long.

    What cannot fit by its weights and cache alone is not compiled. Raises DeploymentError where the model does not
    divide over the devices, `AotUnavailableError` where programs cannot be compiled.
    """
    planned = lay_out(model, deployment)
    memory = memory_of(planned)
    compiled: list[Compiled] = []
    if memory.fits:
        for phase in phases(deployment):
            progress(f"compiling {phase} for {deployment.devices} x {deployment.device.name}")
            compiled.append(compile_step(planned, phase))
        memory = memory_of(planned, compiled)
    steps = tuple(step_plan(planned, step) for step in compiled)
    return Plan(model_name, model, deployment, memory, steps, judge(memory, deployment, model.n_routed_experts))


def phases(deployment: Deployment) -> Sequence[Phase]:
    """Returns the kinds of steps that the deployment runs."""
    sizes: dict[Phase, int] = {"prefill": deployment.prefill_tokens, "decode": deployment.decode_requests}
    return [phase for phase, size in sizes.items() if size]


def step_plan(planned: LaidOut, compiled: Compiled) -> StepPlan:
    """Reads what a compiled step's text says, and estimates how long it could take."""
    deployment = planned.deployment
    module = hlo.parse(compiled.text)
    found = collectives(module, deployment.gpus_per_node)
    rates = roofline.rates_of(deployment.device, planned.model)
    batches = Player(module, found, {}, rates).micro_batches
    stages = stages_of(planned, compiled, rates, batches)
    timeline = Player(module, found, stages, rates).play()
    seconds = timeline.step + roofline.HOST_S
    return StepPlan(
        phase=compiled.phase,
        tokens=compiled.tokens,
        compile_seconds=compiled.seconds,
        arguments=compiled.arguments,
        results=compiled.results,
        temporaries=compiled.temporaries,
        collectives=found,
        stages=stages,
        timeline=timeline,
        floor=_floor(planned, compiled),
        seconds=seconds,
        tokens_per_device=compiled.tokens / deployment.tensor_parallel / seconds,
    )


def stages_of(planned: LaidOut, compiled: Compiled, rates: roofline.Rates, micro_batches: int) -> dict[str, float]:
    """Returns the seconds of each stage of a layer for one of `micro_batches`."""
    deployment, model = planned.deployment, planned.model
    context, hits = deployment.context_length, deployment.prefix_hit_rate
    is_prefill = compiled.phase == "prefill"
    batch = roofline.MicroBatch(
        tokens=compiled.tokens // micro_batches,
        keys=hits * context + (1 - hits) * context / 2 if is_prefill else context,
        experts=experts_per_device(planned),
        split=deployment.tensor_parallel,
        cache_dtype=deployment.kv_cache_dtype,
    )
    stages = roofline.prefill_stages if is_prefill else roofline.decode_stages
    return stages(model, rates, batch)


def experts_per_device(planned: LaidOut) -> int:
    """Returns the copies of experts in each layer on one device."""
    deployment, experts = planned.deployment, planned.model.n_routed_experts
    spread = deployment.devices if deployment.expert_parallel else 1
    return (experts + deployment.redundant_experts) // spread


def _floor(planned: LaidOut, compiled: Compiled) -> roofline.DecodeFloor | None:
    deployment = planned.deployment
    if compiled.phase == "prefill" or deployment.tensor_parallel > 1:
        return None
    return roofline.floor_decode(
        planned.model,
        deployment.device,
        compiled.tokens,
        deployment.context_length,
        experts_per_device(planned),
        deployment.kv_cache_dtype,
    )
