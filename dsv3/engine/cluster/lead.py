"""Building the leader's engine together with the followers, phase by phase."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dsv3.config.options import LEADER, ClusterOptions, EngineOptions
from dsv3.engine.cluster.executor import LeadingExecutor
from dsv3.engine.cluster.generation import FIRST, Generation
from dsv3.engine.cluster.leader import Leader
from dsv3.engine.cluster.smaller import fitted
from dsv3.engine.cluster.start import (
    Load,
    Phases,
    first_gpu,
    kept_programs,
    load_model,
    loaded_fields,
    own_options,
    start_jax,
)
from dsv3.engine.device.pool import set_pool_share
from dsv3.engine.engine import Engine
from dsv3.engine.executor import LocalExecutor
from dsv3.engine.fingerprint import fields_of
from dsv3.engine.jobs.registry import JOB_KINDS
from dsv3.engine.kernel_checks import check_kernels, fall_back
from dsv3.engine.limits import with_pages

_SWITCH_INTERVAL_S = 0.0005  # commands shall leave while the engine's thread launches the same step


class Host(Protocol):
    """The process around the engine; `dsv3.server.engine.process.Host` is one."""

    def progress(self, text: str, done: int = 0, total: int = 0) -> None: ...
    def drain(self, reason: str) -> None: ...
    def fail(self, reason: str) -> None: ...
    def at_end(self, callback: Callable[[str | None], None]) -> None: ...


def start_leader(
    cluster: ClusterOptions,
    model_dir: Path,
    options: EngineOptions,
    host: Host,
    load: Load = load_model,
    generation: Generation = FIRST,
) -> Engine:
    """Returns an engine over the devices of all processes, warm; every follower is ready when it returns.

    Raises ClusterError when processes are missing, differ or fail.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    phases = Phases()
    fields = fields_of(model_dir, options, cluster)
    leader = Leader(cluster, fields, host.fail, host.drain, generation)
    host.at_end(leader.end)
    host.progress(f"waiting for {cluster.num_processes - 1} other processes")
    given, cluster = cluster, leader.gather()
    phases.end("all have come")
    if options.check_kernels:
        host.progress("checking the kernels")
        fall_back(leader.checked(check_kernels(first_gpu(cluster))))
        phases.end("checks")
    set_pool_share(options.gpu_memory_utilization)
    start_jax(cluster, generation)
    phases.end("jax")
    host.progress("loading the weights")
    options = fitted(own_options(options, cluster), model_dir, given, cluster)
    parts = load(model_dir, options, num_nodes=cluster.num_nodes)
    num_pages = leader.loaded(loaded_fields(parts))
    phases.end("weights")
    addresses = leader.transfer_addresses(parts.cfg.transfer_address)
    cfg = dataclasses.replace(with_pages(parts.cfg, num_pages, options), transfer_addresses=addresses)
    parts = dataclasses.replace(parts, cfg=cfg)
    leader.build(parts.cfg)
    ranks = parts.cfg.ranks_of(LEADER)
    store = kept_programs(cluster, model_dir, options, parts)
    executor = LeadingExecutor(LocalExecutor(parts, JOB_KINDS), leader, ranks)
    engine = Engine(parts, executor, store=store, news=leader.news)
    engine.warm_up(lambda done, total, what: host.progress(f"compiling {what}", done, total))
    leader.ready()
    phases.end("compiling")
    host.progress(f"{cluster.num_processes} processes are ready after {phases}; {store}")
    return engine
