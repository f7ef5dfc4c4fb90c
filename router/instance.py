"""An instance as its router sees it: health, load, back-off, and requests that are cancelled when it falls silent."""

import asyncio
import contextlib
import dataclasses
import errno
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from dsv3.http_client import Address, Body, Client, RequestFailed, StreamedResponse
from dsv3.scheduler.sent_pages import SentPages
from dsv3.server.protocol.errors import ApiError
from router.cached_pages import EventEndpoint, Listener
from router.policy import InFlightPrompts, InstanceLoad, cost_of
from router.request import Prompt

DEFAULT_CONCURRENCY = 64
_BACKOFF_S = 1.0, 30.0
_FAILURES = 3
_MAX_HEALTH_BYTES = 2**16
_SILENCES = 3  # unanswered /health probes after which requests in flight move to another instance
_NO_ROUTE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT)
_BUSY_S = 0.1, 2.0  # back-off after a refusal: the first one, and the longest; it doubles each time


class InstanceFailed(Exception):
    """The instance did not complete its response; `has_arrived`: it may have worked on the request.

    `error` is the error it sent, None where the connection just ended.
    """

    def __init__(self, reason: str, *, has_arrived: bool = True, error: ApiError | None = None):
        super().__init__(reason)
        self.has_arrived, self.error = has_arrived, error


class _ServedModel(msgspec.Struct):
    version: str | None = None
    max_num_seqs: int | None = None
    data_parallel_size: int | None = None
    kv_events: EventEndpoint | None = None


class _ServedModels(msgspec.Struct):
    data: list[_ServedModel] = []


