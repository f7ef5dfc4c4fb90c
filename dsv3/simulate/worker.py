"""The process that simulates an instance for another one, and the channel to it: pickles over its input and output."""

import contextlib
import gc
import os
import pickle
import select
import subprocess
import sys
from typing import Any

from dsv3.engine.config import EngineConfig
from dsv3.simulate.apart import Order, Reply, Worker
from dsv3.simulate.times import InstanceTimes

_PATIENCE_S = 600.0  # a reply takes milliseconds; the first one the time of a start
_GRACE_S = 10.0
_PIPE_BYTES = 2**20  # nobody waits until the other has read: 13,000 rows are 100 KB, ten prompts with their keys 200 KB


class WorkerLost(Exception):
    """The process has ended, or has been silent for ten minutes; what it wrote to standard error says why."""


class Process:
    """A `Worker` in a process of its own, as a channel; it ends with `close`, or when this process is no more."""

    def __init__(self, times: InstanceTimes, cfg: EngineConfig) -> None:
        command = [sys.executable, "-m", "dsv3.simulate.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pipesize=_PIPE_BYTES)
        self._write((times, cfg))

    def send(self, order: Order) -> None:
        """Gives an order; raises WorkerLost."""
        self._write(order)

    def receive(self) -> Reply:
        """Waits for the reply to the last order; raises WorkerLost."""
        source = self._process.stdout
        assert source is not None
        if not select.select([source], [], [], _PATIENCE_S)[0]:
            raise WorkerLost(f"the process that simulates an instance has said nothing for {_PATIENCE_S:g} s")
        try:
            reply: Reply = pickle.load(source)
        except (EOFError, pickle.UnpicklingError):
            raise self._lost() from None
        return reply

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _write(self, what: Any) -> None:
        target = self._process.stdin
        assert target is not None
        try:
            pickle.dump(what, target, pickle.HIGHEST_PROTOCOL)
            target.flush()
        except BrokenPipeError:
            raise self._lost() from None

    def _lost(self) -> WorkerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        return WorkerLost(
            f"the process that simulates an instance has ended with status {self._process.returncode}; its last words "
            "are on standard error. Leave out --two_processes to have all in one"
        )


def main() -> None:
    """Replies to orders until there are no more."""
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not be read as a reply
    gc.disable()
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        worker = Worker(*pickle.load(source))
        gc.freeze()
        while True:
            pickle.dump(worker.obey(pickle.load(source)), target, pickle.HIGHEST_PROTOCOL)
            target.flush()


if __name__ == "__main__":
    main()
