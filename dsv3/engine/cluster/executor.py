"""The executor of an instance of several processes: its leader launches what its followers launch too."""

from dsv3.engine.cluster.leader import Leader
from dsv3.engine.device.executor import InFlight, LocalExecutor, Results
from dsv3.engine.device.programs import Progress, Store
from dsv3.engine.job import StepCommand


class LeadingExecutor:
    """Sends each command to the followers, carries out its own part, and has the results compared with theirs.

    `ranks` are those of this process's devices.
    """

    def __init__(self, local: LocalExecutor, leader: Leader, ranks: range) -> None:
        self.local, self._leader, self._ranks = local, leader, ranks

    def compile_all(self, progress: Progress | None = None, store: Store | None = None) -> None:
        """Compiles this process's programs; each process compiles its own."""
        self.local.compile_all(progress, store)

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