@dataclasses.dataclass
class CircuitBreaker:
    """Opens after three failures in a row, for 1 s and then twice as long each time; then it admits one probe request.

    Requests are compared by identity: one sent before the breaker opened does not count as the probe. Times are seconds
    of a monotonic clock.
    """

    failures: int = 0
    open_until: float = 0.0
    backoff_s: float = _BACKOFF_S[0]
    probe: object | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last requests failed."""
        return self.failures >= _FAILURES

    def allows(self, now: float) -> bool:
        """Returns whether a request may be sent."""
        return not self.is_open or (now >= self.open_until and self.probe is None)

    def on_send(self, request: object) -> None:
        """Records that a request is sent; while the breaker is open it is the probe."""
        if self.is_open:
            self.probe = request

    def on_first_tokens(self, request: object) -> None:
        """Closes the breaker up to one failure once the probe has tokens: its end may be minutes away."""
        if request is self.probe:
            self.failures, self.probe = _FAILURES - 1, None

    def on_success(self) -> None:
        """Closes the breaker and resets its back-off: a request was answered to its end."""
        self.failures, self.open_until, self.backoff_s, self.probe = 0, 0.0, _BACKOFF_S[0], None

    def on_failure(self, request: object, now: float) -> None:
        """Counts a failure; the third in a row opens the breaker."""
        if self.is_open and request is not self.probe:
            return
        self.failures += 1
        if self.is_open:
            self.open_until = now + self.backoff_s
            self.backoff_s = min(2 * self.backoff_s, _BACKOFF_S[1])

    def on_end(self, request: object) -> None:
        """Frees the place of the probe when it ends, whatever came of it."""
        if request is self.probe:
            self.probe = None


class Instance:
    """One instance. `status` is what /health reports ("ok" where it is healthy), or "unknown", "gone" or "silent".

    `version` is what it has named in /v1/models since it came up, "" where it names none. `tls` has the certificate
    authorities for https:// in place of the system's.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        concurrency: int | None,
        health_s: float,
        tls: ssl.SSLContext | None = None,
    ):
        self.url, self.status, self.version = url, "unknown", ""
        self.load, self.sent = InstanceLoad(), SentPages()
        self.in_flight, self.breaker = InFlightPrompts(), CircuitBreaker()
        self.lease_until: float | None = None  # of a monotonic clock; None: no lease
        self.listener: Listener | None = None
        self._address = Address.parse(url)
        self._client = Client(self._address, api_key, tls)
        self._given, self.concurrency = concurrency, concurrency or DEFAULT_CONCURRENCY
        self._health_s, self._silences = health_s, 0
        self._busy_until, self._busy_s = 0.0, _BUSY_S[0]
        self._reading: set[asyncio.Timeout] = set()

    @property
    def accepts_requests(self) -> bool:
        """Whether a request may be sent now."""
        now = time.monotonic()
        is_free = self.status == "ok" and now >= self._busy_until and self.load.requests < self.concurrency
        return is_free and self.is_leased(now) and self.breaker.allows(now)

    @property
    def is_up(self) -> bool:
        """Whether it is healthy and has not left."""
        return self.status == "ok" and self.is_leased(time.monotonic())

    @property
    def is_reachable(self) -> bool:
        """Whether a process answers there, as far as is known, though it may not be healthy, and has not left."""
        return self.status not in ("gone", "silent") and self.is_leased(time.monotonic())

    def is_leased(self, now: float) -> bool:
        """Returns whether its lease has not ended."""
        return self.lease_until is None or now < self.lease_until

    @property
    def publishes_events(self) -> bool:
        """Whether its KV events arrive, which say which pages it has cached."""
        return self.listener is not None and self.listener.is_live

    def overlap(self, prompt: Prompt) -> int:
        """Returns how many leading pages of a prompt it has cached: by its KV events, or else by what this router sent.

        A salted prompt finds its tenant's pages only, and events name no tenant: there the smaller of both counts.
        """
        sent = self.sent.overlap(prompt.keys)
        if self.listener is None or not self.publishes_events or prompt.token_keys is None:
            return sent
        cached = self.listener.cached.overlap(prompt.token_keys)
        return min(cached, sent) if prompt.is_salted else max(cached, self.in_flight.overlap(prompt.keys))

    def back_off(self) -> None:
        """Sends it nothing for a while: it refused a request as busy."""
        self._busy_until = time.monotonic() + self._busy_s
        self._busy_s = min(2 * self._busy_s, _BUSY_S[1])

    def on_success(self) -> None:
        """Resets back-off and breaker: it completed a response."""
        self._busy_s = _BUSY_S[0]
        self.breaker.on_success()

    @contextlib.asynccontextmanager
    async def post_stream(self, path: str, body: Body, headers: dict[str, str]) -> AsyncIterator[StreamedResponse]:
        """Sends a POST over a new connection and yields the response, whatever its status; raises InstanceFailed."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with self._cancelable():
                    found = await stack.enter_async_context(
                        self._client.exchange("POST", path, body, headers, fresh=True)
                    )
            except RequestFailed as error:
                raise InstanceFailed(str(error), has_arrived=error.kind != "connect") from None
            except TimeoutError:
                raise InstanceFailed("the instance is silent") from None
            yield found

    async def chunks(self, response: StreamedResponse) -> AsyncIterator[bytes]:
        """Yields the body of a StreamedResponse as it comes; raises InstanceFailed."""
        chunks = response.pieces()
        while True:
            try:
                async with self._cancelable():
                    chunk = await anext(chunks, None)
            except (RequestFailed, TimeoutError) as error:
                raise InstanceFailed(str(error) or "the instance is silent") from None
            if chunk is None:
                return
            yield chunk

    async def read(self, response: StreamedResponse, limit: int) -> bytes:
        """Returns the body of a StreamedResponse; raises InstanceFailed.

        Raises ApiError for more than `limit` bytes: another instance would send as many, and this one has not failed.
        """
        body = bytearray()
        async for chunk in self.chunks(response):
            body += chunk
            if len(body) > limit:
                text = f"the response has more than {limit} bytes; send the request with stream"
                raise ApiError(502, text, kind="server_error", code="response_too_large")
        return bytes(body)

    async def fetch(
        self, method: str, path: str, body: bytes = b"", limit: int = _MAX_HEALTH_BYTES
    ) -> tuple[int, bytes]:
        """Returns a response's status and the first `limit` bytes of its body.

        Raises RequestFailed, and TimeoutError after the time for /health.
        """
        async with asyncio.timeout(self._health_s), self._client.exchange(method, path, body) as response:
            return response.status, await response.read(limit)

    async def probe(self) -> None:
        """Reads /health and updates `status`."""
        try:
            code, body = await self.fetch("GET", "/health")
            status = "ok" if code == 200 else _reported_status(body)
            if status == "ok" and self.status != "ok":
                await self._on_up(is_new=self.status != "silent")
        except TimeoutError:
            self._on_silence()
            if self._silences >= _SILENCES:
                self.status = "silent"
        except RequestFailed as error:
            self.status = "gone"
            if _has_no_route(error):
                self._on_silence()
            else:
                self._silences = 0
        else:
            self.status, self._silences = status, 0

    def _on_silence(self) -> None:
        """Counts a probe that the host has not answered; the third in a row cancels all pending reads."""
        self._silences += 1
        if self._silences >= _SILENCES:
            for wait in list(self._reading):
                if not wait.expired():
                    wait.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Closes idle connections and the subscription to KV events."""
        await self._client.close()
        self._subscribe(None)

    async def _on_up(self, is_new: bool) -> None:
        """Reads version and limits of an instance that came up; raises RequestFailed and TimeoutError.

        It resets failures, and the pages that an earlier process had.
        """
        content = (await self.fetch("GET", "/v1/models"))[1]
        self.breaker.on_success()
        if is_new:
            self.sent.clear()
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            models = msgspec.json.decode(content, type=_ServedModels).data
            self.version = next((model.version for model in models if model.version), "")
            if self._given is None:
                self.concurrency = 2 * max((model.max_num_seqs or 0 for model in models), default=0)
                self.concurrency = self.concurrency or DEFAULT_CONCURRENCY
            self.load.ranks = max([1, *(model.data_parallel_size or 1 for model in models)])
            source = next((model.kv_events for model in models if model.kv_events is not None), None)
            if is_new or source is None or self.listener is None:
                self._subscribe(None if source is None else source.at(self._address.host))

    def _subscribe(self, source: EventEndpoint | None) -> None:
        if self.listener is not None:
            self.listener.close()
        self.listener = None if source is None else Listener(source, self.url)
        if self.listener is not None:
            self.listener.start()

    @contextlib.asynccontextmanager
    async def _cancelable(self) -> AsyncIterator[None]:
        """Raises TimeoutError inside the `async with` when the instance falls silent."""
        async with asyncio.timeout(None) as wait:
            self._reading.add(wait)
            try:
                yield
            finally:
                self._reading.discard(wait)


