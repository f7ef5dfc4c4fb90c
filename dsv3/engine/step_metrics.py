"""Publishes per rank what each step computed, with the step's time, once its results are in.

It goes over ZMQ, a PUB socket per rank: (empty topic, number, payload). The payload is a MessagePack map with the names
and meanings of Dynamo's `ForwardPassMetrics`, version 1 (source: `dynamo/common/forward_pass_metrics.py` of ai-dynamo
1.6.1). Variances are those of the whole population. Numbers are 8 bytes, big endian, and count the messages of a rank.
An idle instance publishes once per second.
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

_MAX_WAITING = 10_000  # steps; the oldest are dropped, since planners need the latest
_IDLE_S = 1.0
_QUEUE_S = 0.1  # interval of queue metrics: the queue may hold a thousand requests
_log = logging.getLogger(__name__)


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """What a step computed on a rank.

    Prompts: requests with a chunk, their tokens computed now, the variance of their whole lengths, and tokens before
    the chunks, cached or computed earlier. Decode: requests, and their tokens so far, with the variance.
    """

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueueMetrics(msgspec.Struct, frozen=True, gc=False):
    """What was waiting: prompts with their tokens, and pre-empted requests with all their tokens."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class StepMetrics(msgspec.Struct, frozen=True, gc=False):
    """One step of one rank; `wall_time` in seconds. Without requests and time it says that the instance is idle."""

    version: int = 1
    worker_id: str = ""
    dp_rank: int = 0
    counter_id: int = 0
    wall_time: float = 0.0
    scheduled_requests: Scheduled = Scheduled()
    queued_requests: QueueMetrics = QueueMetrics()


encode = msgspec.msgpack.Encoder().encode


class StepPublisher:
    """Publishes on a thread of its own until `close`. Raises ValueError for an endpoint that cannot be bound.

    One thread calls `publish`, which never waits.
    """

    def __init__(self, config: StepMetricsConfig, num_ranks: int) -> None:
        self._waiting: deque[list[StepMetrics]] = deque(maxlen=_MAX_WAITING)
        self._wake, stop = threading.Event(), threading.Event()
        context = zmq.Context()
        try:
            sockets = [_listening(context, endpoint_of(config.endpoint, rank)) for rank in range(num_ranks)]
        except ValueError:
            context.destroy(linger=0)
            raise
        idle = [StepMetrics(worker_id=config.worker_id, dp_rank=rank) for rank in range(num_ranks)]
        arguments = context, sockets, idle, self._waiting, self._wake, stop
        thread = threading.Thread(target=_serve, args=arguments, name="step-metrics", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, stop, self._wake, thread)
        """Sends what is enqueued, and closes the endpoints."""

    def publish(self, step: list[StepMetrics]) -> None:
        """Enqueues the metrics of one step, by rank."""
        self._waiting.append(step)
        self._wake.set()


def _listening(context: zmq.Context, address: str) -> zmq.Socket:
    socket = context.socket(zmq.PUB)
    socket.linger = 0
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ValueError(
            f"step_metrics_config: endpoint: cannot bind {address!r}: {error}; choose an address of this host with a "
            "free port per rank"
        ) from None
    return socket


def _serve(
    context: zmq.Context,
    sockets: list[zmq.Socket],
    idle: list[StepMetrics],
    waiting: deque[list[StepMetrics]],
    wake: threading.Event,
    stop: threading.Event,
) -> None:
    number = 0
    while waiting or not stop.is_set():
        if not waiting and wake.wait(_IDLE_S):
            wake.clear()  # it may be of a step that has been sent already
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


def _end(stop: threading.Event, wake: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    wake.set()
    if thread is not threading.current_thread():
        thread.join(2.0)


class Moments(NamedTuple):
    """Count, sum and variance of numbers, by rank."""

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
    """A step in flight.

    Each chunk is its rank, its prompt's length, its tokens and the tokens before it; each row its rank and its tokens.
    """

    at: float
    chunks: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    rows: list[np.ndarray] = dataclasses.field(default_factory=list)  # [2, n] each

    def scheduled(self, num_ranks: int) -> list[Scheduled]:
        """Returns what each rank computes."""
        ranks, lengths, computed, before = np.array(self.chunks, np.int64).reshape(-1, 4).T
        row_ranks, tokens = np.concatenate([np.zeros((2, 0), np.int64), *self.rows], axis=1)
        prompts = moments(ranks, lengths, num_ranks)
        columns = (
            prompts.number,
            moments(ranks, computed, num_ranks).total,
            prompts.variance,
            moments(ranks, before, num_ranks).total,
            *moments(row_ranks, tokens, num_ranks),
        )
        return [Scheduled(*each) for each in zip(*columns, strict=True)]


class StepMetricsRecorder:
    """Publishes what the steps of `scheduler` compute, under the name `worker_id`; one thread calls it."""

    def __init__(self, scheduler: Scheduler, publisher: StepPublisher, worker_id: str) -> None:
        self._scheduler, self._publisher, self._worker_id = scheduler, publisher, worker_id
        self._cfg: EngineConfig = scheduler.cfg
        self._under_way: deque[_UnderWay] = deque()
        self._collected = 0.0
        self._queued: list[QueueMetrics] = []
        self._queued_at = float("-inf")

    def launched(self, jobs: list[Planned], *, is_more: bool) -> None:
        """Records jobs that have just been launched: a new step, or with `is_more` more jobs of the last one."""
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
        """Publishes the oldest step in flight, whose results are in, unless it ran no layers."""
        step, now = self._under_way.popleft(), perf_counter()
        seconds, self._collected = now - max(step.at, self._collected), now
        if not step.chunks and not step.rows:
            return
        if now - self._queued_at >= _QUEUE_S:
            self._queued, self._queued_at = self._waiting(), now
        scheduled = step.scheduled(self._cfg.num_ranks)
        self._publisher.publish(
            [
                StepMetrics(1, self._worker_id, rank, 0, seconds, *each)
                for rank, each in enumerate(zip(scheduled, self._queued, strict=True))
            ]
        )

    def _rows(self, command: DecodeCommand) -> np.ndarray:
        """Returns rank and tokens before this step of each row that is not padding, `[2, n]`."""
        rank, row = (command.rows[..., 0] < self._cfg.max_num_seqs).nonzero()
        slots = rank * self._cfg.max_num_seqs + command.rows[rank, row, 0]
        return np.stack([rank, self._scheduler.slots.planned[slots] - command.width])

    def _waiting(self) -> list[QueueMetrics]:
        """Returns what waits, divided over the ranks in queue order: a waiting request has no rank yet."""
        waiting = self._scheduler.waiting
        prompts = self._dealt(each for each in waiting if not each.started)
        answers = self._dealt(each for each in waiting if each.started)
        return [QueueMetrics(*each) for each in zip(*prompts, *answers, strict=True)]

    def _dealt(self, waiting: Iterable[Sequence]) -> Moments:
        lengths = np.array([len(sequence.tokens) for sequence in waiting], np.int64)
        return moments(np.arange(len(lengths)) % self._cfg.num_ranks, lengths, self._cfg.num_ranks)
