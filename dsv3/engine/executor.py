"""Executes commands on the devices of this process (vLLM: ModelRunner); launching never waits for a device."""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv3.engine.components import EngineComponents
from dsv3.engine.device.devices import Devices, first_launch_is_slower, launch_all
from dsv3.engine.device.layout import Layout
from dsv3.engine.device.programs import Programs, Progress, Store, measure, running
from dsv3.engine.job import JobKind, StepCommand
from dsv3.engine.weights import ServedWeights
from sharding.collectives import launch_in_order
from sharding.mesh import shardings
from sharding.processes import place

_log = logging.getLogger(__name__)
Results = list[Any]
"""Results of each job of a step, in order: as `JobKind.launch` returned them, with numpy arrays."""


def lay_out(components: EngineComponents, kinds: Sequence[JobKind]) -> tuple[Layout, Programs]:
    """Returns the shapes of everything, and the table of programs, none of them compiled.

    The parameters of `components` may be shapes with shardings.
    """
    kinds = [kind for kind in kinds if kind.applies(components)]
    layout = Layout(components)
    cfg = layout.cfg
    programs = Programs(layout.platform, layout.reserve.channels, cfg.expert_overlap, cfg.batch_invariant)
    for kind in kinds:
        programs.add(kind.programs(layout))
    return layout, programs


class LocalExecutor:
    """The devices of this process. In an instance of several, commands hold the part of this process's ranks."""

    def __init__(self, components: EngineComponents, kinds: Sequence[JobKind]) -> None:
        params = place(components.params, shardings(components.functions.param_specs, components.mesh))
        components = dataclasses.replace(components, params=params)
        layout, programs = lay_out(components, kinds)
        launch_in_order(layout.platform)
        connect = components.functions.connect
        self._check = None if connect is None else connect(layout.cfg.forward_programs)
        self._memory = components.memory
        self.devices = Devices(layout, params, programs)
        self._weights = ServedWeights(components, self.devices)
        self._kinds = {kind.name: kind for kind in kinds if kind.applies(components)}

    def compile_all(self, progress: Progress | None = None, store: Store | None = None) -> None:
        """Compiles every program that is not in `store`."""
        devices, programs, started = self.devices, self.devices.programs, time.monotonic()
        programs.store = store
        programs.compile_all(progress)
        text = "%d programs are ready after %.1f s; %s"
        _log.info(text, len(programs.keys()), time.monotonic() - started, store or "no program store")
        if self._memory is not None:
            cfg = devices.layout.cfg
            self._memory.compare(measure(cfg, programs, running(cfg, programs.keys())))
        devices.allocate()

    def launch_all(self) -> None:
        """Launches every program that serving can need, on GPUs: a CPU has nothing to load."""
        devices, layout = self.devices, self.devices.layout
        if first_launch_is_slower(layout.platform):
            launch_all(devices, running(layout.cfg, devices.programs.keys()))

    def launch(self, command: StepCommand) -> list[Any]:
        """Starts the jobs of a step in order, and the copies of their results to the host.

        Returns for each the arrays that will hold its results.
        """
        return [self._kinds[kind].launch(self.devices, each) for kind, each in command.jobs]

    def fetch(self, command: StepCommand, launched: list[Any]) -> Results:
        """Waits for the results of a step. Raises if they cannot be used (`StepFunctions.connect`)."""
        results = [_on_host(arrays) for arrays in launched]
        if self._check is not None:
            self._check()
        return results

    def plan_weights(self, source: Any) -> Callable[[], None]:
        """Returns what plans `replace_weights`, as `ServedWeights.plan`: another thread may call it, while steps run.

        No other operation may begin before it has ended.
        """
        return self._weights.plan(source)

    def replace_weights(self, on_progress: Callable[[], None]) -> None:
        """Replaces the weights as planned. No step may be in flight, as for the next two."""
        self._weights.replace(on_progress)

    def sleep(self, level: int) -> None:
        """Frees cache and weights on the devices; level 1 keeps the weights in host memory."""
        self.devices.free_cache()
        if level == 1:
            self._weights.move_to_host()
        else:
            self._weights.drop()

    def wake(self) -> None:
        """Copies the weights back that are in host memory, and allocates the cache, empty."""
        self._weights.move_to_devices()
        self.devices.allocate()

    def replicated_results(self, command: StepCommand, results: Results) -> list[np.ndarray]:
        """Returns the results that must be equal in every process."""
        jobs = zip(command.jobs, results, strict=True)
        return [array for (kind, _), each in jobs for array in self._kinds[kind].replicated(each)]


def _on_host(arrays: Any) -> Any:
    """Returns a job's results as numpy arrays; `jax.tree.map` takes twice as long for so few."""
    if not isinstance(arrays, tuple):
        return None if arrays is None else np.asarray(arrays)
    fetched = [_on_host(each) for each in arrays]
    return tuple(fetched) if type(arrays) is tuple else type(arrays)(*fetched)
