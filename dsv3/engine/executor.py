"""Carries out commands on the devices of this process; launching never waits for a device."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices, first_launch_is_slower, launch_all
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Programs, Progress, Store, measure, running
from dsv3.engine.job import JobKind, StepCommand
from sharding.mesh import shardings
from sharding.processes import place
from sharding.wire.collectives import launch_in_order

Results = list[Any]
"""What each job of a step gave, in their order: numpy arrays in place of what its worker has returned."""


class Executor(Protocol):
    """What an engine launches its steps with."""

    def compile_all(self, progress: Progress | None = None, store: Store | None = None) -> None:
        """Compiles every program that is not in `store`."""

    def launch_all(self) -> None:
        """Launches every program where the first time is slower than those after it."""

    def launch(self, command: StepCommand) -> Any:
        """Starts a step and the copies of its results to the host; returns what `fetch` needs beside the command."""

    def fetch(self, command: StepCommand, launched: Any) -> Results:
        """Waits for the results of a step."""


def lay_out(parts: EngineComponents, kinds: Sequence[JobKind]) -> tuple[Layout, Programs]:
    """Returns the shapes of everything, and the table of programs, none of them compiled.

    The parameters of `parts` may be shapes with their shardings.
    """
    kinds = [kind for kind in kinds if kind.applies(parts)]
    watches = {kind.name: watch for kind in kinds if (watch := kind.watch(parts)) is not None}
    layout = Layout(parts, watches)
    programs = Programs(layout.platform, layout.reserve.channels, layout.cfg.expert_overlap)
    for kind in kinds:
        programs.add(kind.programs(layout))
    return layout, programs


class LocalExecutor:
    """The devices of this process. Where there are other processes, commands hold the part of this one's ranks."""

    def __init__(self, parts: EngineComponents, kinds: Sequence[JobKind]) -> None:
        params = place(parts.params, shardings(parts.functions.param_specs, parts.mesh))
        parts = dataclasses.replace(parts, params=params)
        layout, programs = lay_out(parts, kinds)
        launch_in_order(layout.platform)
        self._memory = parts.memory
        self.devices = Devices(layout, params, programs)
        self._workers = {kind.name: kind.worker(self.devices) for kind in kinds if kind.applies(parts)}
        self._agreed = {kind.name: kind.agreed for kind in kinds}

    def compile_all(self, progress: Progress | None = None, store: Store | None = None) -> None:
        """Compiles every program that is not in `store`."""
        self.devices.programs.store = store
        devices, programs = self.devices, self.devices.programs
        programs.compile_all(progress)
        if self._memory is not None:
            cfg = devices.layout.cfg
            self._memory.compare(measure(cfg, programs, running(cfg, programs.keys())))
        devices.allocate()

    def launch_all(self) -> None:
        """Launches every program that serving can need where the first time is slower."""
        devices, layout = self.devices, self.devices.layout
        if first_launch_is_slower(layout.platform):
            launch_all(devices, running(layout.cfg, devices.programs.keys()))

    def launch(self, command: StepCommand) -> list[Any]:
        """Starts the jobs of a step, one after the other; returns the arrays of each that will hold its results."""
        return [self._workers[kind].launch(each) for kind, each in command.jobs]

    def fetch(self, command: StepCommand, launched: list[Any]) -> Results:
        """Waits for the results of a step."""
        return [_on_host(arrays) for arrays in launched]

    def agreed(self, command: StepCommand, results: Results) -> list[np.ndarray]:
        """Returns the results that must be the same in every process."""
        jobs = zip(command.jobs, results, strict=True)
        return [array for (kind, _), each in jobs for array in self._agreed[kind](each)]


def _on_host(arrays: Any) -> Any:
    """Returns what a worker has returned with numpy arrays; `jax.tree.map` takes twice as long for so few."""
    if not isinstance(arrays, tuple):
        return None if arrays is None else np.asarray(arrays)
    parts = [_on_host(each) for each in arrays]
    return tuple(parts) if type(arrays) is tuple else type(arrays)(*parts)
