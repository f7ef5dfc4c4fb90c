"""Messages between two instances about pages, over TLS with the secret that they share (`dsv3.processes`).

    fetching                         serving
    PeerHello(version, ...)     ->
                                <-   HelloAnswer(refusal): empty, or which field differs
    FetchPages(keys, patience_s)->
                                <-   per key, in order: PAGE_FOLLOWS, header (128 bytes), payload
                                <-   END_OF_PAGES, after the last one or before the first that is missing
    Locate(keys, patience_s)    ->
                                <-   Located(addresses): of as many leading keys as are there
    PollRooms(bootstrap_rooms)  ->
                                <-   BootstrapStages(stages, addresses)

All but pages is in frames (`dsv3.processes.frames`). A connection carries any number of requests, one after the other.
Every wait has a bound on both sides. A client that can read memory by NIXL (`nixl.py`) sets `PeerHello.reads`, gets the
server's agent with the answer, and locates pages instead of fetching them.
"""

import json
import ssl
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from dsv3.kv_cache.page_keys import Header, Key, read_header
from dsv3.kv_cache.tiers.host_pool import PayloadAddress
from dsv3.processes import frames

Stage = Literal["unknown", "queued", "begun", "gone"]
"""No request has arrived; it waits; its prefill has begun, so that its pages come; it has ended before that."""

OnPage = Callable[[Key, np.ndarray], object]
"""Called with each page that has arrived and verified; its array is reused after the call."""

MAX_BOOTSTRAP_ROOM = 2**63 - 1
VERSION = 3
PAGE_FOLLOWS, END_OF_PAGES = b"\x01", b"\x00"
MAX_KEYS = 4096
MAX_BOOTSTRAP_ROOMS = 4096
MAX_PATIENCE_S = 30.0
HANDSHAKE_S = 5.0
STALL_S = 10.0
"""Timeout in seconds without a byte from the other side."""
IDLE_S = 60.0
"""Seconds without a request after which a connection ends."""

_MAX_FRAME_BYTES = 2**20


class PeerHello(msgspec.Struct, frozen=True):
    """The client's handshake: the protocol's version and all that pages depend on, as JSON (`dsv3.config.identity`)."""

    version: int
    identity: str
    payload_bytes: int = msgspec.field(name="value_bytes")  # the field's name in all versions
    reads: bool = False
    """Whether it can read memory by NIXL."""


class HelloAnswer(msgspec.Struct, frozen=True):
    """Empty, or the reason of a refusal; for a client that reads also the metadata of the server's agent, if any."""

    refusal: str = ""
    agent: bytes = b""


class FetchPages(msgspec.Struct, frozen=True, tag=True):
    """Requests pages in this order; waits `patience_s` seconds for each that is missing."""

    keys: list[bytes]
    patience_s: float


class Locate(msgspec.Struct, frozen=True, tag=True):
    """Requests the addresses of pages; waits `patience_s` seconds for the first if it is missing."""

    keys: list[bytes]
    patience_s: float


class Located(msgspec.Struct, frozen=True):
    """Addresses of the leading pages in the memory of the server; empty where the first is missing."""

    addresses: list[PayloadAddress]


class PollRooms(msgspec.Struct, frozen=True, tag=True):
    """Bootstrap rooms that decode requests wait for; the answer comes at once."""

    bootstrap_rooms: list[int]


class BootstrapStages(msgspec.Struct, frozen=True):
    """The stage of each polled room, and the addresses of all processes of the instance."""

    stages: list[Stage]
    addresses: list[str]


PeerRequest = FetchPages | Locate | PollRooms
_requests = msgspec.msgpack.Decoder(PeerRequest)


class PeerError(OSError):
    """The other instance does not answer as it should; the message says how."""


def send(connection: ssl.SSLSocket, message: msgspec.Struct) -> None:
    connection.sendall(frames.encode(message))


def receive[M: msgspec.Struct](connection: ssl.SSLSocket, kind: type[M]) -> M | None:
    """Returns the next message; None when the connection has ended before it. Raises PeerError for anything else."""
    return _receive(connection, msgspec.msgpack.Decoder(kind), kind.__name__)


def receive_request(connection: ssl.SSLSocket) -> PeerRequest | None:
    """Returns the next request; None when the connection has ended before it. Raises PeerError for anything else."""
    return _receive(connection, _requests, "request")


def _receive[M](connection: ssl.SSLSocket, decoder: "msgspec.msgpack.Decoder[M]", name: str) -> M | None:
    raw = connection.recv(1)
    if not raw:
        return None
    try:
        length = frames.body_length(raw + read(connection, frames.HEAD_BYTES - 1), _MAX_FRAME_BYTES)
        return decoder.decode(read(connection, length))
    except (frames.FrameError, msgspec.DecodeError) as error:
        raise PeerError(f"the message is not a {name} ({error})") from None


def read(connection: ssl.SSLSocket, count: int) -> bytes:
    """Returns exactly `count` bytes."""
    data = bytearray(count)
    read_into(connection, memoryview(data))
    return bytes(data)


def read_into(connection: ssl.SSLSocket, view: memoryview) -> None:
    """Fills `view`; raises PeerError where the connection ends first."""
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if not count:
            raise PeerError(f"the connection ended {len(view) - done} bytes too early")
        done += count


def read_payload_header(raw: bytes) -> Header:
    """Parses the header of a page; raises PeerError where it is damaged."""
    header = read_header(raw)
    if header is None:
        raise PeerError("a page's header is damaged")
    return header


def difference(mine: PeerHello, other: PeerHello) -> str:
    """Returns the names and values in which two instances differ and must not; empty where they match."""
    if mine.version != other.version:
        return f"protocol version ({mine.version} here, {other.version} there)"
    if mine.identity != other.identity:
        here, there = _fields(mine.identity), _fields(other.identity)
        names = [name for name in here | there if here.get(name) != there.get(name)]
        return ", ".join(f"{name} ({here.get(name, 'none')} here, {there.get(name, 'none')} there)" for name in names)
    if mine.payload_bytes != other.payload_bytes:
        return f"bytes of a page ({mine.payload_bytes} here, {other.payload_bytes} there)"
    return ""


def _fields(identity: str) -> dict[str, object]:
    try:
        fields = json.loads(identity)
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) else {"identity": identity}
