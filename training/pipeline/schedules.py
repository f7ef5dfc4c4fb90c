"""Pipeline schedules (1F1B, ZB1P, DualPipe, DualPipeV) as data: the order of each rank's operations. Imports no jax.

    1F1B       a rank alternates one forward and one backward (PipeDream-Flush, arXiv:2006.09503)
    ZB1P       the same with the backward split; weight gradients fill the bubble (ZB-H1, arXiv:2401.10241)
    DualPipe   micro-batches enter at both ends; every rank holds two stages (DeepSeek-V3 report, 3.2.1)
    DualPipeV  DualPipe cut in half: half the ranks, and the pipe turns back at the last one

DualPipe and DualPipeV follow the published `step` of deepseek-ai/DualPipe operation by operation.
"""

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable


class PassKind(enum.Enum):
    """One part of an operation; the value is its name in text."""

    FORWARD = "F"
    BACKWARD = "B"
    """Input gradient and weight gradient together."""
    INPUT = "Bi"
    """The input gradient alone; enqueues the weight gradient on the rank."""
    WEIGHT = "W"
    """The oldest weight gradient of the queue."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One kind of work on one micro-batch, which is numbered within its direction."""

    kind: PassKind
    direction: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.direction}.{self.micro_batch}"


Operation = tuple[Pass, ...]
"""One pass, or an overlapped pair: a forward, and the backward of another micro-batch."""


Order = tuple[Operation, ...]
"""All operations of one rank in one step, first to last."""


