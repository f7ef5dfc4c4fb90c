"""Ends a load test at an interrupt: the first keeps what was measured, the second ends the process at once."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """Takes SIGINT and SIGTERM from now on, for the rest of the process.

    The first cancels what `run` runs, the second ends the process at once, with 128 and the signal's number as status.
    A shell has SIGINT ignored in the background jobs of a script; a job that is sent one all the same ends here too.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._cancel: Callable[[], object] | None = None
        self._asked = False
        for number in SIGNALS:
            signal.signal(number, self._take)

    async def run[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns, which may catch asyncio.CancelledError and return what it has.

        An interrupt that comes after the last `await` of `work` changes nothing. asyncio's own handler would cancel
        the finished task, and the result would be lost.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self._asked:
            self._cancel()
        try:
            return await work
        finally:
            self._cancel = None

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._asked:
            _end(number, f"{self._program}: ended by {name}")
        self._asked = True
        _write(f"{self._program}: {name}: reporting what was measured; once more ends at once")
        if self._cancel is not None:
            self._cancel()


def _end(number: int, text: str) -> NoReturn:
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)  # the progress bar has hidden it
    _write(text)
    os._exit(128 + number)


def _write(text: str) -> None:
    """Writes a line, past the buffers that the interrupted code may be writing to."""
    os.write(2, f"{text}\n".encode())
