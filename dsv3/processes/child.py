"""Starts, kills and reaps child processes; limits how often a supervisor restarts one. Imports no jax.

| child | supervisor | restarted |
|---|---|---|
| engine | `server/engine/supervisor.py` | by `RestartPolicy`, if it was ready once |
| follower, on another host than the leader | `engine/cluster/supervisor.py` | the same |
| API server, except API server 0 | `server/http/api_server_processes.py` | after 1 s, if it was ready once |
| template renderer, grammar compiler | `server/worker_process.py` | for the next request |
| the processes of a host's GPUs | `deploy/node.py` | never: its manager restarts the instance |
| check, compiler (`run_limited`) | its caller | never |
"""

import contextlib
import dataclasses
import errno
import gc
import importlib
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

REAP_TIMEOUT_S = 60.0
"""How long to wait for the end of a process after SIGKILL, while the kernel frees its memory."""
_DRIVER_S = 10.0  # a process that waits in a driver cannot be killed and is abandoned
_OUTPUT_BYTES = 1 << 20
_ALARM_S = 30.0  # after the time limit, which the parent enforces
# Runs before a child with a time limit: its alarm ends a child whose parent was killed.
_ALARM = "import os, signal, sys; signal.alarm(int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"


class ChildProcess:
    """A command in a new session, so that a terminal's ^C reaches only its parent; without standard input.

    The descriptors `inherited` keep their numbers in the child. Raises OSError if it cannot be started.
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
        """The exit status; minus the signal's number if a signal ended it; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Sends a signal, if the process runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL to its session; `end` reaps it."""
        if self.status is None:
            self._kill_session()

    def wait(self, seconds: float) -> int | None:
        """Waits up to `seconds` for its end; returns its status, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self, grace_s: float = 0.0, reap_s: float = REAP_TIMEOUT_S) -> int | None:
        """Waits `grace_s` for its end, kills its session, and reaps it.

        Returns its status, or None if it still exists `reap_s` after SIGKILL (state D).
        """
        self.wait(grace_s)
        self._kill_session()
        return self.wait(reap_s)

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class LinkedChild(ChildProcess):
    """`python -m module ARGUMENT ...` with a Unix socket: `link` is the parent's end, `link_to_parent` the child's.

    When either process ends, the other reads the end of the stream; the child then exits.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        inherited: Sequence[int] = (),
        stdout: int | None = None,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.link, theirs = socket.socketpair()
        try:
            with theirs:
                command = [sys.executable, "-m", module, *map(str, arguments)]
                super().__init__(
                    command, stdin=theirs.fileno(), stdout=stdout, stderr=stderr, inherited=inherited,
                    environment=environment,
                )  # fmt: skip
        except BaseException:
            self.link.close()
            raise


def link_to_parent() -> socket.socket:
    """Returns this `LinkedChild`'s end of the link, and replaces standard input by the null device."""
    link = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return link


def import_uncollected(*modules: str) -> None:
    """Imports modules without the garbage collector, which from then on passes over all that exists.

    Imports leave a million objects and no garbage, and each full collection would look at all of them.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


@dataclasses.dataclass(frozen=True)
class ChildResult:
    """How a child process ended."""

    status: int | None
    """The exit status; minus the signal's number if a signal ended it; None if it survived SIGKILL."""
    timed_out: bool
    """Whether it was killed at its time limit."""
    seconds: float
    output: str
    """The last MiB of its standard output."""
    log: str
    """The last MiB of its standard error."""

    @property
    def cause(self) -> str:
        """How the process ended, for a log line."""
        if self.timed_out:
            return f"killed after {self.seconds:.0f} s" + (", but still runs" if self.status is None else "")
        assert self.status is not None
        return f"exit status {self.status}" if self.status >= 0 else f"ended by {_signal_name(-self.status)}"


def run_limited(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> ChildResult:
    """Runs `command`, which may crash or hang, to its end, or kills its session after `seconds`.

    Output goes to files, so a grandchild that keeps a descriptor open delays nothing. The child has no terminal and no
    standard input.

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
            status = child.end(reap_s=_DRIVER_S)  # also on ^C
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
    """An engine is restarted at most `max_restarts` times within `window_s` seconds; the next death ends the server.

    A restart times out after `start_factor` times the duration of the first start, but not before `min_start_s`.
    """

    max_restarts: int = 5
    window_s: float = 600.0
    start_factor: float = 3.0
    min_start_s: float = 300.0


class DeathCounter:
    """Counts deaths in the last `policy.window_s` seconds."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self._times: deque[float] = deque()

    def record(self) -> str | None:
        """Counts a death; returns None if a restart is allowed, or else the text of the reason."""
        now = time.monotonic()
        self._times.append(now)
        while now - self._times[0] > self.policy.window_s:
            self._times.popleft()
        if len(self._times) <= self.policy.max_restarts:
            return None
        return f"has died {len(self._times)} times within {self.policy.window_s:.0f} s and is not restarted"
