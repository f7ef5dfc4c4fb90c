"""Messages between leader and followers: `ToFollower`, `ToLeader`. Arrays are encoded as dtype, shape and bytes."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.config.options import LEADER
from dsv3.engine.cluster.link import FIRST, Incarnation
from dsv3.engine.job import Command, JobKind, StepCommand
from dsv3.engine.kernel_checks import KernelFallback

# numpy makes the name of a dtype anew each time, which was two fifths of what a step's messages to 143 followers take.
_NAMES = {np.dtype(name): name for name in ("bool", "int8", "uint8", "int16", "int32", "uint32", "int64", "float32")}
_MAX_DIMENSIONS = 8


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a follower: the fields of its fingerprint, and its host, which is the same for a whole node.

    `last` is the generation of its predecessor, as far as its supervisor knows.
    """

    fields: dict[str, str]
    host: str
    pid: int
    last: Incarnation | None = None


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Every process has connected and agrees: start jax and load the weights, as this generation.

    If some are missing, `num_processes` processes start, and the receiver is `process_id` among them.
    """

    generation: Incarnation = FIRST
    num_processes: int | None = None
    process_id: int = LEADER


class Wait(msgspec.Struct, frozen=True, tag=True):
    """The others have started without this process: it waits for the end of their group, and joins the next one.

    Its next message is `Stop`.
    """


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Fallbacks of the kernels that fail on a follower's devices; from the leader: those that every process applies.

    It follows `Begin` with `--check_kernels`, before a process has its devices.
    """

    replaced: dict[str, KernelFallback]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A follower has its weights.

    `fields` are those of the fingerprint that depend on the weights, `num_pages` the cache pages that each of its ranks
    can hold. Other instances fetch pages at `transfer_address`, if there is one.
    """

    fields: dict[str, str]
    num_pages: int
    transfer_address: str = ""


class Build(msgspec.Struct, frozen=True, tag=True):
    """Limits that suit every process: build the executor and compile."""

    config: EngineConfig


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """A follower has compiled; from the leader: every process has, launch all programs for the first time.

    Processes meet in collectives of these launches, whose timeouts are shorter than a compilation. A follower sends the
    order of collectives of each program (`dsv3.engine.cluster.digest.order_digests`).
    """

    orders: dict[str, bytes] = {}


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A follower has launched each of its programs and can execute commands.

    From the leader: every process can, and less silence is allowed from now on.
    """


class Operate(msgspec.Struct, frozen=True, tag=True):
    """Plan an update of the weights from the directory `source` while steps run; or replace them, sleep, or wake."""

    work: Literal["plan", "replace", "sleep", "wake"]
    source: str = ""
    level: int = 1


class Operated(msgspec.Struct, frozen=True, tag=True):
    """A follower has executed `Operate`; `error` says why it could not, "" if it could."""

    error: str = ""


class Step(msgspec.Struct, frozen=True, tag=True):
    """The next step: its jobs, each a kind and the kind's command as the kind's own type encodes it."""

    number: int
    jobs: list[tuple[str, msgspec.Raw]]


class Digest(msgspec.Struct, frozen=True, tag=True):
    """The digest of a follower's results up to step `number`."""

    number: int
    digest: bytes


class WorkEvent(msgspec.Struct, frozen=True, tag=True):
    """An event from the follower's half of a kind of work to its planner, as the two encode it (`dsv3.engine.job`)."""

    kind: str
    body: bytes


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent while there is nothing else to send; a follower's has its record (`dsv3.engine.cluster.flight_recorder`).

    `launched` is the last step that the main thread has launched, `launching` the last that it has begun to launch,
    `fetched` the last whose results have arrived. `program` is the last program launched.
    """

    launched: int = -1
    launching: int = -1
    fetched: int = -1
    program: str = ""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """A follower was asked to end: finish running requests, then stop the instance."""

    reason: str


class FollowerFailed(msgspec.Struct, frozen=True, tag=True):
    """A follower cannot continue. `kind` is safe to show to clients, `text` is for the log."""

    kind: str
    text: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now: with status 0 where there is no `failure`, else with status 1 and `failure` in the log."""

    failure: str | None


ToFollower = Begin | Wait | Checked | Build | Compiled | Ready | Step | Operate | Heartbeat | Stop
ToLeader = (
    Hello | Checked | Loaded | Compiled | Ready | Digest | Operated | WorkEvent | Heartbeat | Drain | FollowerFailed
)


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _NAMES.get(value.dtype) or value.dtype.name, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} is no part of a command")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind} is no part of a command")
    return _array(value)


def _array(value: Any) -> np.ndarray:
    """Returns the array, read-only, of a triple (dtype, shape, bytes). Raises ValueError for an invalid one."""
    name, shape, data = value
    dtype = np.dtype(name) if isinstance(name, str) else None
    if dtype not in _NAMES:
        raise ValueError(f"{name!r} is not a dtype of commands")
    if len(shape) > _MAX_DIMENSIONS or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError("not a shape")
    if not isinstance(data, bytes) or len(data) != dtype.itemsize * math.prod(shape):
        raise ValueError("shape and bytes of an array differ")
    return np.frombuffer(data, dtype).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
"""Returns the body of a frame with a message."""


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)


decode_for_follower: Callable[[bytes], ToFollower] = _decoder(ToFollower).decode
"""Returns a message of the leader. Raises msgspec.MsgspecError for anything else."""

decode_for_leader: Callable[[bytes], ToLeader] = _decoder(ToLeader).decode
"""Returns a message of a follower. Raises msgspec.MsgspecError for anything else."""


def step_of(command: StepCommand) -> Step:
    """Returns the message for a command."""
    return Step(command.number, [(kind, msgspec.Raw(encode(job))) for kind, job in command.jobs])


def command_of(step: Step, kinds: Sequence[JobKind]) -> StepCommand:
    """Returns the command of a message; raises msgspec.MsgspecError for jobs that are not of these kinds."""
    types = {kind.name: kind.command for kind in kinds}
    jobs: list[tuple[str, Command]] = []
    for name, raw in step.jobs:
        if name not in types:
            raise msgspec.ValidationError(f"{name!r} is not a kind of job here")
        jobs.append((name, _decoder(types[name]).decode(raw)))
    return StepCommand(step.number, tuple(jobs))
