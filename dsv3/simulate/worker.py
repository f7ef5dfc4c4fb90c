"""The process that simulates instances for another one, and the channels to it: pickles over its input and output."""

import contextlib
import gc
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Buffer
from typing import Any, BinaryIO

from dsv3.engine.config import EngineConfig
from dsv3.simulate.apart import Channel, Order, Reply, Worker
from dsv3.simulate.times import InstanceTimes

_PATIENCE_S = 600.0  # a reply takes milliseconds; the first one the time of a start
_GRACE_S = 10.0
_PIPE_BYTES = 2**20  # 13,000 rows are 100 KB: whoever writes seldom waits until the other reads
_SIZE_BYTES = 8  # of a message, before it


class WorkerLost(Exception):
    """The process has ended, or has been silent for ten minutes; what it wrote to standard error says why."""


class Process:
    """`Worker`s in a process of their own; it ends with `close`, or when this process is no more.

    Whoever writes goes on reading: where both processes wrote more than a pipe holds, each would wait for the other.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "dsv3.simulate.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pipesize=_PIPE_BYTES)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._target, self._source = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._target, False)
        self._read, self._replies = bytearray(), dict[int, Reply]()
        self._count = 0

    def open(self, times: InstanceTimes, cfg: EngineConfig) -> Channel:
        """Begins an instance; raises WorkerLost."""
        number, self._count = self._count, self._count + 1
        self._write((number, (times, cfg)))
        return _Line(self, number)

    def send(self, number: int, order: Order) -> None:
        """Gives an order to an instance; raises WorkerLost."""
        self._write((number, order))

    def receive(self, number: int) -> Reply:
        """Waits for an instance's reply to the last order; raises WorkerLost."""
        while number not in self._replies:
            self._wait([self._source], [])
            self._read_some()
        return self._replies.pop(number)

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
        left = memoryview(_framed(what))
        while left:
            try:
                left = left[os.write(self._target, left) :]
            except BlockingIOError:
                if self._source in self._wait([self._source], [self._target]):
                    self._read_some()
            except BrokenPipeError:
                raise self._lost() from None

    def _wait(self, sources: list[int], targets: list[int]) -> list[int]:
        """Waits until one of them is ready; returns the sources that are."""
        readable, writable, _ = select.select(sources, targets, [], _PATIENCE_S)
        if not readable and not writable:
            raise WorkerLost(f"the process that simulates instances has said nothing for {_PATIENCE_S:g} s")
        return readable

    def _read_some(self) -> None:
        """Takes in replies, and the beginning of the next one."""
        piece = os.read(self._source, _PIPE_BYTES)
        if not piece:
            raise self._lost()
        self._read += piece
        while (end := _end(self._read)) <= len(self._read):
            try:
                number, reply = pickle.loads(self._read[_SIZE_BYTES:end])
            except pickle.UnpicklingError:
                raise self._lost() from None
            del self._read[:end]
            self._replies[number] = reply

    def _lost(self) -> WorkerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        return WorkerLost(
            f"the process that simulates instances has ended with status {self._process.returncode}; its last words "
            "are on standard error. Leave out --two_processes to have all in one"
        )


class _Line:
    """A channel to one of a process's instances."""

    def __init__(self, process: Process, number: int) -> None:
        self._process, self._number = process, number

    def send(self, order: Order) -> None:
        """Gives an order; raises WorkerLost."""
        self._process.send(self._number, order)

    def receive(self) -> Reply:
        """Waits for the reply to the last order; raises WorkerLost."""
        return self._process.receive(self._number)


def _framed(what: Any) -> Buffer:
    data = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_SIZE_BYTES, "little") + data


def _end(begun: bytearray) -> int:
    """Returns how many bytes the message has that has begun to come, with its size; at least that of a size."""
    return _SIZE_BYTES + int.from_bytes(begun[:_SIZE_BYTES], "little")


def _next(source: BinaryIO) -> Any:
    """Returns the next message; raises EOFError where there is none."""
    size = int.from_bytes(source.read(_SIZE_BYTES), "little")
    return pickle.loads(source.read(size))


def main() -> None:
    """Replies to orders until there are no more."""
    source = os.fdopen(os.dup(0), "rb")
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not be read as a reply
    gc.disable()
    workers: list[Worker] = []
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            number, what = _next(source)
            if number < len(workers):
                target.write(_framed((number, workers[number].obey(what))))
                target.flush()
            else:  # a new one
                workers.append(Worker(*what))
                gc.freeze()


if __name__ == "__main__":
    main()
