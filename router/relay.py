"""One request on its way: to an instance, to the next where that one fails, and back to its client; and its counts.

`RetryAttempts` is the quarantine: a request with which two instances have died is not tried a third time.
"""

import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from dsv3.http_client import Body, RequestFailed, ServerSentEvents, StreamedResponse
from dsv3.server.protocol.errors import ENGINE_DIED, ApiError, unavailable
from dsv3.server.serving.handlers import KINDS
from router.cached_pages import spelled_keys
from router.gather import ErrorEvent, Events, Gathered, Unreadable
from router.instance import Booking, Broken, Instance
from router.members import Pool
from router.options import RouterOptions
from router.request import MAX_PAGES, PAGE_TOKENS, RESUMABLE, TOKENIZED, ParsedRequest, Prompt

MAX_DEATHS = 2
"""Instances that may die with a request on them before it is taken for the cause."""
INSTANCES_DIED = "instances_died"
FATAL = (INSTANCES_DIED, ENGINE_DIED)
"""Codes of errors that say that nobody else should have the request."""


class InstanceBusy(Exception):
    """The instance has no room for the request now."""


@dataclasses.dataclass
class RetryAttempts:
    """What has become of a request so far. Times are seconds of a monotonic clock."""

    max_resumes: int
    patience_s: float
    resumes: int = 0
    deaths: int = 0
    since: float = dataclasses.field(default_factory=time.monotonic)

    def refused(self, now: float) -> None:
        """Notes that an instance would not have it; raises ApiError 503 where that has gone on for too long."""
        if now - self.since > self.patience_s:
            raise unavailable("no instance has taken the request", "no_instance")

    def broke(self, failure: Broken, *, has_died: bool, now: float) -> None:
        """Notes that an instance has not answered to the end; raises ApiError where nobody else is to be asked."""
        if failure.error is not None and failure.error.body.code == ENGINE_DIED:
            raise failure.error
        if not failure.has_arrived:
            self.refused(now)
            return
        self.resumes, self.deaths, self.since = self.resumes + 1, self.deaths + has_died, now
        if self.deaths >= MAX_DEATHS:
            text = f"{self.deaths} instances have died with this request; it is not tried again"
            raise ApiError(500, text, kind="server_error", code=INSTANCES_DIED)
        if self.resumes > self.max_resumes:
            raise failure.error or broken_off()


def broken_off() -> ApiError:
    """502: the answer ends here."""
    text = "the instance has not answered to the end"
    return ApiError(502, text, kind="server_error", code="instance_failed")


_MOST_BYTES = 2**23


class _Tokenized(msgspec.Struct):
    tokens: list[int]


async def spelled(asked: ParsedRequest, instances: Sequence[Instance]) -> Prompt:
    """Returns a request's prompt with the names of its pages, where any of `instances` tells what it holds.

    Text is tokenized by the one of these that has the least to do. Chats with tools, and what comes over other routes
    or is not answered in time, stay as they are: then the router goes by what it has sent.
    """
    telling = [each for each in instances if each.tells and each.status == "ok"]
    if not telling or asked.path not in KINDS:
        return asked.prompt
    ids: np.ndarray | None = np.array(asked.prompt.ids, np.int32) if asked.prompt.ids else None
    if ids is None and asked.path in RESUMABLE and "tools" not in asked.fields:
        ids = await _tokens(min(telling, key=lambda each: each.load.requests), asked.fields)
    if ids is None:
        return asked.prompt
    pages = spelled_keys(ids[: MAX_PAGES * PAGE_TOKENS])
    return dataclasses.replace(asked.prompt, tokens=max(1, len(ids)), spelled=pages)


