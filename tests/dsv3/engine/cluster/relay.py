"""A link between hosts that can be cut: both ends live, and no data passes."""

import contextlib
import socket
import threading

from tests.dsv3.engine.cluster import local


class Relay:
    """Forwards from `address`, and the port behind it, to `target` and the port behind that.

    While it is cut nothing passes, not even the end of a connection.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        own = local.free_port()
        self.address = f"127.0.0.1:{own}"
        self._whole = threading.Event()
        self._whole.set()
        self._listeners = [socket.create_server(("127.0.0.1", own + i)) for i in range(2)]
        for i, listener in enumerate(self._listeners):
            threading.Thread(target=self._accept, args=(listener, (host, int(port) + i)), daemon=True).start()

    def cut(self) -> None:
        """Holds all data back from now on."""
        self._whole.clear()

    def mend(self) -> None:
        """Forwards what was held back, and all later data."""
        self._whole.set()

    def close(self) -> None:
        """Accepts no more connections."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = listener.accept()
                try:
                    theirs = socket.create_connection(target)
                except OSError:
                    ours.close()
                    continue
                for ends in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                self._whole.wait()
                sink.sendall(data)
        self._whole.wait()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