def text(operation: Operation) -> str:
    """Returns an operation as text: `F0.3`, `Bi1.0`, `W1.0`, `F0.3&B1.1`."""
    return "&".join(map(str, operation))


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """The operations of all ranks in one step of `micro_batches`.

    With one of `directions`, stage = rank; with two, each rank holds a stage per direction. With `turns` both are legs
    of one pipe and every micro-batch passes both; without it, half of the micro-batches take each direction, and two
    ranks hold each stage.
    """

    algorithm: str
    ranks: int
    micro_batches: int
    orders: tuple[Order, ...]
    directions: int = 1
    turns: bool = False

    @property
    def stages(self) -> int:
        """Pipeline stages that the model is cut into."""
        return 2 * self.ranks if self.turns else self.ranks

    @property
    def holders(self) -> int:
        """Ranks that hold each stage, and so its parameters."""
        return 2 if self.directions == 2 and not self.turns else 1

    def stage(self, rank: int, direction: int) -> int:
        """Returns the stage that `rank` computes for the micro-batches of `direction`."""
        return rank if direction == 0 else self.stages - 1 - rank

    def rank(self, stage: int, batch: int) -> int:
        """Returns the rank that computes `stage` for micro-batch `batch` of the step."""
        if self.turns:
            return min(stage, self.stages - 1 - stage)
        return stage if batch < self.micro_batches // self.holders else self.ranks - 1 - stage

    def batch(self, part: Pass) -> int:
        """Returns the number of the micro-batch of `part`, over both directions of the step."""
        second = part.direction == 1 and not self.turns
        return part.micro_batch + (self.micro_batches // 2 if second else 0)


def build(algorithm: str, ranks: int, micro_batches: int) -> PipelineSchedule:
    """Returns the schedule of `algorithm`, a name of `ALGORITHMS`; `micro_batches` counts those of both directions.

    Raises ValueError for an unknown algorithm, and for numbers of ranks or micro-batches that it does not support.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown pipeline schedule {algorithm!r}; known are {', '.join(ALGORITHMS)}")
    if ranks < 1:
        raise ValueError(f"a pipeline needs at least one rank, got {ranks}")
    return ALGORITHMS[algorithm](ranks, micro_batches)


class _OrderWriter:
    """Writes one rank's order: numbers micro-batches per direction and keeps the weight gradients `waiting`.

    `phase` is the direction that the methods call 0; for the ranks of DualPipe's second half both are exchanged.
    """

    def __init__(self, phase: int = 0):
        self.operations: list[Operation] = []
        self._phase = phase
        self._forwards, self._backwards = [0, 0], [0, 0]
        self.waiting: collections.deque[Pass] = collections.deque()

    def forward(self, direction: int = 0) -> None:
        self.operations.append((self._forward(direction),))

    def backward(self, direction: int = 0, *, split: bool = False) -> None:
        part = self._backward(direction, PassKind.INPUT if split else PassKind.BACKWARD)
        if split:
            self.waiting.append(dataclasses.replace(part, kind=PassKind.WEIGHT))
        self.operations.append((part,))

    def pair(self, forward: int, backward: int) -> None:
        self.operations.append((self._forward(forward), self._backward(backward, PassKind.BACKWARD)))

    def weight(self) -> None:
        self.operations.append((self.waiting.popleft(),))

    def _forward(self, direction: int) -> Pass:
        return self._next(self._forwards, direction ^ self._phase, PassKind.FORWARD)

    def _backward(self, direction: int, kind: PassKind) -> Pass:
        return self._next(self._backwards, direction ^ self._phase, kind)

    @staticmethod
    def _next(counts: list[int], direction: int, kind: PassKind) -> Pass:
        counts[direction] += 1
        return Pass(kind, direction, counts[direction] - 1)


def _alternating(algorithm: str, ranks: int, micro_batches: int, *, split: bool) -> PipelineSchedule:
    """Returns 1F1B, or with `split` backwards ZB1P.

    ZB1P queues up to r weight gradients on rank r, so that every rank keeps as many activations as the first of 1F1B.
    """
    if micro_batches < ranks:
        raise ValueError(f"{algorithm} over {ranks} ranks needs at least {ranks} micro-batches, got {micro_batches}")
    orders = []
    for rank in range(ranks):
        writer, ahead = _OrderWriter(), ranks - 1 - rank
        for i in range(micro_batches + ahead):
            if i < micro_batches:
                writer.forward()
            if i >= ahead:
                writer.backward(split=split)
            if len(writer.waiting) > rank:
                writer.weight()
        while writer.waiting:
            writer.weight()
        orders.append(tuple(writer.operations))
    return PipelineSchedule(algorithm, ranks, micro_batches, tuple(orders))


def _dualpipe(ranks: int, micro_batches: int) -> PipelineSchedule:
    if ranks % 2:
        raise ValueError(f"DualPipe needs an even number of ranks, got {ranks}")
    if micro_batches % 2 or micro_batches < 2 * ranks:
        raise ValueError(
            f"DualPipe over {ranks} ranks needs an even number of micro-batches, at least {2 * ranks}; "
            f"got {micro_batches}"
        )
    half = ranks // 2
    outer = [min(rank, ranks - 1 - rank) for rank in range(ranks)]
    orders = [_bidirectional(h, half, micro_batches // 2, int(rank >= half)) for rank, h in enumerate(outer)]
    return PipelineSchedule("DualPipe", ranks, micro_batches, tuple(orders), directions=2)


def _dualpipe_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    if micro_batches < 2 * ranks:
        raise ValueError(f"DualPipeV over {ranks} ranks needs at least {2 * ranks} micro-batches, got {micro_batches}")
    orders = [_bidirectional(rank, ranks, micro_batches, 0) for rank in range(ranks)]
    return PipelineSchedule("DualPipeV", ranks, micro_batches, tuple(orders), directions=2, turns=True)


def _bidirectional(outer: int, half: int, micro_batches: int, phase: int) -> Order:
    """Returns the eight steps of DualPipe for the rank that is `outer` places from its end of the pipe.

    Args:
      outer: 0 for a rank at an end, `half - 1` for one in the middle.
      half: half of the pipeline's stages.
      micro_batches: those of one direction.
      phase: the direction that enters at this rank's end.
    """
    writer, inner = _OrderWriter(phase), half - outer - 1
    for _ in range(2 * inner):
        writer.forward(0)
    for _ in range(outer + 1):
        writer.forward(0)
        writer.forward(1)
    for _ in range(inner):
        writer.backward(1, split=True)
        writer.weight()
        writer.forward(1)
    for i in range(micro_batches - 2 * half + outer + 1):
        if i == 0 and inner == 0:  # the middle ranks do not overlap the first pair
            writer.forward(0)
            writer.backward(1)
        else:
            writer.pair(0, 1)
        writer.pair(1, 0)
    for _ in range(inner):
        writer.backward(1)
        writer.pair(1, 0)
    for i in range(2 * (outer + 1)):
        writer.backward(1 - i % 2, split=i > outer)  # the second half defers its weight gradients
    for _ in range(inner):
        writer.weight()
        writer.backward(0, split=True)
    for _ in range(outer + 1):
        writer.weight()
    return tuple(writer.operations)


ALGORITHMS: dict[str, Callable[[int, int], PipelineSchedule]] = {
    "1F1B": functools.partial(_alternating, "1F1B", split=False),
    "ZB1P": functools.partial(_alternating, "ZB1P", split=True),
    "DualPipe": _dualpipe,
    "DualPipeV": _dualpipe_v,
}


@dataclasses.dataclass(frozen=True)
class RankSize:
    """The devices of a rank: `data` teams, in each of which `experts` devices split the experts."""

    data: int = 1
    experts: int = 1

    @property
    def devices(self) -> int:
        """Devices of a rank, `Z`."""
        return self.data * self.experts


def read_mesh(text: str) -> tuple[int, RankSize]:
    """Returns the number of pipeline ranks and the devices of each from text such as `stage=4,data=2,expert=2`.

    Raises ValueError for other axes and invalid sizes.
    """
    sizes = {"stage": 1, "data": 1, "expert": 1}
    for entry in text.split(","):
        axis, _, size = entry.partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"{entry!r} is not AXIS=SIZE; write stage=N, data=N, expert=N, or several of them with commas"
            )
        sizes[axis] = int(size)
    return sizes["stage"], RankSize(sizes["data"], sizes["expert"])


def micro_batch_rows(batch_size: int, num_experts: int, micro_batches: int, size: RankSize) -> int:
    """Returns the rows of a micro-batch. Raises ValueError if they, or the experts, do not divide over a rank."""
    rows, rest = divmod(batch_size, micro_batches)
    if rest:
        raise ValueError(f"{micro_batches} micro-batches do not divide the batch of {batch_size} rows")
    if rows % size.devices or num_experts % size.experts:
        raise ValueError(
            f"the {size.devices} devices of a rank must divide the {rows} rows of a micro-batch, and the "
            f"{size.experts} that split the experts must divide {num_experts}"
        )
    return rows