async def _tokens(instance: Instance, fields: Mapping[str, msgspec.Raw]) -> np.ndarray | None:
    """Returns the tokens of a text or of messages as an instance reads them; None where it does not say."""
    if bytes(memoryview(fields.get("prompt", b'"'))[:1]) != b'"':
        return None
    body = b",".join(b'"%b":%b' % (name.encode(), fields[name]) for name in TOKENIZED if name in fields)
    try:
        status, content = await instance.post("/tokenize", b"{%b}" % body, _MOST_BYTES)
        tokens = msgspec.json.decode(content, type=_Tokenized).tokens if status == 200 else None
        return None if tokens is None else np.array(tokens, np.int32)
    except (RequestFailed, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
        return None


MAX_ANSWER_BYTES = 2**26
_MAX_ERROR_BYTES = 2**20
_PREFILL_TRIALS = 2
_log = logging.getLogger("dsv3.router")

Tell = Callable[[bytes], Awaitable[None]]


class Numbers:
    """Counters, and what the pools say when somebody asks."""

    def __init__(self, pools: tuple[Pool, ...]):
        self._pools = pools
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.requests = self._counter("requests", "Requests by status, 499 where the client had gone.", "status")
        self.sent = self._counter("sent", "Requests sent to an instance, resumed ones among them.", "instance")
        self.broken = self._counter("broken", "Answers that an instance has not told to the end.", "instance")
        self.resumed = self._counter("resumed", "Requests that went on elsewhere, as often as they did.")
        self.computed = self._counter("prefilled", "Prompts that a prefill instance has computed.")

    def forget(self, url: str) -> None:
        """Drops what was counted of an instance that has left, so that changing addresses do not add up."""
        for counter in (self.sent, self.broken):
            counter.remove(url)

    def text(self) -> bytes:
        """Returns the exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the gauges (prometheus_client calls this)."""
        up = GaugeMetricFamily("dsv3:router_instance_up", "1 where an instance is well.", labels=["instance"])
        running = GaugeMetricFamily("dsv3:router_running", "Requests of this router there.", labels=["instance"])
        tells = GaugeMetricFamily("dsv3:router_instance_tells", "1 where its KV events are heard.", labels=["instance"])
        pages = GaugeMetricFamily("dsv3:router_instance_pages", "Pages that it says it holds.", labels=["instance"])
        for instance in (each for pool in self._pools for each in pool.instances):
            up.add_metric([instance.url], float(instance.status == "ok"))
            running.add_metric([instance.url], instance.load.requests)
            tells.add_metric([instance.url], float(instance.tells))
            pages.add_metric([instance.url], len(instance.listener.held) if instance.listener is not None else 0)
        waiting = sum(pool.num_waiting for pool in self._pools)
        yield from (up, running, tells, pages)
        yield GaugeMetricFamily("dsv3:router_waiting", "Requests in the queue.", value=waiting)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"dsv3:router_{name}", meaning, labels, registry=self._registry)


