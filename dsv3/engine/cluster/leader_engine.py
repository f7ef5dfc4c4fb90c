"""Building the leader's engine together with the followers, phase by phase."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dsv3.config.options import LEADER, ClusterOptions, EngineOptions
from dsv3.engine.cluster.digest import orders_of
from dsv3.engine.cluster.leader import Leader
from dsv3.engine.cluster.link import FIRST, Incarnation
from dsv3.engine.cluster.start import (
    LoadComponents,
    Phases,
    first_gpu,
    fitted,
    kept_programs,
    load_model,
    loaded_fields,
    own_options,
    start_jax,
)
from dsv3.engine.device.pool import set_pool_share
from dsv3.engine.device.programs import Progress, Store
from dsv3.engine.engine import Engine
from dsv3.engine.executor import LocalExecutor, Results
from dsv3.engine.fingerprint import fields_of
from dsv3.engine.job import StepCommand
from dsv3.engine.jobs.registry import JOB_KINDS
from dsv3.engine.kernel_checks import check_kernels, fall_back
from dsv3.engine.limits import with_pages

_SWITCH_INTERVAL_S = 0.0005  # commands shall leave while the engine's thread launches the same step


class LeadingExecutor:
    """Sends each command to the followers, carries out its own part, and has the results compared with theirs.

    `ranks` are those of this process's devices.
    """

    def __init__(self, local: LocalExecutor, leader: Leader, ranks: range) -> None:
        self.local, self._leader, self._ranks = local, leader, ranks

    def compile_all(self, progress: Progress | None = None, store: Store | None = None) -> None:
        """Compiles this process's programs; each process compiles its own."""
        self.local.compile_all(progress, store)

    def launch_all(self) -> None:
        """Launches this process's programs for the first time, once every process has compiled its own."""
        self._leader.compiled(orders_of(self.local.devices.programs))
        try:
            self.local.launch_all()
        except Exception as error:
            raise self._leader.explain(error) from error

    def launch(self, command: StepCommand) -> list[Any]:
        """Starts a step everywhere; raises ClusterError when the instance has failed."""
        self._leader.send(command)  # first, so that the others do not wait for this process's launch
        try:
            launched = self.local.launch(command.part(self._ranks))
        except Exception as error:
            raise self._leader.explain(error) from error
        self._leader.launched(command.number)
        return launched

    def fetch(self, command: StepCommand, launched: list[Any]) -> Results:
        """Waits for the results of a step; raises ClusterError once those of another process differ."""
        try:
            results = self.local.fetch(command, launched)
        except Exception as error:
            raise self._leader.explain(error) from error
        self._leader.results(command.number, self.local.agreed(command, results))
        return results


class Host(Protocol):
    """The process around the engine; `dsv3.server.engine.process.EngineHost` is one."""

    def progress(self, text: str, done: int = 0, total: int = 0) -> None: ...
    def drain(self, reason: str) -> None: ...
    def fail(self, reason: str) -> None: ...
    def at_end(self, callback: Callable[[str | None], None]) -> None: ...


def start_leader(
    cluster: ClusterOptions,
    model_dir: Path,
    options: EngineOptions,
    host: Host,
    load: LoadComponents = load_model,
    generation: Incarnation = FIRST,
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
    engine = Engine(parts, executor, store=store, work_events=leader.events)
    engine.warm_up(lambda done, total, what: host.progress(f"compiling {what}", done, total))
    leader.ready()
    phases.end("compiling")
    host.progress(f"{cluster.num_processes} processes are ready after {phases}; {store}")
    return engine
