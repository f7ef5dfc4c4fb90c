"""Runs a command as a child process with a time limit, for work that may crash or hang.

Run as a script, this file is the child's first program: it sets an alarm, which ends a child whose parent was killed
and cannot do it any more, and becomes the command.
"""

import contextlib
import dataclasses
import errno
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

_KILLED_S = 10.0  # a process that waits in a driver cannot be killed; it is left behind
_OUTPUT_BYTES = 1 << 20
_ALARM_S = 30.0  # behind the time limit, which the parent keeps


@dataclasses.dataclass(frozen=True)
class ChildResult:
    """How a child process ended."""

    status: int | None
    """The exit status; minus the signal's number where a signal ended it; None where even SIGKILL did not."""
    timed_out: bool
    """Whether it was killed at its time limit."""
    seconds: float
    output: str
    """The last MiB of its standard output."""
    log: str
    """The last MiB of its standard error."""

    @property
    def cause(self) -> str:
        """Says in a few words how the process ended."""
        if self.timed_out:
            return f"killed after {self.seconds:.0f} s" + (", and does not end" if self.status is None else "")
        assert self.status is not None
        return f"exit status {self.status}" if self.status >= 0 else f"ended by {_signal_name(-self.status)}"


def run_limited(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> ChildResult:
    """Runs `command` to its end, or kills it and all processes of its session after `seconds`.

    Output goes to files, so a grandchild that keeps a descriptor open delays nothing. The child sees no terminal and
    no standard input.

    Args:
      command: the program and its arguments.
      seconds: the time limit.
      environment: the child's environment variables; None for those of this process.

    Raises:
      OSError: the program cannot be started.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    alarm = [sys.executable, "-I", "-S", __file__, str(math.ceil(seconds + _ALARM_S))]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        begin = time.monotonic()
        process = subprocess.Popen(
            [*alarm, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            taken = time.monotonic() - begin
            _kill_session(process)  # on ^C, too; and what the child has left running
        return ChildResult(process.returncode, timed_out, taken, _tail(output), _tail(log))


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _OUTPUT_BYTES))
    return file.read().decode(errors="replace")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    signal.alarm(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
