"""Computes a deployment's table of step times from the plan's compiled schedules.

It compiles the largest program of each kind and simulates its schedule with smaller batches (`tools.plan.simulated`).
"""

import hashlib
from collections.abc import Callable

from dsv3.config.model import ModelConfig
from dsv3.config.options import Role
from dsv3.engine.device.programs import measure
from dsv3.scheduler.cost import keys_per_token
from tools.plan.deployment import Deployment, DeploymentError
from tools.plan.memory import judge, memory_of
from tools.plan.programs import CompiledProgram, Phase, compile_step, lay_out
from tools.plan.roofline import HOST_S
from tools.plan.simulated import SimulatedProgram, with_partial_pages
from tools.simulate.times import KEYS, InstanceTimes


def times_digest(model: ModelConfig, deployment: Deployment) -> str:
    """Returns the digest of model and deployment that a table of step times carries."""
    return hashlib.sha256(repr((model, deployment)).encode()).hexdigest()


def compute_times(model: ModelConfig, deployment: Deployment, progress: Callable[[str], None]) -> InstanceTimes:
    """Compiles the programs of `deployment`, and returns its limits and step times.

    Calls `progress` with a line before each long phase. Raises DeploymentError if it does not fit, has drafts, or the
    model's plan compiles nothing, `AotUnavailableError` if programs cannot be compiled.
    """
    if model.compressed is not None:
        raise DeploymentError(f"{deployment.name}: DeepSeek-V4 cannot be simulated; launch.plan estimates its steps")
    if deployment.drafts:
        raise DeploymentError(f"{deployment.name}: speculative_config: drafts cannot be simulated; leave it out")
    whole = deployment if deployment.prefill_tokens else with_partial_pages(deployment, model.page_size)
    planned = lay_out(model, whole)
    memory = memory_of(planned)
    steps: dict[Phase, CompiledProgram] = {}
    if memory.fits:
        phases: list[Phase] = ["prefill", *(["decode"] if deployment.decode_requests else [])]  # type: ignore[list-item]
        for phase in phases:
            progress(f"compiling {phase} for {deployment.devices} x {deployment.device.name}")
            [steps[phase]] = compile_step(planned, phase)
        memory = memory_of(planned, measure(planned.engine, planned.programs))
    if not memory.fits:
        verdict = judge(memory, deployment, model.n_routed_experts)
        raise DeploymentError(f"{deployment.name} does not fit: {verdict.why}")
    cfg = planned.engine
    role: Role = "both" if deployment.prefill_tokens else "decode"
    return InstanceTimes(
        name=deployment.name,
        digest=times_digest(model, deployment),
        role=role if deployment.decode_requests else "prefill",
        nodes=deployment.nodes,
        gpus_per_node=deployment.gpus_per_node,
        num_ranks=deployment.ranks,
        num_pages=memory.account.pages,
        page_bytes=memory.account.page,
        page_size=model.page_size,
        max_num_seqs=cfg.max_num_seqs,
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        max_model_len=min(
            deployment.max_model_len or model.max_position_embeddings, memory.tokens_left - model.page_size
        ),
        keys=keys_per_token(model),
        link=deployment.device.cross_link,
        host=HOST_S,
        prefill=SimulatedProgram(planned, steps["prefill"]).table(cfg.prefill_buckets, KEYS),
        decode=SimulatedProgram(planned, steps["decode"]).table(cfg.decode_buckets, KEYS) if "decode" in steps else {},
    )
