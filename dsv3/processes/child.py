"""Child processes: starts, ends and reaps them, says how they ended, and how often one that dies is started anew.

Its keeper decides when it has ended and what follows:

| child | kept by | started anew |
|---|---|---|
| an engine | `server/engine/keeper.py` | as a `RestartPolicy` says, unless it was never ready |
| a follower, on another host than the leader | `engine/cluster/supervisor.py` | the same |
| an API server but the first | `server/http/fronts.py` | after a second, unless it was never ready |
| what renders templates, or makes grammars | `server/asking.py` | for the next question |
| the processes of a host's GPUs | `deploy/node.py` | never; its manager starts the instance anew |
| a check, a compiler (`run_limited`) | its caller | never |

Imports no jax.
"""

import contextlib
import dataclasses
import errno
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO

KILLED_S = 60.0
"""After SIGKILL: the system takes back the memory of a process."""
_DRIVER_S = 10.0  # a process that waits in a driver cannot be killed; it is left behind
_OUTPUT_BYTES = 1 << 20
_ALARM_S = 30.0  # behind the time limit, which the parent keeps
# The first program of a child with a time limit: its alarm ends a child whose parent was killed.
_ALARM = "import os, signal, sys; signal.alarm(int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"


class ChildProcess:
    """A command in a session of its own, so that a terminal's ^C is its parent's to handle; it has no standard input.

    The descriptors `inherited` keep their numbers in the child. Raises OSError where it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=inherited, env=environment,
            start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status; minus the signal's number where a signal ended it; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it, and all that it has started in its session, by force; `end` reaps it."""
        if self.status is None:
            self._kill_session()

    def wait(self, seconds: float) -> int | None:
        """Waits for its end; returns its status, None where it has not ended after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self, patience_s: float = 0.0, killed_s: float = KILLED_S) -> int | None:
        """Waits `patience_s` for its end, forces it, also of what it has left running, and reaps it.

        Returns its status; None where it is there `killed_s` after SIGKILL, as one in state D is.
        """
        self.wait(patience_s)
        self._kill_session()
        return self.wait(killed_s)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class LinkedChild(ChildProcess):
    """`python -m module ARGUMENT ...` with a Unix socket to it: `link` is this end, `link_to_parent` gives the other.

    Whichever of both processes ends, the other one sees the end of the link; a child ends itself then.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        inherited: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self.link, theirs = socket.socketpair()
        try:
            with theirs:
                command = [sys.executable, "-m", module, *map(str, arguments)]
                super().__init__(command, stdin=theirs.fileno(), stdout=stdout, stderr=stderr, inherited=inherited)
        except BaseException:
            self.link.close()
            raise


def link_to_parent() -> socket.socket:
    """Returns the link of this process, a `LinkedChild`; to all others its standard input is empty."""
    link = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return link


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
    """Runs `command`, which may crash or hang, to its end, or kills it and its session's processes after `seconds`.

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
    alarm = [sys.executable, "-I", "-S", "-c", _ALARM, str(math.ceil(seconds + _ALARM_S))]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        begin, timed_out = time.monotonic(), False
        child = ChildProcess([*alarm, *command], stdout=output, stderr=log, environment=environment)
        try:
            timed_out = child.wait(seconds) is None
        finally:
            taken = time.monotonic() - begin
            status = child.end(killed_s=_DRIVER_S)  # on ^C, too
        return ChildResult(status, timed_out, taken, _tail(output), _tail(log))


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _OUTPUT_BYTES))
    return file.read().decode(errors="replace")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """An engine is started anew at most `most` times within `within_s` seconds; the next death ends the server.

    A start may take `slack` times as long as the first one did, and `least_s` seconds in any case.
    """

    most: int = 5
    within_s: float = 600.0
    slack: float = 3.0
    least_s: float = 300.0


class Deaths:
    """Counts the deaths of the last `policy.within_s` seconds."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._times: deque[float] = deque()

    def note(self) -> str | None:
        """Notes one more; returns how many there were where these are too many, None where another start may follow."""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > self.policy.within_s:
            self._times.popleft()
        if len(self._times) <= self.policy.most:
            return None
        return f"has died {len(self._times)} times within {self.policy.within_s:.0f} s, and is not started anew"
