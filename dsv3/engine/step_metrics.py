"""Notes what each step computes on each rank, and sends it with the step's time once its results are in.

It goes over ZMQ, a PUB socket per rank: (empty topic, number, payload). The payload is a MessagePack map with the names
and meanings of Dynamo's `ForwardPassMetrics`, version 1 (source: `dynamo/common/forward_pass_metrics.py` of ai-dynamo
1.6.1). Variances are those of the whole population. Numbers are 8 bytes, big endian, and count the messages of a rank.
An idle instance says so once per second.
"""

import dataclasses
import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

import msgspec
import numpy as np
import zmq

from dsv3.config.engine import EngineConfig
from dsv3.config.publishing import StepMetricsConfig, endpoint_of
from dsv3.engine.job import Planned
from dsv3.engine.jobs.decode import DecodeCommand
from dsv3.engine.jobs.prefill import PrefillCommand
from dsv3.scheduler.scheduler import Scheduler
from dsv3.scheduler.sequence import Sequence

_MOST_WAITING = 10_000  # steps; the oldest are dropped, since planners want the latest
_IDLE_S = 1.0
_QUEUE_S = 0.1  # the queue may hold a thousand requests: it is looked at so often and no more
_log = logging.getLogger(__name__)


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """What a step computed on a rank.

    Prompts: requests with a chunk, their tokens computed now, the variance of their whole lengths, and tokens before
    the chunks, cached or computed earlier. Decode: requests, and the tokens that they have had, with their variance.
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueueMetrics(msgspec.Struct, frozen=True, gc=False):
    """What waited meanwhile: prompts with their tokens, and answers that were pre-empted with all their tokens."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class StepMetrics(msgspec.Struct, frozen=True, gc=False):
    """One step of one rank; `wall_time` in seconds. One without requests and time says that the instance is idle."""

    version: int = 1
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: Scheduled = Scheduled()
    queued_requests: QueueMetrics = QueueMetrics()


encode = msgspec.msgpack.Encoder().encode


class StepPublisher:
    """Sends from a thread of its own, until `close` or its own end. Raises ValueError where an endpoint cannot be had.

    One thread calls `publish`, which never waits.
    """

    def __init__(self, config: StepMetricsConfig, num_ranks: int) -> None:
        self._waiting: deque[list[StepMetrics]] = deque(maxlen=_MOST_WAITING)
        self._work_events, stop = threading.Event(), threading.Event()
        context = zmq.Context()
        try:
            sockets = [_listening(context, endpoint_of(config.endpoint, rank)) for rank in range(num_ranks)]
        except ValueError:
            context.destroy(linger=0)
            raise
        idle = [StepMetrics(worker_id=config.worker_id, dp_rank=rank) for rank in range(num_ranks)]
        arguments = context, sockets, idle, self._waiting, self._work_events, stop
        thread = threading.Thread(target=_serve, args=arguments, name="step-metrics", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, stop, self._work_events, thread)
        """Sends what waits, and lets go of the endpoints."""

    def publish(self, step: list[StepMetrics]) -> None:
        """Takes what one step did on each rank."""
        self._waiting.append(step)
        self._work_events.set()


def _listening(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.PUB)
    socket.linger = 0
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(f"step_metrics_config: endpoint: {address!r} cannot be had: {error}") from None
    return socket


