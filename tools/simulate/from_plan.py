"""Computes a deployment's table of step times from the plan.

It compiles the largest program of each kind and simulates its schedule with smaller batches
(`tools.plan.plan.program_seconds`). For DeepSeek-V4, whose plan compiles nothing, times follow from shapes
(`tools.plan.uncompiled`).
"""

import functools
import hashlib
from collections.abc import Callable, Iterable

from dsv3.config.model import ModelConfig
from dsv3.config.options import Role
from dsv3.engine.device.programs import measure
from dsv3.kv_cache.layout import page_bytes, window_pages
from dsv3.scheduler.cost import keys_per_token
from tools.plan.deployment import Deployment, DeploymentError, Phase
from tools.plan.memory import judge, memory_of
from tools.plan.plan import phases, program_seconds, with_partial_pages
from tools.plan.programs import compile_step, lay_out
from tools.plan.roofline import HOST_S
from tools.plan.uncompiled import WORKING, bucket_seconds
from tools.simulate.times import KEYS, InstanceTimes


def times_digest(model: ModelConfig, deployment: Deployment) -> str:
    """Returns the digest of model and deployment that a table of step times carries."""
    return hashlib.sha256(repr((model, deployment)).encode()).hexdigest()


def compute_times(model: ModelConfig, deployment: Deployment, progress: Callable[[str], None]) -> InstanceTimes:
    """Compiles the programs of `deployment`, and returns its limits and step times.

    A decode step with drafts is simulated as steps of one token, so `acceptance` sets the mean pace of answers and not
    how tokens come together. Calls `progress` with a line before each long phase. Raises DeploymentError if it does not
    fit, or has drafts that cannot be simulated, `AotUnavailableError` if programs cannot be compiled.
    """
    by_size = deployment.speculative is not None and len(deployment.speculative.drafts_by_size) > 1
    if deployment.drafts and (by_size or model.compressed is None):
        why = "drafts are simulated for DeepSeek-V4, as many at every batch size; leave it out"
        raise DeploymentError(f"{deployment.name}: speculative_config: {why}")
    page_size = model.page_size * deployment.decode_context_parallel
    whole = deployment if deployment.prefill_tokens else with_partial_pages(deployment, page_size)
    planned, compiles = lay_out(model, whole), model.compressed is None
    memory = memory_of(planned, None if compiles else WORKING)
    seconds: dict[Phase, Callable[[int, int], float]] = {}  # by bucket and keys
    for phase in phases(whole) if memory.fits else []:
        if not compiles:
            seconds[phase] = functools.partial(bucket_seconds, planned, phase)
            continue
        progress(f"compiling {phase} for {deployment.devices} x {deployment.device.name}")
        [compiled] = compile_step(planned, phase)
        seconds[phase] = program_seconds(planned, compiled)
    if compiles and memory.fits:
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
        page_bytes=memory.account.page * deployment.decode_context_parallel,
        page_size=page_size,
        window_size=cfg.window_size,
        num_window_pages=window_pages(planned.model, cfg.cache_dtype, memory.account.pages, cfg.max_num_seqs),
        window_bytes=page_bytes(planned.model, cfg.cache_dtype, "window"),
        max_num_seqs=cfg.max_num_seqs,
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        max_model_len=min(deployment.max_model_len or model.max_position_embeddings, memory.tokens_left - page_size),
        keys=keys_per_token(model),
        link=deployment.device.cross_link,
        host=HOST_S,
        prefill=table(seconds["prefill"], cfg.prefill_buckets),
        decode=table(seconds["decode"], cfg.decode_buckets) if "decode" in seconds else {},
    )


def table(seconds: Callable[[int, int], float], buckets: Iterable[int]) -> dict[int, tuple[float, ...]]:
    """Returns the seconds of a step by bucket, for each of `KEYS` per token."""
    return {size: tuple(seconds(size, keys) for keys in KEYS) for size in buckets}
