"""The executors of an instance of several processes: its leader launches what its followers launch too."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dsv3.engine.cluster.leader import Leader
from dsv3.engine.device.programs import Progress, Store
from dsv3.engine.executor import InFlight, LocalExecutor, Results
from dsv3.engine.job import Aside, Job, StepCommand


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
        self._leader.compiled()
        try:
            self.local.launch_all()
        except Exception as error:
            raise self._leader.explain(error) from error

    def launch(self, command: StepCommand) -> InFlight:
        """Starts a step everywhere; raises ClusterError when the instance has failed."""
        self._leader.send(command)  # first, so that the others do not wait for this process's launch
        try:
            in_flight = self.local.launch(command.part(self._ranks))
        except Exception as error:
            raise self._leader.explain(error) from error
        self._leader.launched(command.number)
        return in_flight

    def fetch(self, in_flight: InFlight) -> Results:
        """Waits for the results of a step; raises ClusterError once those of another process differ."""
        try:
            results = self.local.fetch(in_flight)
        except Exception as error:
            raise self._leader.explain(error) from error
        self._leader.results(in_flight.command.number, self.local.agreed(in_flight, results))
        return results


class FollowingExecutor:
    """Carries out the leader's commands, and what they ask for beside programs: `asides`, by the kind of job."""

    def __init__(self, local: LocalExecutor, asides: Mapping[str, Aside]) -> None:
        self._local, self._asides = local, asides

    def compile_all(self, store: Store) -> None:
        """Compiles this process's programs that are not in `store`."""
        self._local.compile_all(store=store)

    def launch_all(self) -> None:
        """Launches this process's programs for the first time."""
        self._local.launch_all()

    def launch(self, command: StepCommand) -> InFlight:
        """Starts a step."""
        return self._local.launch(dataclasses.replace(command, jobs=tuple(map(self._prepared, command.jobs))))

    def fetch(self, in_flight: InFlight) -> tuple[Results, list[np.ndarray]]:
        """Waits for the results of a step; returns them, and those that must be the same in every process."""
        results = self._local.fetch(in_flight)
        return results, self._local.agreed(in_flight, results)

    def take(self, in_flight: InFlight, results: Results) -> None:
        """Hands the results of a step to those who want them."""
        for job, arrays in zip(in_flight.command.jobs, results, strict=True):
            if (aside := self._asides.get(job.kind)) is not None:
                aside.take(job.command, arrays)

    def _prepared(self, job: Job) -> Job:
        aside = self._asides.get(job.kind)
        return job if aside is None else Job(job.kind, aside.prepared(job.command))
