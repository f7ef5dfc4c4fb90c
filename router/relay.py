"""Relays one request: to an instance, to the next one where that fails, and back to the client; and counts it.

`RetryAttempts` is the quarantine: a request with which two instances have died is not tried a third time.
"""

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.responses import Response

from dsv3.http_client import Body, RequestFailed, ServerSentEvents, StreamedResponse
from dsv3.server.protocol.errors import ENGINE_DIED, ApiError, unavailable
from dsv3.server.serving.handlers import KINDS
from dsv3.server.serving.metrics import SECONDS
from router.cached_pages import token_page_keys
from router.canary import Canary, choose_version
from router.instance import Booking, Instance, InstanceFailed
from router.members import Pool
from router.options import RouterOptions
from router.request import MAX_PAGES, PAGE_TOKENS, RESUMABLE, TOKENIZED, ParsedRequest, Prompt
from router.stream import Events, RelayedStream

MAX_DEATHS = 2
"""Instances that may die while they serve a request, before the request is taken for the cause."""
INSTANCES_DIED = "instances_died"
FATAL = (INSTANCES_DIED, ENGINE_DIED)
"""Error codes after which no other instance gets the request."""


class InstanceBusy(Exception):
    """The instance is at its limits and refused the request."""


@dataclasses.dataclass
class RetryAttempts:
    """A request's retries so far. Times are seconds of a monotonic clock."""

    max_resumes: int
    patience_s: float
    resumes: int = 0
    deaths: int = 0
    since: float = dataclasses.field(default_factory=time.monotonic)

    def on_busy(self, now: float) -> None:
        """Records that an instance was busy; raises ApiError 503 after `patience_s` without one that accepts."""
        if now - self.since > self.patience_s:
            raise unavailable("no instance has taken the request", "no_instance")

    def on_failure(self, failure: InstanceFailed, *, has_died: bool, now: float) -> None:
        """Records that an instance failed; raises ApiError where the request must not be retried."""
        if failure.error is not None and failure.error.body.code == ENGINE_DIED:
            raise failure.error
        if not failure.has_arrived:
            self.on_busy(now)
            return
        self.resumes, self.deaths, self.since = self.resumes + 1, self.deaths + has_died, now
        if self.deaths >= MAX_DEATHS:
            text = f"{self.deaths} instances have died with this request; it is not tried again"
            raise ApiError(500, text, kind="server_error", code=INSTANCES_DIED)
        if self.resumes > self.max_resumes:
            raise failure.error or stream_cut_off()


def stream_cut_off() -> ApiError:
    """Returns the error 502 that ends a response which cannot be resumed."""
    text = "the instance did not complete its response"
    return ApiError(502, text, kind="server_error", code="instance_failed")


_MOST_BYTES = 2**23


class _Tokenized(msgspec.Struct):
    tokens: list[int]


async def with_page_keys(request: ParsedRequest, instances: Sequence[Instance]) -> Prompt:
    """Returns a request's prompt with its page keys, where any of `instances` publishes KV events.

    Text is tokenized by the least loaded of these. Prompts of chats with tools and of other routes, and those that are
    not tokenized in time, are returned as they are; the router then goes by what it has sent.
    """
    publishing = [each for each in instances if each.publishes_events and each.status == "ok"]
    if not publishing or request.path not in KINDS:
        return request.prompt
    ids: np.ndarray | None = np.array(request.prompt.ids, np.int32) if request.prompt.ids else None
    if ids is None and request.path in RESUMABLE and "tools" not in request.fields:
        ids = await _tokens(min(publishing, key=lambda each: each.load.requests), request.fields)
    if ids is None:
        return request.prompt
    pages = token_page_keys(ids[: MAX_PAGES * PAGE_TOKENS])
    return dataclasses.replace(request.prompt, tokens=max(1, len(ids)), token_keys=pages)


async def _tokens(instance: Instance, fields: Mapping[str, msgspec.Raw]) -> np.ndarray | None:
    """Returns the token ids of a text or of messages from an instance's /tokenize; None where it fails."""
    if bytes(memoryview(fields.get("prompt", b'"'))[:1]) != b'"':
        return None
    body = b",".join(b'"%b":%b' % (name.encode(), fields[name]) for name in TOKENIZED if name in fields)
    try:
        status, content = await instance.fetch("POST", "/tokenize", b"{%b}" % body, _MOST_BYTES)
        tokens = msgspec.json.decode(content, type=_Tokenized).tokens if status == 200 else None
        return None if tokens is None else np.array(tokens, np.int32)
    except (RequestFailed, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError):
        return None


