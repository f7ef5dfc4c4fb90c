"""Sends step metrics over ZMQ, a PUB socket per rank: (empty topic, number, payload).

The payload is a MessagePack map with the names and meanings of Dynamo's `ForwardPassMetrics`, version 1 (source:
`dynamo/common/forward_pass_metrics.py` of ai-dynamo 1.6.1). Variances are those of the whole population. Numbers are 8
bytes, big endian, and count the messages of a rank. An idle instance says so once per second.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from dsv3.config.publishing import StepMetricsConfig, endpoint_of

_MOST_WAITING = 10_000  # steps; the oldest are dropped, since planners want the latest
_IDLE_S = 1.0
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


class Queued(msgspec.Struct, frozen=True, gc=False):
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
    queued_requests: Queued = Queued()


encode = msgspec.msgpack.Encoder().encode


class StepPublisher:
    """Sends from a thread of its own, until `close` or its own end. Raises ValueError where an endpoint cannot be had.

    One thread calls `publish`, which never waits.
    """

    def __init__(self, config: StepMetricsConfig, num_ranks: int) -> None:
        self._waiting: deque[Sequence[StepMetrics]] = deque(maxlen=_MOST_WAITING)
        self._news, stop = threading.Event(), threading.Event()
        context = zmq.Context()
        try:
            sockets = [_listening(context, endpoint_of(config.endpoint, rank)) for rank in range(num_ranks)]
        except ValueError:
            context.destroy(linger=0)
            raise
        idle = [StepMetrics(worker_id=config.worker_id, dp_rank=rank) for rank in range(num_ranks)]
        arguments = context, sockets, idle, self._waiting, self._news, stop
        thread = threading.Thread(target=_serve, args=arguments, name="step-metrics", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, stop, self._news, thread)
        """Sends what waits, and lets go of the endpoints."""

    def publish(self, step: Sequence[StepMetrics]) -> None:
        """Takes what one step did on each rank."""
        self._waiting.append(step)
        self._news.set()


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
    waiting: deque[Sequence[StepMetrics]],
    news: threading.Event,
    stop: threading.Event,
) -> None:
    number = 0
    while waiting or not stop.is_set():
        if not waiting and news.wait(_IDLE_S):
            news.clear()  # it may be of a step that has been sent already
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


def _end(stop: threading.Event, news: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    news.set()
    if thread is not threading.current_thread():
        thread.join(2.0)
