"""Starts the engine's process, and hands connections to it."""

import contextlib
import socket
from collections.abc import Sequence

from dsv3.processes.child import LinkedChild

SENDER_BYTES = 4
"""Bytes that come with a connection: the sender's number, little endian."""


class EngineProcess(LinkedChild):
    """The engine's process, for the front that starts it. Raises OSError where the system has no room for it.

    It imports the modules `imports` at once, whenever its first connection comes.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        super().__init__("dsv3.server.engine.process", *imports)

    def connect(self, sender: int) -> socket.socket:
        """Returns a new connection to the engine, for the front with that number."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # the process has ended: whoever reads `ours` sees that
            socket.send_fds(self.link, [sender.to_bytes(SENDER_BYTES, "little")], [theirs.fileno()])
        return ours
