"""Starts the engine's process, hands connections to it, and ends it."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence

SENDER_BYTES = 4
"""Bytes that come with a connection: the sender's number, little endian."""


class EngineProcess:
    """The engine's process, for the front that starts it. Raises OSError where the system has no room for it.

    It imports the modules `imports` at once, whenever its first connection comes.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self._usher, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dsv3.server.engine.process", str(theirs.fileno()), *imports],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's ^C is the first front's to handle
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def connect(self, sender: int) -> socket.socket:
        """Returns a new connection to the engine, for the front with that number."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # the process has ended: whoever reads `ours` sees that
            socket.send_fds(self._usher, [sender.to_bytes(SENDER_BYTES, "little")], [theirs.fileno()])
        return ours

    def kill(self) -> None:
        """Ends the process by force."""
        self._process.kill()

    async def reap(self, timeout_s: float) -> int:
        """Waits for the end of a process that was killed; returns the exit status, raises TimeoutError."""
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        finally:
            self._usher.close()

    async def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the end, which is forced after `timeout_s` seconds; returns the exit status."""
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return await asyncio.to_thread(self._process.wait)
        finally:
            self._usher.close()
