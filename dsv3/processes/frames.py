"""Frames between processes: a length in four bytes, little endian, then msgpack; never pickle.

Both ends decode into declared types, so a malformed frame is an error and nothing else.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

# A frame holds at most one conversation, whose body is bounded by 17 MiB, or the outputs of one step.
MAX_FRAME_BYTES = 256 * 2**20
HEAD_BYTES = 4
"""Bytes of a frame before its body."""


class FrameError(Exception):
    """The peer sent something that is no frame."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytearray:
    """Returns the frame of a message; raises FrameError for one that is too large."""
    frame = bytearray(HEAD_BYTES)
    _encoder.encode_into(message, frame, HEAD_BYTES)
    length = len(frame) - HEAD_BYTES
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {length} bytes, at most {MAX_FRAME_BYTES} fit a frame")
    frame[:HEAD_BYTES] = head(length)
    return frame


def read_frame(stream: BinaryIO) -> bytes | None:
    """Returns the next frame's body from a blocking stream; None when the peer has gone."""
    head = stream.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return None
    body = stream.read(body_length(head))
    return body if len(body) == int.from_bytes(head, "little") else None


def receive_frame(connection: socket.socket) -> bytes | None:
    """Returns the next frame's body from a blocking socket, and leaves what follows; None when the peer has gone."""
    head = connection.recv(HEAD_BYTES, socket.MSG_WAITALL)
    if len(head) < HEAD_BYTES:
        return None
    length = body_length(head)
    body = connection.recv(length, socket.MSG_WAITALL)
    return body if len(body) == length else None


def stream_of(connection: socket.socket) -> BinaryIO:
    """Returns a buffered blocking stream that reads from `connection`."""
    return connection.makefile("rb", buffering=2**16)  # type: ignore[return-value]


def head(length: int) -> bytes:
    """Returns what comes before a body of so many bytes."""
    return length.to_bytes(HEAD_BYTES, "little")


def body_length(head: bytes | memoryview, limit: int = MAX_FRAME_BYTES) -> int:
    """Returns the length of the body behind a head. Raises FrameError for one above `limit`."""
    length = int.from_bytes(head, "little")
    if length > limit:
        raise FrameError(f"a frame of {length} bytes, at most {limit} are taken")
    return length


class Splitter:
    """Cuts what comes from a stream into the bodies of frames, of at most `limit` bytes each."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._received, self._needed = bytearray(), 0

    def add(self, data: bytes) -> Iterator[memoryview]:
        """Yields the bodies that are whole with `data`, and keeps the rest. Raises FrameError for what is no frame."""
        if self._received:
            self._received += data
            if len(self._received) < self._needed:
                return
            data, self._received = bytes(self._received), bytearray()
        received, start = memoryview(data), 0
        self._needed = HEAD_BYTES
        while len(received) - start >= HEAD_BYTES:
            body = start + HEAD_BYTES
            after = body + body_length(received[start:body], self.limit)
            if after > len(received):
                self._needed = after - start
                break
            yield received[body:after]
            start = after
        self._received += received[start:]


class FrameProtocol(asyncio.Protocol):
    """Calls `on_frame` with each frame's body as it comes, and `on_end` once when no more will come.

    `on_end` gets what was wrong with the last bytes, or raised by `on_frame`; None when the peer has gone.
    """

    def __init__(self, on_frame: Callable[[memoryview], None], on_end: Callable[[Exception | None], None]):
        self._on_frame, self._on_end = on_frame, on_end
        self._splitter = Splitter()
        self._ended = False
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            for body in self._splitter.add(data):
                self._on_frame(body)
        except Exception as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            if self._transport is not None:
                self._transport.close()
            self._on_end(error)