def _serve(
    context: zmq.Context,
    sockets: list[zmq.Socket],
    idle: list[StepMetrics],
    waiting: deque[list[StepMetrics]],
    work_events: threading.Event,
    stop: threading.Event,
) -> None:
    number = 0
    while waiting or not stop.is_set():
        if not waiting and work_events.wait(_IDLE_S):
            work_events.clear()  # it may be of a step that has been sent already
            continue
        step = waiting.popleft() if waiting else idle
        for socket, metrics in zip(sockets, step, strict=True):
            try:
                payload = encode(msgspec.structs.replace(metrics, counter_id=number))
                socket.send_multipart((b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            except zmq.ZMQError:
                _log.exception("step metrics could not be sent")
        number += 1
    context.destroy(linger=100)


def _end(stop: threading.Event, work_events: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    work_events.set()
    if thread is not threading.current_thread():
        thread.join(2.0)


class Moments(NamedTuple):
    """How many numbers, their sum and their variance, by rank."""

    number: list[int]
    total: list[int]
    variance: list[float]


def moments(ranks: np.ndarray, values: np.ndarray, num_ranks: int) -> Moments:
    """Returns the moments of `values` `[n]` by their `ranks` `[n]`, zeros for a rank without any."""
    count = np.bincount(ranks, minlength=num_ranks)
    total = np.bincount(ranks, values, num_ranks)
    some = np.maximum(count, 1)
    variance = np.bincount(ranks, (values - (total / some)[ranks]) ** 2, num_ranks) / some
    return Moments(count.tolist(), total.astype(np.int64).tolist(), variance.tolist())


@dataclasses.dataclass
class _UnderWay:
    """A step under way: of each chunk its rank, its prompt's length, its tokens and those before; of each row its rank
    and its tokens."""

    at: float
    chunks: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)  # [2, n] each

    def scheduled(self, num_ranks: int) -> list[Scheduled]:
        """Returns what each rank computes."""
        ranks, lengths, computed, before = np.array(self.chunks, np.int64).reshape(-1, 4).T
        held, tokens = np.concatenate([np.zeros((2, 0), np.int64), *self.rows], axis=1)
        prompts = moments(ranks, lengths, num_ranks)
        columns = (
            prompts.number,
            moments(ranks, computed, num_ranks).total,
            prompts.variance,
            moments(ranks, before, num_ranks).total,
            *moments(held, tokens, num_ranks),
        )
        return [Scheduled(*each) for each in zip(*columns, strict=True)]


class StepNotes:
    """Hands `publisher` what the steps of `scheduler` do, under the name `worker_id`; one thread calls it."""

    def __init__(self, scheduler: Scheduler, publisher: StepPublisher, worker_id: str) -> None:
        self._scheduler, self._publisher, self._worker_id = scheduler, publisher, worker_id
        self._cfg: EngineConfig = scheduler.cfg
        self._under_way: deque[_UnderWay] = deque()
        self._collected = 0.0
        self._queued: list[QueueMetrics] = []
        self._looked = float("-inf")

    def launched(self, jobs: list[Planned], *, is_more: bool) -> None:
        """Notes jobs that have just been launched: a step, or more of the step that was launched last."""
        if not is_more:
            self._under_way.append(_UnderWay(perf_counter()))
        step = self._under_way[-1]
        for job in jobs:
            if isinstance(job.command, PrefillCommand):
                step.chunks += [
                    (rank, chunk.sequence.prompt_length, chunk.stop - chunk.start, chunk.start)
                    for rank, mine in enumerate(job.context.chunks)
                    for chunk in mine
                ]
            elif isinstance(job.command, DecodeCommand):
                step.rows.append(self._rows(job.command))

    def collected(self) -> None:
        """Publishes the oldest step under way, whose results are in; nothing of one that ran no layers."""
        step, now = self._under_way.popleft(), perf_counter()
        seconds, self._collected = now - max(step.at, self._collected), now
        if not step.chunks and not step.rows:
            return
        if now - self._looked >= _QUEUE_S:
            self._queued, self._looked = self._waiting(), now
        scheduled = step.scheduled(self._cfg.num_ranks)
        self._publisher.publish(
            [
                StepMetrics(1, self._worker_id, rank, 0, seconds, *each)
                for rank, each in enumerate(zip(scheduled, self._queued, strict=True))
            ]
        )

    def _rows(self, command: DecodeCommand) -> np.ndarray:
        """Returns rank and tokens before this step of each row that is no padding, `[2, n]`."""
        rank, row = (command.rows[..., 0] < self._cfg.max_num_seqs).nonzero()
        slots = rank * self._cfg.max_num_seqs + command.rows[rank, row, 0]
        return np.stack([rank, self._scheduler.slots.planned[slots] - command.width])

    def _waiting(self) -> list[QueueMetrics]:
        """Returns what waits, dealt over the ranks in the order of turns: a request has none before it starts."""
        waiting = self._scheduler.waiting
        prompts = self._dealt(each for each in waiting if not each.started)
        answers = self._dealt(each for each in waiting if each.started)
        return [QueueMetrics(*each) for each in zip(*prompts, *answers, strict=True)]

    def _dealt(self, waiting: Iterable[Sequence]) -> Moments:
        lengths = np.array([len(sequence.tokens) for sequence in waiting], np.int64)
        return moments(np.arange(len(lengths)) % self._cfg.num_ranks, lengths, self._cfg.num_ranks)
