"""Messages between the HTTP process and its helpers: a length in four bytes, then msgpack; never pickle.

Both ends decode into declared types, so a malformed frame is an error and nothing else.
"""

import asyncio
import socket
from typing import BinaryIO

import msgspec
import numpy as np

from dsv3.options import ClusterOptions, EngineOptions
from dsv3.prepare import PreparedRequest, RequestRules
from dsv3.request import EngineOutput, StepOutputs, Tokens

# A frame holds at most the prompts of one HTTP request, whose body is bounded by 32 MiB.
MAX_FRAME_BYTES = 256 * 2**20
_LENGTH_BYTES = 4


class FrameError(Exception):
    """The peer sent something that is no frame."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to the engine process; `factory` is "module:function" of `factory(start, host)`.

    With `cluster` the process leads an instance of several. `factory_options` are for factories of tests.
    """

    factory: str
    model_dir: str
    engine: EngineOptions
    cluster: ClusterOptions | None = None
    factory_options: dict[str, object] = {}


class Add(msgspec.Struct, frozen=True, tag=True):
    """Requests to take together: all, or none if the queue has no room for them."""

    requests: list[PreparedRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Requests nobody waits for any more; unknown ids are ignored."""

    request_ids: list[int]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the engine process now."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """What the engine does while it starts, for people; `done` of `total` if it counts."""

    text: str
    done: int = 0
    total: int = 0


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready: what the HTTP process needs to know about it."""

    rules: RequestRules
    max_num_seqs: int
    num_pages: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step: `StepOutputs` with its columns joined, little endian.

    `ids` are int64, `counts` int64, `tokens` int32. `stats`, the engine's counters, come ten times per second.
    """

    ids: bytes
    counts: bytes
    tokens: bytes
    details: list[EngineOutput]
    stats: dict[str, float] | None

    @classmethod
    def from_outputs(cls, outputs: StepOutputs, stats: dict[str, float] | None) -> "Step":
        """Returns the message for the outputs of one step."""
        ids, counts, tokens = (
            b"".join(np.ascontiguousarray(getattr(rows, name), dtype).tobytes() for rows in outputs.columns)
            for name, dtype in (("ids", "<i8"), ("counts", "<i8"), ("tokens", "<i4"))
        )
        return cls(ids, counts, tokens, outputs.details, stats)

    def columns(self) -> Tokens:
        """Returns the requests that simply go on; ValueError for columns that do not fit together."""
        rows = Tokens(
            *(np.frombuffer(raw, t) for raw, t in ((self.ids, "<i8"), (self.counts, "<i8"), (self.tokens, "<i4")))
        )
        if len(rows.ids) != len(rows.counts) or int(rows.counts.sum()) != len(rows.tokens):
            raise ValueError("the columns of a step do not fit together")
        return rows


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """None of `request_ids` was taken; `kind` "queue_full", "invalid" or "internal"."""

    request_ids: list[int]
    kind: str
    message: str


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Another process of the instance was asked to end: finish what runs, then stop, as after SIGTERM."""

    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on; `reason` names the exception and carries nothing of a request."""

    reason: str


class RenderSetup(msgspec.Struct, frozen=True, tag=True):
    """First message to a template worker."""

    source: str
    special_tokens: dict[str, str]


class Render(msgspec.Struct, frozen=True, tag=True):
    """Arguments of `ChatTemplate.render`."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: dict[str, object]


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """A template worker's answer; `error` instead of a prompt if the template refuses."""

    prompt: str = ""
    error: str | None = None


ToEngine = Start | Add | Abort | Stop
FromEngine = Progress | EngineInfo | Step | Rejected | Drain | Failed
ToRenderer = RenderSetup | Render

_encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
to_renderer = msgspec.msgpack.Decoder(ToRenderer)
from_renderer = msgspec.msgpack.Decoder(Rendered)


def encode(message: msgspec.Struct) -> bytes:
    """The frame of a message."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes, at most {MAX_FRAME_BYTES} fit a frame")
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body from a blocking stream; None when the peer has gone."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    body = stream.read(_body_length(head))
    return body if len(body) == int.from_bytes(head, "little") else None


async def read_frame_async(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's body; None when the peer has gone."""
    try:
        head = await reader.readexactly(_LENGTH_BYTES)
        return await reader.readexactly(_body_length(head))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def stream_of(connection: socket.socket) -> BinaryIO:
    """A buffered blocking stream that reads from `connection`."""
    return connection.makefile("rb", buffering=2**16)  # type: ignore[return-value]


def _body_length(head: bytes) -> int:
    length = int.from_bytes(head, "little")
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES} are taken")
    return length
