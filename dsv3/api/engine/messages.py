"""Messages between the engine's process and its fronts; see `dsv3.api.frames`."""

import msgspec
import numpy as np

from dsv3.options import ClusterOptions, EngineOptions
from dsv3.prepare import PreparedRequest, RequestRules
from dsv3.request import EngineOutput, StepOutputs, Tokens


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first front's first message; `factory` is "module:function" of `factory(start, host)`.

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


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """First message to a front: it numbers its requests from `first_id(sender)` on."""

    sender: int


class StartProgress(msgspec.Struct, frozen=True, tag=True):
    """What the engine does while it starts, for people; `done` of `total` if it counts."""

    text: str
    done: int = 0
    total: int = 0


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready: what a front needs to know about it."""

    rules: RequestRules
    max_num_seqs: int
    num_pages: int


Stats = dict[str, float | list[int]]
"""The engine's numbers by the names of their fields; a list is a histogram's counts."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step: `StepOutputs` with its columns joined, little endian.

    `ids` are int64, `counts` int64, `tokens` int32. `stats`, the engine's counters, come ten times per second.
    """

    ids: bytes
    counts: bytes
    tokens: bytes
    details: list[EngineOutput]
    stats: Stats | None

    @classmethod
    def from_outputs(cls, outputs: StepOutputs, stats: Stats | None) -> "Step":
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


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """Tells the first front that another one's connection was given up; `reason` is for the log."""

    sender: int
    reason: str


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Another process of the instance was asked to end: finish what runs, then stop, as after SIGTERM."""

    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on; `reason` names the exception and carries nothing of a request."""

    reason: str


ToEngine = Start | Add | Abort | Stop
FromEngine = Welcome | StartProgress | EngineInfo | Step | Rejected | Dropped | Drain | Failed

to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
