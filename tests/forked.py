"""Processes of tests that start at once: forks of a process that has imported the module whose `main` they run.

Run as a script with the name of a module it is that process. Imports of a server take half a second of processor time.
"""

import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[1]


class Forked:
    """A running process, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, module: str, argument: str, stderr: TextIO, open_files: int = 0) -> None:
        """Runs `main` of the module with one argument. `open_files` is its hard limit of open files, if not 0."""
        self.args = [module, argument]
        read, write = os.pipe()
        reports, report = os.pipe()
        self.stdout, self._reports = os.fdopen(read, "r"), os.fdopen(reports, "r")
        given = {"argv": self.args, "environment": {**os.environ, "JAX_PLATFORMS": "cpu"}, "open_files": open_files}
        body = json.dumps(given).encode()
        _, link = _parent(module)
        socket.send_fds(link, [len(body).to_bytes(4)], [write, stderr.fileno(), report])
        link.sendall(body)
        os.close(write)
        os.close(report)
        self.pid = int(self._reports.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status, negative after a signal, or None while the process runs."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status; raises TimeoutExpired after `timeout` seconds."""
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], timeout)[0]:
            with self._reports:
                self.returncode = int(self._reports.readline())
        return self.returncode


@functools.cache
def _parent(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts the process that imports the module. It ends when the socket does, with the process of the tests."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.forked", module, str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return process, ours


def _run(module: Any, given: dict[str, Any], stdout: int, stderr: int) -> int:
    """Becomes the process that was asked for."""
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(given["environment"])
    if given["open_files"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (given["open_files"] // 2, given["open_files"]))
    sys.argv = given["argv"]
    return module.main()


def main() -> int:
    """Forks, for each request, a process that reports pid and exit status of the one that it forks for it."""
    module, link = importlib.import_module(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for those that report
    gc.freeze()  # collections in a fork would copy what it shares
    while True:
        size, files, *_ = socket.recv_fds(link, 4, 3)
        if not size:
            return 0
        given = json.loads(link.recv(int.from_bytes(size), socket.MSG_WAITALL))
        stdout, stderr, report = files
        if not os.fork():
            link.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if not (pid := os.fork()):
                os.close(report)
                return _run(module, given, stdout, stderr)
            os.close(stdout)
            os.close(stderr)
            os.write(report, b"%d\n" % pid)
            os.write(report, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        for file in files:
            os.close(file)


if __name__ == "__main__":
    sys.exit(main())
