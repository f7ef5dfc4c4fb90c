"""Length-prefixed msgpack frames between processes: four bytes, little endian, then the body.

Both ends decode into declared types; nothing is unpickled.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import msgspec

# The largest frames are a conversation, whose body is at most 32 MiB (`dsv3.server.limits`), and the outputs of a step.
MAX_FRAME_BYTES = 256 * 2**20
HEAD_BYTES = 4
"""Bytes of a frame before its body."""
_READ_BYTES = 2**18


class FrameError(Exception):
    """A frame is malformed or too large."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytearray:
    """Returns the frame of a message; raises FrameError above `MAX_FRAME_BYTES`."""
    frame = bytearray(HEAD_BYTES)
    _encoder.encode_into(message, frame, HEAD_BYTES)
    length = len(frame) - HEAD_BYTES
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a message has {length} bytes; the limit of a frame is {MAX_FRAME_BYTES}")
    frame[:HEAD_BYTES] = head(length)
    return frame


def receive_frame(connection: socket.socket) -> bytes | None:
    """Returns the next frame's body from a blocking socket, or None at its end; reads nothing beyond the frame."""
    head = connection.recv(HEAD_BYTES, socket.MSG_WAITALL)
    if len(head) < HEAD_BYTES:
        return None
    length = body_length(head)
    body = connection.recv(length, socket.MSG_WAITALL)
    return body if len(body) == length else None


def head(length: int) -> bytes:
    """Returns the head of a frame whose body has `length` bytes."""
    return length.to_bytes(HEAD_BYTES, "little")


def body_length(head: bytes | memoryview, limit: int = MAX_FRAME_BYTES) -> int:
    """Returns the body's length from a frame's head; raises FrameError above `limit`."""
    length = int.from_bytes(head, "little")
    if length > limit:
        raise FrameError(f"a frame has {length} bytes; the limit is {limit}")
    return length


class Splitter:
    """Splits a stream into the bodies of frames, of at most `limit` bytes each."""

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._received, self._needed = bytearray(), 0

    def add(self, data: bytes) -> Iterator[memoryview]:
        """Yields the bodies that `data` completes and buffers the rest; raises FrameError for a body above `limit`."""
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
    """Calls `on_frame` with each frame's body, and `on_end` once at the end of the connection.

    `on_end` gets the error of a malformed frame or of `on_frame`, None if the peer has disconnected.
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
        if exc is not None:
            self._read_rest()
        self._end(None)

    def _read_rest(self) -> None:
        """Reads what the peer sent before its end: an event loop reads no more once a write has failed."""
        connection = None if self._transport is None else self._transport.get_extra_info("socket")
        if connection is None:
            return
        with contextlib.suppress(OSError):  # the peer still has its end open, or broke the connection
            while not self._ended and (received := os.read(connection.fileno(), _READ_BYTES)):
                self.data_received(received)

    def _end(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            if self._transport is not None:
                self._transport.close()
            self._on_end(error)