def _has_no_route(error: RequestFailed) -> bool:
    """Returns whether the host cannot be reached: its open connections may then never end.

    A host that refuses connections is reachable: a server that drains may still complete its responses.
    """
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_ROUTE


def _reported_status(body: bytes) -> str:
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "unwell"
    status = found.get("status") if isinstance(found, dict) else None
    return status if isinstance(status, str) and status != "ok" else "unwell"


class Booking:
    """A request's share of an instance's load, from dispatch to `close`; `pages` of its prompt are cached there."""

    def __init__(self, instance: Instance, prompt: Prompt, pages: int):
        self.instance = instance
        self._cost, self._tokens = cost_of(prompt, pages), prompt.tokens
        self._in_flight_keys = prompt.keys if prompt.token_keys is not None else ()
        load = instance.load
        load.prefill, load.held, load.requests = load.prefill + self._cost, load.held + self._tokens, load.requests + 1
        instance.sent.record(prompt.keys)
        instance.in_flight.add(self._in_flight_keys)
        instance.breaker.on_send(self)

    def on_tokens(self, tokens: int) -> None:
        """Counts generated tokens; with the first ones the prompt is computed."""
        self.instance.load.prefill -= self._cost
        self.instance.load.held += tokens
        self._cost, self._tokens = 0.0, self._tokens + tokens
        self._on_prompt_computed()
        if tokens:
            self.instance.breaker.on_first_tokens(self)

    def _on_prompt_computed(self) -> None:
        self.instance.in_flight.remove(self._in_flight_keys)
        self._in_flight_keys = ()

    def close(self) -> None:
        """Removes the request from the load."""
        self._on_prompt_computed()
        load = self.instance.load
        load.prefill, load.held, load.requests = load.prefill - self._cost, load.held - self._tokens, load.requests - 1
        if not load.requests:
            load.prefill = 0.0  # sums of floats
        self.instance.breaker.on_end(self)
