"""Messages between API servers and the engine process (`ToEngine`, `FromEngine`), sent by `dsv3.processes.frames`."""

from typing import Any, Literal

import msgspec
import numpy as np

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine.cluster.link import FIRST, Incarnation
from dsv3.engine.operations import OperatedState, Operation
from dsv3.engine.step_log import EngineSnapshot, StepRecord
from dsv3.scheduler.listing import RequestList
from dsv3.scheduler.request import EngineOutput, PreparedRequest, RequestRules, StepOutputs, Tokens

FIRST_SENDER = 0
"""Sender of API server 0, which starts the engine process; the engine process ends with it."""


Inspection = Literal["snapshot", "requests", "start_profile", "stop_profile"]


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message of API server 0; `factory` is "module:function" of `factory(start, host)`.

    With `cluster` the process leads an instance of several processes, with the incarnation `generation`.
    `factory_options` are for factories of tests.
    """

    factory: str
    model_dir: str
    engine: EngineOptions
    cluster: ClusterOptions | None = None
    factory_options: dict[str, object] = {}
    generation: Incarnation = FIRST


class Connect(msgspec.Struct, frozen=True, tag=True):
    """First message of any other API server: its number, which its requests' ids contain (`first_id`)."""

    sender: int


class Add(msgspec.Struct, frozen=True, tag=True):
    """Requests to enqueue together: all, or none if the queue has too little capacity.

    A request with `n` sequences is sent once. With `has_more` the next `Add` belongs to the same requests, which keeps
    frames small, as each is decoded in one piece.
    """

    requests: list[PreparedRequest]
    has_more: bool = False


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Abort these requests; unknown ids are ignored."""

    request_ids: list[int]


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Reset the prefix cache on the devices and in host memory."""


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Send an `EngineReply` with a snapshot, a list of requests, or the steps of a profile that this stops."""

    number: int
    what: Inspection


class OperateEngine(msgspec.Struct, frozen=True, tag=True):
    """Execute an operation, and send an `EngineReply`."""

    number: int
    operation: Operation


class AcquireLock(msgspec.Struct, frozen=True, tag=True):
    """Request the lock under which an API server sends its quarantined requests, one at a time in all of them."""


class ReleaseLock(msgspec.Struct, frozen=True, tag=True):
    """No quarantined request is left: pass the lock on."""


class StopEngine(msgspec.Struct, frozen=True, tag=True):
    """End the engine process now."""


Request = Add | Abort | Flush | Inspect | OperateEngine
"""Messages for the thread that steps the engine; every API server may send them."""
ToEngine = Start | Connect | Request | AcquireLock | ReleaseLock | StopEngine


class EngineHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent once per second by a separate thread, also during a long step: the process is not stopped."""


class LockGranted(msgspec.Struct, frozen=True, tag=True):
    """This API server holds the lock until it sends `ReleaseLock` or disconnects."""


class StartProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of the engine's start, as text for people; `done` of `total` if `total` is not 0."""

    text: str
    done: int = 0
    total: int = 0


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready; its properties.

    `transfer_address` has an address per process, separated by commas, from which other instances fetch pages, or is
    ""; `fetches_pages` is whether this engine fetches from others. `kv_events` is where its `num_ranks` ranks publish
    KV events. `model` is a description for people. `kernel_fallbacks` maps operations whose kernels failed their check
    to the backend in use. `state` is what operations have led to.
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
    state: OperatedState = OperatedState()

    def with_state(self, state: OperatedState) -> "EngineInfo":
        """Returns the properties after operations: prefix keys depend on the weights."""
        rules = msgspec.structs.replace(self.rules, weights=state.weights)
        return msgspec.structs.replace(self, rules=rules, state=state)


Stats = dict[str, float | list[float]]
"""The engine's statistics by field name; a list has a number per histogram bucket, draft position or layer."""


def number_in(stats: Stats, name: str, default: float = 0.0) -> float:
    """Returns a number of the statistics; `default` where they do not have it."""
    value = stats.get(name)
    return float(value) if isinstance(value, int | float) else default


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step: `StepOutputs` with its columns joined, little endian.

    `ids` are int64, `counts` int64, `tokens` int32; without `counts` each request has one token. `stats` come ten times
    per second, and once per second from an idle engine. The frame that announces an idle engine's next step has neither
    outputs nor `stats`.
    """

    ids: bytes
    counts: bytes
    tokens: bytes
    details: list[EngineOutput]
    stats: Stats | None

    @classmethod
    def from_outputs(cls, outputs: StepOutputs, stats: Stats | None) -> "Outputs":
        """Returns the message for the outputs of one step; it references the outputs' arrays."""
        columns = outputs.columns
        ids, tokens = _joined([rows.ids for rows in columns], "<i8"), _joined([rows.tokens for rows in columns], "<i4")
        counts: bytes = b""
        if any(len(rows.tokens) != len(rows) for rows in columns):
            counts = _joined([rows.counts for rows in columns], "<i8")
        return cls(ids, counts, tokens, outputs.details, stats)

    def columns(self) -> Tokens:
        """Returns the columns; raises ValueError if their lengths do not match."""
        ids, tokens = np.frombuffer(self.ids, "<i8"), np.frombuffer(self.tokens, "<i4")
        counts = np.frombuffer(self.counts, "<i8") if self.counts else np.ones(len(ids), np.int64)
        if len(ids) != len(counts) or int(counts.sum()) != len(tokens):
            raise ValueError(f"{len(ids)} ids, {len(counts)} counts and {len(tokens)} tokens do not match")
        return Tokens(ids, counts, tokens)


def _joined(arrays: list[np.ndarray], dtype: str) -> bytes:
    """Returns the concatenated bytes of the arrays, without a copy if there is one array."""
    arrays = [np.ascontiguousarray(array, dtype) for array in arrays if len(array)]
    if len(arrays) == 1:
        return memoryview(arrays[0]).cast("B")  # type: ignore[return-value]  # msgspec encodes it as bytes
    return b"".join(arrays)


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """All `request_ids` are rejected; `kind` is "queue_full", "invalid", "not_serving" or "internal"."""

    request_ids: list[int]
    kind: str
    message: str


class EngineReply(msgspec.Struct, frozen=True, tag=True):
    """The end of the `Inspect` or `OperateEngine` of this number; `error` says why it failed, "" if it did not.

    A `refused` operation has changed nothing. All API servers have got the new `OperatedState` before its reply.
    """

    number: int
    found: EngineSnapshot | RequestList | list[StepRecord] | None = None
    error: str = ""
    refused: bool = False


class ApiServerDropped(msgspec.Struct, frozen=True, tag=True):
    """The connection of the API server `sender` was closed; `reason` is for the log."""

    sender: int
    reason: str


class DrainServer(msgspec.Struct, frozen=True, tag=True):
    """Another process of the instance has received SIGTERM: drain, then stop."""

    reason: str


class EngineFailure(msgspec.Struct, frozen=True, tag=True):
    """The engine has failed; `reason` names the exception and contains nothing of a request."""

    reason: str


ToServer0 = StartProgress | ApiServerDropped | DrainServer
"""Messages that only API server 0 receives."""
FromEngine = (
    ToServer0
    | EngineInfo
    | Outputs
    | Rejected
    | LockGranted
    | EngineHeartbeat
    | OperatedState
    | EngineReply
    | EngineFailure
)

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
