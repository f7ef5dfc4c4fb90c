"""What two instances say to each other about pages, over TLS that the secret they share makes (`dsv3.processes`).

    fetching                         serving
    PeerHello(version, ...)     ->
                                <-   HelloAnswer(refusal): empty, or which field differs
    Want(keys, patience_s)      ->
                                <-   per key, in order: HAVE, header (128 bytes), payload
                                <-   NO_MORE, after the last one or before the first that does not come
    Locate(keys, patience_s)    ->
                                <-   Located(places): of the first keys, as many as are there
    Ask(meetings)               ->
                                <-   BootstrapStages(stages, addresses)

All but pages is in frames (`dsv3.processes.frames`). A connection carries any number of questions,
one after the other. Every wait has a bound on both sides. Who can read memory by NIXL (`nixl.py`) says so
in PeerHello, hears in HelloAnswer how, and asks where pages lie in place of wanting them.
"""

import json
import ssl
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from dsv3.kv_cache.page_keys import Header, Key, read_header
from dsv3.kv_cache.tiers.host_pool import Place
from dsv3.processes import frames

Stage = Literal["unknown", "queued", "begun", "gone"]
"""No request has come; it waits; its pages are there or come step by step; it has left without having begun."""

Land = Callable[[Key, np.ndarray], object]
"""Takes a page that has come and verified; its array is written again after the call."""

MAX_BOOTSTRAP_ROOM = 2**63 - 1
VERSION = 2
HAVE, NO_MORE = b"\x01", b"\x00"
MAX_KEYS = 4096
MAX_BOOTSTRAP_ROOMS = 4096
MAX_PATIENCE_S = 30.0
HANDSHAKE_S = 5.0
STALL_S = 10.0
"""Seconds without a byte after which the other side is given up."""
IDLE_S = 60.0
"""Seconds without a Want after which a connection ends."""

_MAX_FRAME_BYTES = 2**20


class PeerHello(msgspec.Struct, frozen=True):
    """Who asks: the protocol's version and all that pages depend on, as JSON (`dsv3.config.identity`)."""

    version: int
    identity: str
    value_bytes: int
    reads: bool = False
    """Whether it can read memory by NIXL."""


class HelloAnswer(msgspec.Struct, frozen=True):
    """Empty, or why the other side gets nothing; to who reads also the metadata of an agent, if there is one."""

    refusal: str = ""
    agent: bytes = b""


class Want(msgspec.Struct, frozen=True, tag=True):
    """Pages to send, in this order; `patience_s` is how long to wait for each that is not there yet."""

    keys: list[bytes]
    patience_s: float


class Locate(msgspec.Struct, frozen=True, tag=True):
    """Asks where pages lie; `patience_s` is how long to wait for the first if it is not there yet."""

    keys: list[bytes]
    patience_s: float


class Located(msgspec.Struct, frozen=True):
    """Where the first of the pages lie in the memory of the other side; none where the first has not come."""

    places: list[Place]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """BootstrapRooms whose requests somebody waits for; the answer comes at once."""

    bootstrap_rooms: list[int]


class BootstrapStages(msgspec.Struct, frozen=True):
    """How far each of the meetings is, and the addresses of all processes of the instance."""

    stages: list[Stage]
    addresses: list[str]


Question = Want | Locate | Ask
_questions = msgspec.msgpack.Decoder(Question)


class PeerError(OSError):
    """The other instance does not answer as it should; the message says how."""


def send(connection: ssl.SSLSocket, message: msgspec.Struct) -> None:
    """Sends a message."""
    connection.sendall(frames.encode(message))


def receive[M: msgspec.Struct](connection: ssl.SSLSocket, kind: type[M]) -> M | None:
    """Returns the next message; None when the connection has ended before it. Raises PeerError for anything else."""
    return _receive(connection, msgspec.msgpack.Decoder(kind), kind.__name__)


def receive_question(connection: ssl.SSLSocket) -> Question | None:
    """Returns what is asked next; None when the connection has ended before it. Raises PeerError for anything else."""
    return _receive(connection, _questions, "question")


def _receive[M](connection: ssl.SSLSocket, decoder: "msgspec.msgpack.Decoder[M]", name: str) -> M | None:
    raw = connection.recv(1)
    if not raw:
        return None
    try:
        length = frames.body_length(raw + read(connection, frames.HEAD_BYTES - 1), _MAX_FRAME_BYTES)
        return decoder.decode(read(connection, length))
    except (frames.FrameError, msgspec.DecodeError) as error:
        raise PeerError(f"no {name} came ({error})") from None


def read(connection: ssl.SSLSocket, count: int) -> bytes:
    """Returns exactly `count` bytes."""
    data = bytearray(count)
    read_into(connection, memoryview(data))
    return bytes(data)


def read_into(connection: ssl.SSLSocket, view: memoryview) -> None:
    """Fills `view`; raises PeerError where the connection ends before."""
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if not count:
            raise PeerError(f"the connection ended {len(view) - done} bytes too early")
        done += count


def read_value_header(raw: bytes) -> Header:
    """Returns the header in front of a payload; raises PeerError for what is none."""
    header = read_header(raw)
    if header is None:
        raise PeerError("a page without a whole header")
    return header


def difference(mine: PeerHello, other: PeerHello) -> str:
    """Returns what two instances must have in common and have not, by name; empty if there is nothing."""
    if mine.version != other.version:
        return f"protocol version ({mine.version} here, {other.version} there)"
    if mine.identity != other.identity:
        here, there = _fields(mine.identity), _fields(other.identity)
        names = [name for name in here | there if here.get(name) != there.get(name)]
        return ", ".join(f"{name} ({here.get(name, 'none')} here, {there.get(name, 'none')} there)" for name in names)
    return "" if mine.value_bytes == other.value_bytes else "the bytes of a page"


def _fields(identity: str) -> dict[str, object]:
    try:
        fields = json.loads(identity)
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) else {"identity": identity}