MAX_ANSWER_BYTES = 2**26
_MAX_ERROR_BYTES = 2**20
_PREFILL_ATTEMPTS = 2
_log = logging.getLogger("dsv3.router")

SendEvents = Callable[[bytes], Awaitable[None]]


class RouterMetrics:
    """Prometheus counters of the router, and gauges read from its pools at each scrape."""

    def __init__(self, pools: tuple[Pool, ...]):
        self._pools = pools
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.requests = self._counter("requests", "Requests by status; 499: the client disconnected.", "status")
        self.sent = self._counter("sent", "Requests sent to an instance, resumed ones among them.", "instance")
        self.broken = self._counter("broken", "Responses that an instance did not complete.", "instance")
        self.resumed = self._counter("resumed", "Times that a request was resumed on another instance.")
        self.computed = self._counter("prefilled", "Prompts computed by a prefill instance.")
        text = "Requests by status, and by the version of the instance that was the last to have them."
        self.by_version = self._counter("version_requests", text, "version", "status")
        self.broken_by_version = self._counter(
            "version_broken", "Responses that instances of a version did not complete.", "version"
        )
        self.first_event_s = self._histogram("version_first_event_seconds", "Until a stream's first event.")
        self.seconds = self._histogram("version_request_seconds", "Until the end of a response with status 200.")

    def on_end(self, status: int, version: str | None, first_s: float | None, seconds: float) -> None:
        """Counts a request that has ended, `first_s` after its first event; no instance of a `version` None had it."""
        self.requests.labels(str(status)).inc()
        if version is None:
            return
        self.by_version.labels(version, str(status)).inc()
        if first_s is not None:
            self.first_event_s.labels(version).observe(first_s)
        if status == 200:
            self.seconds.labels(version).observe(seconds)

    def forget(self, url: str) -> None:
        """Drops the series of an instance that has left, so that changing addresses do not accumulate."""
        for counter in (self.sent, self.broken):
            counter.remove(url)

    def text(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges (prometheus_client calls this)."""
        up = _gauge("instance_up", "1: the instance is healthy.")
        running = _gauge("running", "Requests of this router that the instance serves.")
        live = _gauge("instance_tells", "1: its KV events arrive.")
        pages = _gauge("instance_pages", "Pages that it has cached, by its KV events.")
        version = _gauge("instance_version", "1: the instance serves this version.", "version")
        for instance in (each for pool in self._pools for each in pool.instances):
            up.add_metric([instance.url], float(instance.status == "ok"))
            version.add_metric([instance.url, instance.version], 1.0)
            running.add_metric([instance.url], instance.load.requests)
            live.add_metric([instance.url], float(instance.publishes_events))
            pages.add_metric([instance.url], len(instance.listener.cached) if instance.listener is not None else 0)
        waiting = sum(pool.num_waiting for pool in self._pools)
        yield from (up, running, live, pages, version)
        yield GaugeMetricFamily("dsv3:router_waiting", "Requests in the queue.", value=waiting)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"dsv3:router_{name}", meaning, labels, registry=self._registry)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        return Histogram(f"dsv3:router_{name}", meaning, ["version"], buckets=SECONDS, registry=self._registry)


def _gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"dsv3:router_{name}", meaning, labels=["instance", *labels])


@dataclasses.dataclass
class Fleet:
    """The pool that answers, the pool that prefills for it if there is one, the metrics, and the split of versions."""

    answering: Pool
    prefilling: Pool | None
    metrics: RouterMetrics
    options: RouterOptions
    canary: Canary | None = None

    @property
    def instances(self) -> list[Instance]:
        """All of them."""
        return [*self.answering.instances, *(self.prefilling.instances if self.prefilling is not None else ())]

    def version_of(self, conversation: bytes) -> str | None:
        """Returns the version that answers a conversation; None: any instance may.

        Without a canary it matters only for prefill instances: pages of one version are of no use to another.
        """
        if self.canary is None and self.prefilling is None:
            return None
        return choose_version(self.canary, self.answering.versions, conversation)


class Relay:
    """Gets one request answered by a fleet. `run` is called once.

    `version` is that of the last instance that had it, None where none had. A request stays with its version while any
    instance of it is healthy, and gets the pages of a prefill instance of the same version only.
    """

    def __init__(self, fleet: Fleet, request: ParsedRequest, headers: Mapping[str, str]):
        self._fleet, self._request, self._headers = fleet, request, dict(headers)
        self._attempts = RetryAttempts(fleet.options.max_resumes, fleet.options.queue_timeout)
        self._wanted: str | None = None
        self._transfer: Mapping[str, Any] | None = None
        self._transfer_version = ""
        self._has_sent = False
        self.sent_to: list[tuple[str, float]] = []
        """Each time that it was sent: "prefill URL" or "answer URL", and when, by `time.monotonic`."""
        self.version: str | None = None

    async def run(self, send: SendEvents) -> Response | None:
        """Returns the response, or None after all events of a streamed one went to `send`; raises ApiError.

        Nothing is sent before an instance has accepted the request, so that a refusal keeps its status.
        """
        prompt = await with_page_keys(self._request, self._fleet.instances)
        self._request = dataclasses.replace(self._request, prompt=prompt)
        self._choose_version()
        if self._fleet.prefilling is not None and self._request.prompt.keys and self._request.path in RESUMABLE:
            self._transfer = await self._prefilled(self._fleet.prefilling)
        if not self._request.streams:
            return await self._retried(self._complete, lambda: True)
        if self._request.path not in RESUMABLE:
            return await self._retried(lambda booking: self._pass_through(booking, send), lambda: not self._has_sent)
        relayed = RelayedStream(self._request)
        can_go_on = lambda: relayed.is_tracked or not self._has_sent  # noqa: E731
        return await self._retried(lambda booking: self._relay_stream(booking, relayed, send), can_go_on)

    def _choose_version(self) -> None:
        """Chooses the version, anew where no instance of the last one is left."""
        if self._wanted is None or self._wanted not in self._fleet.answering.versions:
            self._wanted = self._fleet.version_of(self._request.conversation)

    async def _retried[T](self, attempt: Callable[[Booking], Awaitable[T]], can_go_on: Callable[[], bool]) -> T:
        """Returns the result of the first attempt that succeeds, each at the instance that costs least."""
        while True:
            self._choose_version()
            async with self._fleet.answering.book(self._request.prompt, self._wanted) as booking:
                try:
                    return await self._attempt(booking, attempt)
                except InstanceBusy:
                    booking.instance.back_off()
                    self._attempts.on_busy(time.monotonic())
                except InstanceFailed as failure:
                    await self._on_failure(booking, failure)
                    if not can_go_on():
                        raise failure.error or stream_cut_off() from None
                    self._fleet.metrics.resumed.inc(failure.has_arrived)

    async def _attempt[T](self, booking: Booking, attempt: Callable[[Booking], Awaitable[T]]) -> T:
        self._on_sent("answer", booking.instance)
        self.version = booking.instance.version
        found = await attempt(booking)
        booking.instance.on_success()
        return found

    def _on_sent(self, what: str, instance: Instance) -> None:
        self._fleet.metrics.sent.labels(instance.url).inc()
        self.sent_to.append((f"{what} {instance.url}", time.monotonic()))

    async def _on_failure(self, booking: Booking, failure: InstanceFailed) -> None:
        """Probes whether the instance has died; one that was draining has not died of this request."""
        instance = booking.instance
        was_draining, version = instance.status == "draining", instance.version  # another process may follow
        instance.breaker.on_failure(booking, time.monotonic())
        await instance.probe()
        has_died = not was_draining and instance.status not in ("ok", "draining")
        _log.warning("%s: %s (%s)", instance.url, failure, "it is " + instance.status)
        self._fleet.metrics.broken.labels(instance.url).inc()
        self._fleet.metrics.broken_by_version.labels(version).inc()
        self._attempts.on_failure(failure, has_died=has_died, now=time.monotonic())

    async def _complete(self, booking: Booking) -> Response:
        return await self._ask_whole(booking.instance, self._request.body(self._transfer_to(booking.instance)))

    def _transfer_to(self, instance: Instance) -> Mapping[str, Any] | None:
        """Returns the prompt's kv_transfer_params, where an instance of the same version has computed it."""
        return self._transfer if instance.version == self._transfer_version else None

    async def _ask_whole(self, instance: Instance, body: Body) -> Response:
        async with instance.post_stream(self._request.path, body, self._headers) as response:
            if response.status != 200:
                return await _refusal(instance, response)
            return _reply(response, await instance.read(response, MAX_ANSWER_BYTES))

    async def _pass_through(self, booking: Booking, send: SendEvents) -> Response | None:
        """Relays a stream unchanged: a route whose responses cannot be resumed."""
        instance = booking.instance
        body = self._request.body(self._transfer_to(instance))
        async with instance.post_stream(self._request.path, body, self._headers) as response:
            if response.status != 200:
                return await _refusal(instance, response)
            async for chunk in instance.chunks(response):
                booking.on_tokens(1)
                self._has_sent = True
                await send(chunk)
        return None

    async def _relay_stream(self, booking: Booking, relayed: RelayedStream, send: SendEvents) -> Response | None:
        """Relays a stream and records its tokens; resumes behind those of earlier attempts."""
        relayed.reset()
        instance, events = booking.instance, Events()
        body = self._request.body(self._transfer_to(instance), relayed.tokens)
        async with instance.post_stream(self._request.path, body, self._headers) as response:
            if response.status != 200:
                reply = await _refusal(instance, response)
                if self._has_sent:  # another instance accepted it before: the status has been sent
                    raise stream_cut_off()
                return reply
            async for chunk in instance.chunks(response):
                await self._forward(booking, events, chunk, relayed, send)
                if relayed.is_done:
                    return None
        raise InstanceFailed("the stream ended early")

    async def _forward(
        self, booking: Booking, events: ServerSentEvents, chunk: bytes, relayed: RelayedStream, send: SendEvents
    ) -> None:
        try:
            for data in events.push(chunk):
                lines, tokens = relayed.push(data)
                booking.on_tokens(tokens)
                if lines:
                    self._has_sent = True
                    await send(b"".join(lines))
        except RequestFailed as error:
            raise InstanceFailed(str(error)) from None
        except ApiError as error:
            if error.body.type != "server_error":  # another instance would refuse the request, too
                raise
            raise InstanceFailed(str(error), error=error) from None

    async def _prefilled(self, pool: Pool) -> Mapping[str, Any] | None:
        """Prefills the prompt; returns its kv_transfer_params, None where the answering instance has to compute it."""
        for _ in range(_PREFILL_ATTEMPTS):
            if not (pool.is_up if self._wanted is None else self._wanted in pool.versions):
                break
            try:
                async with pool.book(self._request.prompt, self._wanted) as booking:
                    return await self._computed(booking)
            except ApiError as error:
                if error.body.code in FATAL:
                    raise
                break
            except InstanceBusy:
                continue
        return None

    async def _computed(self, booking: Booking) -> Mapping[str, Any] | None:
        instance = booking.instance
        self._on_sent("prefill", instance)
        self._transfer_version = instance.version
        try:
            reply = await self._ask_whole(instance, self._request.prefill_body())
        except InstanceBusy:
            instance.back_off()
            raise
        except InstanceFailed as failure:
            await self._on_failure(booking, failure)
            raise InstanceBusy from None
        instance.on_success()
        if reply.status_code != 200:
            return None
        self._fleet.metrics.computed.inc()
        return _object_in(bytes(reply.body), "kv_transfer_params")


async def _refusal(instance: Instance, response: StreamedResponse) -> Response:
    """Returns a refusal that goes to the client; raises InstanceBusy, InstanceFailed or ApiError for any other."""
    content = await instance.read(response, _MAX_ERROR_BYTES)
    status, error = response.status, _object_in(content, "error") or {}
    if status in (401, 403):
        _log.error("%s refuses the router's key (%d); see --instance_api_key_file", instance.url, status)
        raise ApiError(502, "an instance refused the router's API key", kind="server_error", code="instance_refuses")
    if status in (429, 503) and error.get("code") != "engine_unavailable":
        raise InstanceBusy
    if status >= 500:
        text = str(error.get("message") or f"an instance responded with status {status}")
        raise InstanceFailed(
            f"status {status}", error=ApiError(status, text, kind="server_error", code=error.get("code"))
        )
    return _reply(response, content)


def _reply(response: StreamedResponse, content: bytes) -> Response:
    """Returns the client's response: an instance's whole answer, or its refusal in its own words."""
    headers = {"content-type": response.headers.get("content-type", "application/json")}
    if (timing := response.headers.get("server-timing")) is not None:
        headers["server-timing"] = timing
    return Response(content, response.status, headers)


def _object_in(content: bytes, name: str) -> dict[str, Any] | None:
    """Returns the JSON object in a field of an answer; None where there is none."""
    try:
        found = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, dict) else None
