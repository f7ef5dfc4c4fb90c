"""How many connections a front has, which of them may be worked for, and which one goes when another one comes."""

import resource
from typing import Protocol

_MOST = 65_536
_SPARE = 32
_OWN_DESCRIPTORS = 64
_DESCRIPTORS_PER_FRONT = 4
_MAX_HELD_BYTES = 64 * 2**20


class Client(Protocol):
    """A connection, as far as its admission is concerned."""

    def abort(self) -> None:
        """Closes the connection now."""


class Admission:
    """The connections of a front.

    A connection whose request was let in is *admitted* until its response is complete; all others are *strangers*:
    they are idle, have sent no head, or are refused. At most `max_admitted` are admitted. There may be a few more
    connections than that, so that one is always left for `GET /health`; where there are so many, the one that has been
    a stranger for longest is closed for a new one. So a client without a key cannot keep others out.
    """

    def __init__(self, max_admitted: int):
        self._max_admitted = max_admitted
        self._admitted: set[Client] = set()
        self._strangers: dict[Client, int] = {}  # oldest first, with the bytes of a head that is not complete
        self._num_held = 0

    def __len__(self) -> int:
        return len(self._admitted) + len(self._strangers)

    def open(self, client: Client) -> None:
        """Takes a new connection; where there are too many, the oldest stranger goes."""
        if len(self) >= self._max_admitted + _SPARE:
            self._evict(next(iter(self._strangers)))
        self._strangers[client] = 0

    def close(self, client: Client) -> None:
        """Forgets a connection that is closed."""
        self._admitted.discard(client)
        self._num_held -= self._strangers.pop(client, 0)

    def admit(self, client: Client) -> bool:
        """Returns whether a connection's request may be worked on, and lets it in."""
        if client in self._strangers and len(self._admitted) < self._max_admitted:
            self.close(client)
            self._admitted.add(client)
        return client in self._admitted

    def release(self, client: Client) -> None:
        """Notes that a connection's response is complete."""
        if client in self._admitted:
            self._admitted.remove(client)
            self._strangers[client] = 0

    def hold(self, client: Client, num_bytes: int) -> None:
        """Notes the size of a connection's incomplete head; the oldest ones go where all are too much together."""
        if client in self._strangers:
            self._num_held += num_bytes - self._strangers[client]
            self._strangers[client] = num_bytes
        while self._num_held > _MAX_HELD_BYTES:
            self._evict(next(client for client, held in self._strangers.items() if held))

    def _evict(self, client: Client) -> None:
        self.close(client)
        client.abort()


def max_admitted(max_connections: int | None, api_server_count: int) -> int:
    """Returns how many connections of a front are admitted at most; ValueError where open files are too few."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST
    if limit != resource.RLIM_INFINITY:
        most = min(_MOST, limit - _SPARE - _OWN_DESCRIPTORS - _DESCRIPTORS_PER_FRONT * api_server_count)
    if most < 1 or (max_connections or 0) > most:
        raise ValueError(
            f"max_connections: {max_connections or 1} is more than {max(0, most)}, for which there are open files "
            f"enough; the limit is {limit} (ulimit -n)"
        )
    return max_connections or most
