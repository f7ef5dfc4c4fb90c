"""The process that simulates instances for another one, and the channels to it: pickles over its input and output."""

import contextlib
import gc
import os
import pickle
import select
import subprocess
import sys
from collections.abc import Buffer, Callable
from typing import Any

from dsv3.config.engine import EngineConfig
from tools.simulate.apart import Channel, Order, Reply, Worker
from tools.simulate.times import InstanceTimes

_PATIENCE_S = 600.0  # a reply takes milliseconds; the first one the time of a start
_GRACE_S = 10.0
_PIPE_BYTES = 2**20  # 13,000 rows are 100 KB: whoever writes seldom waits until the other reads
_SIZE_BYTES = 8  # of a message, before it


class WorkerLost(Exception):
    """The process has ended, or has been silent for ten minutes; what it wrote to standard error says why."""


class Process:
    """`Worker`s in a process of their own; it ends with `close`, or when this process is no more.

    Whoever writes goes on reading: where both processes wrote more than a pipe holds, each would wait for the other.
    While a reply is not there, `meanwhile` is called, which does something and returns True where there is something.
    """

    def __init__(self, meanwhile: Callable[[], bool] = lambda: False) -> None:
        command = [sys.executable, "-m", "tools.simulate.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pipesize=_PIPE_BYTES)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._target, self._source = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._target, False)
        self._messages, self._replies = _Messages(), dict[int, Reply]()
        self._meanwhile, self._count = meanwhile, 0

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
            if _comes(self._source) or not self._meanwhile():
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
        try:
            self._replies.update(self._messages.add(piece))
        except pickle.UnpicklingError:
            raise self._lost() from None

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


class _Messages:
    """Puts messages together again that come in pieces."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def add(self, piece: bytes) -> list[Any]:
        """Returns the messages that are whole with this piece."""
        self._begun += piece
        found, start = [], 0
        while (end := self._end(start)) <= len(self._begun):
            found.append(pickle.loads(self._begun[start + _SIZE_BYTES : end]))
            start = end
        del self._begun[:start]
        return found

    def _end(self, start: int) -> int:
        """Returns where the message ends that starts at `start`, or where its size does at least."""
        return start + _SIZE_BYTES + int.from_bytes(self._begun[start : start + _SIZE_BYTES], "little")


def _comes(source: int) -> bool:
    """Returns whether there is something to read."""
    return bool(select.select([source], [], [], 0)[0])


def main() -> None:
    """Replies to orders until there are no more; of several to the one whose reply is due first."""
    source = os.dup(0)
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not be read as a reply
    gc.disable()
    workers: list[Worker] = []
    orders: list[tuple[int, Order]] = []
    messages = _Messages()
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        while True:
            while not orders or _comes(source):
                if not (piece := os.read(source, _PIPE_BYTES)):
                    return
                for number, what in messages.add(piece):
                    if number < len(workers):
                        orders.append((number, what))
                    else:  # a new one
                        workers.append(Worker(*what))
                        gc.freeze()
            next_one = min(orders, key=lambda each: each[1].due)
            orders.remove(next_one)
            number, order = next_one
            target.write(_framed((number, workers[number].obey(order))))
            target.flush()


if __name__ == "__main__":
    main()
