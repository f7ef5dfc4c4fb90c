"""Messages between the engine's process and API servers (fronts); see `dsv3.processes.frames`.

First come those to the engine (`ToEngine`), then those from it (`FromEngine`).
"""

from typing import Any, Literal

import msgspec
import numpy as np

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine.cluster.link import FIRST, Incarnation
from dsv3.engine.step_log import EngineSnapshot, StepNote
from dsv3.scheduler.request import EngineOutput, PreparedRequest, RequestRules, StepOutputs, Tokens

FIRST_SENDER = 0
"""Sender of the front that starts engines' processes, and with which they end."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first front's first message; `factory` is "module:function" of `factory(start, host)`.

    With `cluster` the process leads an instance of several, as `generation`. `factory_options` are for factories of
    tests.
    """

    factory: str
    model_dir: str
    engine: EngineOptions
    cluster: ClusterOptions | None = None
    factory_options: dict[str, object] = {}
    generation: Incarnation = FIRST


class Connect(msgspec.Struct, frozen=True, tag=True):
    """The first message of any other front: its number, which is in its requests' ids (`first_id`)."""

    sender: int


class Add(msgspec.Struct, frozen=True, tag=True):
    """Requests to take together: all, or none if the queue has no room for them.

    Each is sent once, however many sequences it stands for. With `has_more`, the next `Add` belongs to them too: a
    frame is decoded in one piece.
    """

    requests: list[PreparedRequest]
    has_more: bool = False


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Requests nobody waits for any more; unknown ids are ignored."""

    request_ids: list[int]


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache, on the devices and in the host's memory."""


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Show what the engine does: answered by `Seen`; or begin a profile, or end it: answered by `Profile`."""

    what: Literal["look", "start_profile", "stop_profile"]


class AcquireLock(msgspec.Struct, frozen=True, tag=True):
    """Some of this front's requests may be those that engines die of: let it send them when no other front does."""


class ReleaseLock(msgspec.Struct, frozen=True, tag=True):
    """All of these were sent, and nothing has happened."""


class StopEngine(msgspec.Struct, frozen=True, tag=True):
    """End the engine process now."""


Request = Add | Abort | Flush | Inspect
"""What any front may ask for."""
ToEngine = Start | Connect | Request | AcquireLock | ReleaseLock | StopEngine


class EngineHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """The process runs, whatever its step does: comes once per second, from a thread of its own."""


class LockGranted(msgspec.Struct, frozen=True, tag=True):
    """No other front sends requests that engines may die of, until this one ends its turn."""


class StartProgress(msgspec.Struct, frozen=True, tag=True):
    """What the engine does while it starts, for people; `done` of `total` if it counts."""

    text: str
    done: int = 0
    total: int = 0


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready: what a front needs to know about it.

    Other instances fetch pages at `transfer_address`, if anywhere, one address per process with commas between; it
    `fetches_pages` from them. `kv_events` says where routers hear what its `num_ranks` ranks hold, if anywhere. `model`
    is a line for people. `kernel_fallbacks` are operations whose kernels have failed their check, each with the backend
    that it takes instead.
    """

    rules: RequestRules
    max_num_seqs: int
    num_pages: int
    transfer_address: str = ""
    fetches_pages: bool = False
    model: str = ""
    num_ranks: int = 1
    kv_events: dict[str, Any] | None = None
    kernel_fallbacks: dict[str, str] = {}


Stats = dict[str, float | list[float]]
"""The engine's numbers by the names of their fields; a list has a number per bucket of a histogram, place or layer."""


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step: `StepOutputs` with its columns joined, little endian.

    `ids` are int64, `counts` int64, `tokens` int32; without `counts` each request has one token. `stats`, the engine's
    counters, come ten times per second, and once per second from an idle engine, which shows that it lives. The frame
    before the first step after that has none and no outputs.
    """

    ids: bytes
    counts: bytes
    tokens: bytes
    details: list[EngineOutput]
    stats: Stats | None

    @classmethod
    def from_outputs(cls, outputs: StepOutputs, stats: Stats | None) -> "Outputs":
        """Returns the message for the outputs of one step; it looks into the outputs' arrays."""
        columns = outputs.columns
        ids, tokens = _joined([rows.ids for rows in columns], "<i8"), _joined([rows.tokens for rows in columns], "<i4")
        counts: bytes = b""
        if any(len(rows.tokens) != len(rows) for rows in columns):
            counts = _joined([rows.counts for rows in columns], "<i8")
        return cls(ids, counts, tokens, outputs.details, stats)

    def columns(self) -> Tokens:
        """Returns the requests that simply go on; ValueError for columns that do not fit together."""
        ids, tokens = np.frombuffer(self.ids, "<i8"), np.frombuffer(self.tokens, "<i4")
        counts = np.frombuffer(self.counts, "<i8") if self.counts else np.ones(len(ids), np.int64)
        if len(ids) != len(counts) or int(counts.sum()) != len(tokens):
            raise ValueError("the columns of a step do not fit together")
        return Tokens(ids, counts, tokens)


def _joined(arrays: list[np.ndarray], dtype: str) -> bytes:
    """Returns the arrays' bytes one after the other, without copying those of a single array."""
    arrays = [np.ascontiguousarray(array, dtype) for array in arrays if len(array)]
    if len(arrays) == 1:
        return memoryview(arrays[0]).cast("B")  # type: ignore[return-value]  # msgspec encodes it as bytes
    return b"".join(arrays)


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """None of `request_ids` was taken; `kind` "queue_full", "invalid" or "internal"."""

    request_ids: list[int]
    kind: str
    message: str


class Seen(msgspec.Struct, frozen=True, tag=True):
    """What the engine does, for the front that has asked."""

    snapshot: EngineSnapshot


class Profile(msgspec.Struct, frozen=True, tag=True):
    """The steps of the profile that the front has ended; none where it has begun one."""

    steps: list[StepNote]


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """Tells the first front that another one's connection was given up; `reason` is for the log."""

    sender: int
    reason: str


class DrainServer(msgspec.Struct, frozen=True, tag=True):
    """Another process of the instance was asked to end: finish what runs, then stop, as after SIGTERM."""

    reason: str


class EngineFailure(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on; `reason` names the exception and carries nothing of a request."""

    reason: str


ToFirst = StartProgress | Dropped | DrainServer
"""What the engine tells the first front alone."""
FromEngine = ToFirst | EngineInfo | Outputs | Rejected | LockGranted | EngineHeartbeat | Seen | Profile | EngineFailure

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
