"""What each process of an instance does, logged when a watchdog expires: so the log names the process that hangs.

Each process writes a few numbers per step and per program, whatever its number of tokens. Followers send them with
their heartbeats.
"""

import time
from collections.abc import Mapping, Sequence

from dsv3.engine.cluster.messages import Heartbeat
from dsv3.engine.device.programs import Programs


class FlightRecorder:
    """The last steps of this process: `launching` has begun, `launched` is launched, `fetched` has its results here.

    The threads that launch and that read results write it, any thread may read it. `programs` name the last program
    that was launched.
    """

    def __init__(self) -> None:
        self.launching = self.launched = self.fetched = -1
        self.programs: Programs | None = None

    def heartbeat(self) -> Heartbeat:
        """Returns the message with the record."""
        last = None if self.programs is None else self.programs.last
        return Heartbeat(self.launched, self.launching, self.fetched, "" if last is None else str(last))


class FlightRecords:
    """The last record of each process, and when it last changed, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[Heartbeat, float]] = {}

    def update(self, process_id: int, record: Heartbeat) -> None:
        """Stores a process's record."""
        known = self._records.get(process_id)
        if known is None or known[0] != record:
            self._records[process_id] = record, time.monotonic()

    def lines(self, processes: Sequence[int]) -> list[str]:
        """Returns a line for each of the processes, and one that names those that are behind the others."""
        now = time.monotonic()
        records = {each: self._records.get(each, (Heartbeat(), now)) for each in processes}
        lines = [
            f"process {each}: {_describe(record)}, unchanged for {now - since:.1f} s"
            for each, (record, since) in records.items()
        ]
        return [*lines, _verdict({each: record for each, (record, _) in records.items()})]


def _describe(record: Heartbeat) -> str:
    program = f" (last program: {record.program})" if record.program else ""
    if record.launching > record.launched:
        return f"launches step {record.launching}{program}"
    if record.launched > record.fetched:
        return f"waits for the results of step {record.fetched + 1}, has launched step {record.launched}{program}"
    return f"waits for a step after step {record.launched}{program}" if record.launched >= 0 else "has launched no step"


def _verdict(records: Mapping[int, Heartbeat]) -> str:
    """Names the processes that have got the least far: those that have not launched what others wait for come first."""
    for name, doing in (("launched", "launching"), ("fetched", "results")):
        reached = {each: getattr(record, name) for each, record in records.items()}
        if len(set(reached.values())) > 1:
            behind = [each for each, number in reached.items() if number == min(reached.values())]
            return f"behind the others in {doing}: {', '.join(f'process {each}' for each in behind)}"
    return "no process is behind the others: all are in the same programs, so a device or the network hangs"