@dataclasses.dataclass(frozen=True)
class InstanceReply:
    """An answer that is not streamed, or a refusal in the words of an instance."""

    status: int
    media_type: str
    content: bytes


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The instances that answer, those that compute prompts for them if there are any, and what is counted."""

    answering: Pool
    prefilling: Pool | None
    numbers: Numbers
    options: RouterOptions

    @property
    def instances(self) -> list[Instance]:
        """All of them."""
        return [*self.answering.instances, *(self.prefilling.instances if self.prefilling is not None else ())]


class Relay:
    """Has a fleet answer one request. `run` is called once."""

    def __init__(self, fleet: Fleet, asked: ParsedRequest, headers: Mapping[str, str]):
        self._fleet, self._asked, self._headers = fleet, asked, dict(headers)
        self._trials = RetryAttempts(fleet.options.max_resumes, fleet.options.queue_timeout)
        self._transfer: Mapping[str, Any] | None = None
        self._has_told = False

    async def run(self, tell: Tell) -> InstanceReply | None:
        """Returns the answer, or None when `tell` has been given all the events of one; raises ApiError.

        Nothing is told before an instance has accepted the request, so that a refusal has its proper status.
        """
        prompt = await spelled(self._asked, self._fleet.instances)
        self._asked = dataclasses.replace(self._asked, prompt=prompt)
        if self._fleet.prefilling is not None and self._asked.prompt.keys and self._asked.path in RESUMABLE:
            self._transfer = await self._prefilled(self._fleet.prefilling)
        if not self._asked.streams:
            return await self._tried(self._whole, lambda: True)
        if self._asked.path not in RESUMABLE:
            return await self._tried(lambda booking: self._passed(booking, tell), lambda: not self._has_told)
        gathered = Gathered(self._asked)
        can_go_on = lambda: gathered.is_tracked or not self._has_told  # noqa: E731
        return await self._tried(lambda booking: self._streamed(booking, gathered, tell), can_go_on)

    async def _tried[T](self, attempt: Callable[[Booking], Awaitable[T]], can_go_on: Callable[[], bool]) -> T:
        """Returns what an attempt returns; after one that fails the next instance has its turn."""
        while True:
            async with self._fleet.answering.book(self._asked.prompt) as booking:
                try:
                    return await self._counted(booking, attempt)
                except InstanceBusy:
                    booking.instance.rest()
                    self._trials.refused(time.monotonic())
                except Broken as failure:
                    await self._note(booking, failure)
                    if not can_go_on():
                        raise failure.error or broken_off() from None
                    self._fleet.numbers.resumed.inc(failure.has_arrived)

    async def _counted[T](self, booking: Booking, attempt: Callable[[Booking], Awaitable[T]]) -> T:
        self._fleet.numbers.sent.labels(booking.instance.url).inc()
        found = await attempt(booking)
        booking.instance.work()
        return found

    async def _note(self, booking: Booking, failure: Broken) -> None:
        """Looks whether the instance has died; one that was draining has not died of this request."""
        instance = booking.instance
        was_draining = instance.status == "draining"
        instance.breaker.fail(booking, time.monotonic())
        await instance.probe()
        has_died = not was_draining and instance.status not in ("ok", "draining")
        _log.warning("%s: %s (%s)", instance.url, failure, "it is " + instance.status)
        self._fleet.numbers.broken.labels(instance.url).inc()
        self._trials.broke(failure, has_died=has_died, now=time.monotonic())

    async def _whole(self, booking: Booking) -> InstanceReply:
        return await self._asked_whole(booking.instance, self._asked.first(self._transfer))

    async def _asked_whole(self, instance: Instance, body: Body) -> InstanceReply:
        async with instance.ask(self._asked.path, body, self._headers) as response:
            if response.status != 200:
                return await _refusal(instance, response)
            kind = response.headers.get("content-type", "application/json")
            return InstanceReply(200, kind, await instance.read(response, MAX_ANSWER_BYTES))

    async def _passed(self, booking: Booking, tell: Tell) -> InstanceReply | None:
        """Passes a stream on as it comes."""
        instance = booking.instance
        async with instance.ask(self._asked.path, self._asked.first(self._transfer), self._headers) as response:
            if response.status != 200:
                return await _refusal(instance, response)
            async for piece in instance.pieces(response):
                booking.answer(1)
                self._has_told = True
                await tell(piece)
        return None

    async def _streamed(self, booking: Booking, gathered: Gathered, tell: Tell) -> InstanceReply | None:
        """Passes a stream on and gathers its tokens; begins behind those that there are."""
        gathered.broke()
        instance, events = booking.instance, Events()
        body = self._asked.again(gathered.tokens, self._transfer)
        async with instance.ask(self._asked.path, body, self._headers) as response:
            if response.status != 200:
                reply = await _refusal(instance, response)
                if self._has_told:  # what one instance took another refuses: there is no status left to say so
                    raise broken_off()
                return reply
            async for piece in instance.pieces(response):
                await self._take(booking, events, piece, gathered, tell)
                if gathered.is_done:
                    return None
        raise Broken("the stream has no end")

    async def _take(
        self, booking: Booking, events: ServerSentEvents, piece: bytes, gathered: Gathered, tell: Tell
    ) -> None:
        try:
            for data in events.push(piece):
                lines, tokens = gathered.take(data)
                booking.answer(tokens)
                if lines:
                    self._has_told = True
                    await tell(b"".join(lines))
        except (Unreadable, RequestFailed) as error:
            raise Broken(str(error)) from None
        except ErrorEvent as failure:
            if not failure.is_ours:
                raise failure.error from None
            raise Broken(str(failure), error=failure.error) from None

    async def _prefilled(self, pool: Pool) -> Mapping[str, Any] | None:
        """Returns where the prompt's pages are, None where the answering instance has to compute them."""
        for _ in range(_PREFILL_TRIALS):
            if not pool.is_up:
                break
            try:
                async with pool.book(self._asked.prompt) as booking:
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
        self._fleet.numbers.sent.labels(instance.url).inc()
        try:
            reply = await self._asked_whole(instance, self._asked.prefill())
        except InstanceBusy:
            instance.rest()
            raise
        except Broken as failure:
            await self._note(booking, failure)
            raise InstanceBusy from None
        instance.work()
        if reply.status != 200:
            return None
        self._fleet.numbers.computed.inc()
        return _transfer_of(reply.content)


async def _refusal(instance: Instance, response: StreamedResponse) -> InstanceReply:
    """Returns a refusal that is the client's to read; raises Refused, Broken or ApiError for any other."""
    content = await instance.read(response, _MAX_ERROR_BYTES)
    status, told = response.status, _error_of(content)
    if status in (401, 403):
        _log.error("%s refuses the router's key (%d); see --instance_api_key_file", instance.url, status)
        raise ApiError(502, "an instance refuses the router", kind="server_error", code="instance_refuses")
    if status in (429, 503) and told.get("code") != "engine_unavailable":
        raise InstanceBusy
    if status >= 500:
        text = str(told.get("message") or f"an instance has answered with status {status}")
        raise Broken(f"status {status}", error=ApiError(status, text, kind="server_error", code=told.get("code")))
    return InstanceReply(status, response.headers.get("content-type", "application/json"), content)


def _error_of(content: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else {}


def _transfer_of(content: bytes) -> Mapping[str, Any] | None:
    try:
        found = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    params = found.get("kv_transfer_params") if isinstance(found, dict) else None
    return params if isinstance(params, dict) else None
