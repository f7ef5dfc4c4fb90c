"""Makes the table of a deployment's step times by playing the plan's compiled schedules.

One program of each kind is compiled, its largest. Smaller buckets are taken to have the same schedule, with transfers
in proportion to their tokens: an approximation, as capacities are rounded up.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable

from dsv3.cache.page import PAGE_SIZE
from dsv3.config import ModelConfig
from dsv3.fleet.cost import keys_per_token
from dsv3.options import Role
from dsv3.plan import hlo
from dsv3.plan.collectives import Collective, collectives
from dsv3.plan.deployment import Deployment, DeploymentError
from dsv3.plan.memory import memory_of
from dsv3.plan.plan import experts_per_device, stages_of
from dsv3.plan.programs import Compiled, LaidOut, Phase, compile_step, lay_out
from dsv3.plan.roofline import HOST_S, MicroBatch, Rates, decode_stages, rates_of
from dsv3.plan.timeline import Player
from dsv3.plan.verdict import judge
from dsv3.simulate.times import KEYS, InstanceTimes

_REMAINDER = PAGE_SIZE  # tokens behind the last full page, which a decode instance computes
_NO_FLOOR = ("router", "head")


def digest_of(model: ModelConfig, deployment: Deployment) -> str:
    """Returns what tells a table of another model or deployment from this one's."""
    return hashlib.sha256(repr((model, deployment)).encode()).hexdigest()


def times_of(model: ModelConfig, deployment: Deployment, progress: Callable[[str], None]) -> InstanceTimes:
    """Compiles the programs of `deployment` and returns its limits and step times; `progress` is told what takes long.

    Raises DeploymentError where it does not fit or has drafts, `AotUnavailableError` where nothing can be compiled.
    """
    if deployment.drafts:
        raise DeploymentError(f"{deployment.name}: speculative_config: the simulator knows no drafts; leave it out")
    # A decode instance computes what lies behind the last full page.
    whole = deployment if deployment.prefill_tokens else dataclasses.replace(deployment, prefill_tokens=_REMAINDER)
    planned = lay_out(model, whole)
    memory = memory_of(planned)
    steps: dict[Phase, Compiled] = {}
    if memory.fits:
        phases: list[Phase] = ["prefill", *(["decode"] if deployment.decode_requests else [])]  # type: ignore[list-item]
        for phase in phases:
            progress(f"compiling {phase} for {deployment.devices} x {deployment.device.name}")
            [steps[phase]] = compile_step(planned, phase)
        memory = memory_of(planned, [(step,) for step in steps.values()])
    if not memory.fits:
        verdict = judge(memory, deployment, model.n_routed_experts)
        raise DeploymentError(f"{deployment.name} does not fit: {verdict.why}")
    cfg = planned.engine
    role: Role = "both" if deployment.prefill_tokens else "decode"
    return InstanceTimes(
        name=deployment.name,
        digest=digest_of(model, deployment),
        role=role if deployment.decode_requests else "prefill",
        nodes=deployment.nodes,
        gpus_per_node=deployment.gpus_per_node,
        num_ranks=deployment.ranks,
        num_pages=memory.tokens_left // PAGE_SIZE,
        page_bytes=memory.token * PAGE_SIZE,
        max_num_seqs=cfg.max_num_seqs,
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        max_model_len=min(deployment.max_model_len or model.max_position_embeddings, memory.tokens_left - PAGE_SIZE),
        keys=keys_per_token(model),
        link=deployment.device.cross_link,
        host=HOST_S,
        prefill=Played(planned, steps["prefill"]).table(cfg.prefill_buckets),
        decode=Played(planned, steps["decode"]).table(cfg.decode_buckets) if "decode" in steps else {},
    )


class Played:
    """A compiled program whose schedule is played with other batches."""

    def __init__(self, planned: LaidOut, compiled: Compiled) -> None:
        self._planned, self._compiled = planned, compiled
        self._module = hlo.parse(compiled.text)
        self._found = list(collectives(self._module, planned.deployment.gpus_per_node))
        share = planned.reserve.of(compiled.run.key.kind, compiled.run.key.size).share
        self._rates: Rates = rates_of(planned.deployment.device, planned.model, share)
        self._batches = Player(self._module, self._found, {}, self._rates).micro_batches

    def table(self, buckets: Iterable[int]) -> dict[int, tuple[float, ...]]:
        """Returns the seconds of a step by bucket, at `KEYS` keys per token."""
        return {size: tuple(self._seconds(size, keys) for keys in KEYS) for size in buckets}

    def _seconds(self, size: int, keys: int) -> float:
        share = size / self._compiled.run.tokens
        found = [_scaled(each, share) for each in self._found]
        return Player(self._module, found, self._stages(size, keys), self._rates).play().step + HOST_S

    def _stages(self, size: int, keys: int) -> dict[str, float]:
        """Returns the stages' seconds; those of a small prefill are no shorter than reading their weights."""
        phase, run = self._compiled.phase, dataclasses.replace(self._compiled.run, tokens=size)
        context = max(1, 2 * keys if phase == "prefill" else keys)  # prefill's tokens attend to half of their prompt
        deployment = dataclasses.replace(self._planned.deployment, context_length=context, prefix_hit_rate=0.0)
        at = dataclasses.replace(self._planned, deployment=deployment)
        found = stages_of(at, phase, run, self._rates, self._batches)
        if phase == "decode":
            return found
        batch = MicroBatch(size // self._batches, 0, experts_per_device(at), deployment.tensor_parallel)
        floor = decode_stages(at.model, self._rates, batch)
        return {name: s if name in _NO_FLOOR else max(s, floor.get(name, 0.0)) for name, s in found.items()}


def _scaled(collective: Collective, share: float) -> Collective:
    """Returns a collective that sends a share of the bytes."""
    return dataclasses.replace(
        collective,
        node_bytes=int(share * collective.node_bytes),
        cross_bytes=int(share * collective.cross_bytes),
    )
