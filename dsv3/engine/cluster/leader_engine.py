"""Builds the leader's engine together with the followers, phase by phase."""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dsv3.config.options import LEADER, ClusterOptions, EngineOptions
from dsv3.engine.build import load_components, log_components
from dsv3.engine.cluster import messages
from dsv3.engine.cluster.digest import collective_orders
from dsv3.engine.cluster.leader import Leader
from dsv3.engine.cluster.link import FIRST, Incarnation
from dsv3.engine.cluster.start import (
    LoadComponents,
    Phases,
    adapt_to_devices,
    first_gpu,
    loaded_fields,
    open_program_store,
    process_options,
    start_jax,
)
from dsv3.engine.components import EngineComponents
from dsv3.engine.device.pool import set_memory_fraction
from dsv3.engine.engine import Engine
from dsv3.engine.executor import LocalExecutor, Results
from dsv3.engine.fingerprint import fields_of
from dsv3.engine.job import StepCommand
from dsv3.engine.jobs import JOB_KINDS
from dsv3.engine.kernel_checks import apply_fallbacks, check_kernels
from dsv3.engine.limits import with_pages

_SWITCH_INTERVAL_S = 0.0005  # so that commands are sent while the engine's thread launches the same step


class LeaderExecutor(LocalExecutor):
    """Sends each command to the followers, executes its own part, and compares the results with theirs."""

    def __init__(self, components: EngineComponents, leader: Leader) -> None:
        super().__init__(components, JOB_KINDS)
        self._leader, self._ranks = leader, components.cfg.ranks_of(LEADER)
        leader.recorder.programs = self.devices.programs

    def launch_all(self) -> None:
        """Launches this process's programs for the first time, once every process has compiled its own."""
        self._leader.wait_compiled(collective_orders(self.devices.programs))
        try:
            super().launch_all()
        except Exception as error:
            raise self._leader.explain(error) from error

    def launch(self, command: StepCommand) -> list[Any]:
        """Starts a step everywhere; raises ClusterError when the instance has failed."""
        self._leader.recorder.launching = command.number
        self._leader.send(command)  # before this process's launch, so that followers do not wait for it
        try:
            launched = super().launch(command.part(self._ranks))
        except Exception as error:
            raise self._leader.explain(error) from error
        self._leader.on_launched(command.number)
        return launched

    def fetch(self, command: StepCommand, launched: list[Any]) -> Results:
        """Waits for the results of a step; raises ClusterError once those of another process differ."""
        try:
            results = super().fetch(command, launched)
        except Exception as error:
            raise self._leader.explain(error) from error
        self._leader.on_results(command.number, self.replicated_results(command, results))
        return results

    def plan_weights(self, source: Any) -> Callable[[], None]:
        """Starts to plan an update in every process. Returns a function that waits for all of them and raises
        ValueError where one cannot read the source.
        """
        if not isinstance(source, str | os.PathLike):
            raise ValueError("several processes read new weights from a directory that each of them sees")
        here = super().plan_weights(source)
        self._leader.operate(messages.Operate("plan", os.fspath(source)))
        return functools.partial(self._complete, here, ValueError)

    def replace_weights(self, on_progress: Callable[[], None]) -> None:
        """Replaces the weights of every process; raises RuntimeError where one of them fails."""
        self._leader.operate(messages.Operate("replace"))
        self._complete(functools.partial(super().replace_weights, on_progress), RuntimeError)

    def sleep(self, level: int) -> None:
        """Frees cache and weights of every process; raises RuntimeError where one of them fails."""
        self._leader.operate(messages.Operate("sleep", level=level))
        self._complete(functools.partial(super().sleep, level), RuntimeError)

    def wake(self) -> None:
        """Restores what `sleep` has freed; raises RuntimeError where one of the processes fails."""
        self._leader.operate(messages.Operate("wake"))
        self._complete(super().wake, RuntimeError)

    def _complete(self, here: Callable[[], None], kind: type[Exception]) -> None:
        """Executes this process's part of an operation, and waits for the others; raises this process's error first."""
        try:
            here()
        finally:
            error = self._leader.wait_operated()
        if error:
            raise kind(error)


class LeaderHost(Protocol):
    """The process that runs the engine; `dsv3.server.engine.process.EngineHost` is one."""

    def progress(self, text: str, done: int = 0, total: int = 0) -> None: ...
    def drain(self, reason: str) -> None: ...
    def fail(self, reason: str) -> None: ...
    def on_exit(self, callback: Callable[[str | None], None]) -> None: ...


def start_leader(
    cluster: ClusterOptions,
    model_dir: Path,
    options: EngineOptions,
    host: LeaderHost,
    load: LoadComponents = load_components,
    generation: Incarnation = FIRST,
) -> Engine:
    """Returns a warm engine over the devices of all processes; every follower is ready when it returns.

    Raises ClusterError when processes are missing, differ or fail.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    phases = Phases()
    fields = fields_of(model_dir, options, cluster)
    leader = Leader(cluster, fields, host.fail, host.drain, generation)
    host.on_exit(leader.end)
    host.progress(f"waiting for {cluster.num_processes - 1} other processes")
    given, cluster = cluster, leader.wait_for_followers()
    phases.end("connected")
    if options.check_kernels:
        host.progress("checking the kernels")
        apply_fallbacks(leader.merge_kernel_checks(check_kernels(first_gpu(cluster))))
        phases.end("checks")
    set_memory_fraction(options.gpu_memory_utilization)
    start_jax(cluster, generation)
    phases.end("jax")
    host.progress("loading the weights")
    options = adapt_to_devices(process_options(options, cluster), model_dir, given, cluster)
    components = load(model_dir, options, num_nodes=cluster.num_nodes)
    num_pages = leader.wait_loaded(loaded_fields(components))
    phases.end("weights")
    addresses = leader.transfer_addresses(components.cfg.transfer_address)
    cfg = dataclasses.replace(with_pages(components.cfg, num_pages, options), transfer_addresses=addresses)
    components = dataclasses.replace(components, cfg=cfg)
    leader.send_limits(components.cfg)
    log_components(components)
    store = open_program_store(cluster, model_dir, options, components)
    engine = Engine(components, LeaderExecutor(components, leader), store=store, work_events=leader.work_events)
    engine.warm_up(lambda done, total, what: host.progress(f"compiling {what}", done, total))
    leader.wait_ready()
    phases.end("compiling")
    host.progress(f"{cluster.num_processes} processes are ready after {phases}; {store}")
    return engine
