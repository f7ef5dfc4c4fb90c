"""An instance as its router sees it: health, load, rests, and a way to ask it that ends when it falls silent."""

import asyncio
import contextlib
import dataclasses
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from dsv3.http_client import Address, Body, Client, RequestFailed, StreamedResponse
from dsv3.server.protocol.errors import ApiError
from router.cached_pages import EventEndpoint, Listener
from router.policy import InFlightPrompts, InstanceLoad, SentPages, cost_of
from router.request import Prompt

DEFAULT_CONCURRENCY = 64
Tls = ssl.SSLContext | None
"""Whom to trust at https://; None is whom the system trusts."""

_REST_S = 1.0, 30.0
_FAILURES = 3
_MAX_HEALTH_BYTES = 2**16
_SILENCES = 3  # waits for /health without a word, after which what is in flight goes elsewhere
_BUSY_S = 0.1, 2.0  # an instance that has refused a request is left alone; twice as long each time


class Broken(Exception):
    """The instance has not answered to the end; `has_arrived`: it may have worked on the request.

    `error` is what it said of it, None where it just ended.
    """

    def __init__(self, reason: str, *, has_arrived: bool = True, error: ApiError | None = None):
        super().__init__(reason)
        self.has_arrived, self.error = has_arrived, error


class _ServedModel(msgspec.Struct):
    max_num_seqs: int | None = None
    data_parallel_size: int | None = None
    kv_events: EventEndpoint | None = None


class _ServedModels(msgspec.Struct):
    data: list[_ServedModel] = []


@dataclasses.dataclass
class Breaker:
    """Opens after three failures in a row, for a second and then twice as long each time; then one request may try.

    Requests are told apart by identity: those that were sent before it opened say nothing of the one that tries. Times
    are seconds of a monotonic clock.
    """

    failures: int = 0
    opens_until: float = 0.0
    rest_s: float = _REST_S[0]
    trial: object | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last requests have failed."""
        return self.failures >= _FAILURES

    def allows(self, now: float) -> bool:
        """Returns whether a request may be sent."""
        return not self.is_open or (now >= self.opens_until and self.trial is None)

    def send(self, request: object) -> None:
        """Notes that a request is sent: while the breaker is open, the only one."""
        if self.is_open:
            self.trial = request

    def answer(self, request: object) -> None:
        """Notes that a request gets its first tokens. The one that tried closes the breaker; a failure opens it again.

        Its end may be minutes away, and one request at a time is little.
        """
        if request is self.trial:
            self.failures, self.trial = _FAILURES - 1, None

    def succeed(self) -> None:
        """Notes that a request was answered to its end: the next rest is a short one."""
        self.failures, self.opens_until, self.rest_s, self.trial = 0, 0.0, _REST_S[0], None

    def fail(self, request: object, now: float) -> None:
        """Notes that a request has failed."""
        if self.is_open and request is not self.trial:
            return
        self.failures += 1
        if self.is_open:
            self.opens_until = now + self.rest_s
            self.rest_s = min(2 * self.rest_s, _REST_S[1])

    def end(self, request: object) -> None:
        """Notes that a request has ended. One that tried makes room for the next, also where it says nothing."""
        if request is self.trial:
            self.trial = None


class Instance:
    """One instance. `status` is "ok" where /health says so, what it says instead, or "unknown", "gone" or "silent"."""

    def __init__(self, url: str, api_key: str | None, concurrency: int | None, health_s: float, tls: Tls = None):
        self.url, self.status = url, "unknown"
        self.load, self.sent, self.flying, self.breaker = InstanceLoad(), SentPages(), InFlightPrompts(), Breaker()
        self.lease_until: float | None = None  # of a monotonic clock; None is for ever
        self.listener: Listener | None = None
        self._address = Address.parse(url)
        self._client = Client(self._address, api_key, tls)
        self._given, self.concurrency = concurrency, concurrency or DEFAULT_CONCURRENCY
        self._health_s, self._silences = health_s, 0
        self._rests_until, self._rest_s = 0.0, _BUSY_S[0]
        self._reading: set[asyncio.Timeout] = set()

    @property
    def has_room(self) -> bool:
        """Whether a request may be sent now."""
        now = time.monotonic()
        is_free = self.status == "ok" and now >= self._rests_until and self.load.requests < self.concurrency
        return is_free and self.is_leased(now) and self.breaker.allows(now)

    def is_leased(self, now: float) -> bool:
        """Returns whether it is in the fleet: its lease has not ended."""
        return self.lease_until is None or now < self.lease_until

    @property
    def tells(self) -> bool:
        """Whether it says which pages it holds, and has been heard."""
        return self.listener is not None and self.listener.is_live

    def overlap(self, prompt: Prompt) -> int:
        """Returns how many pages of a prompt it finds: as it tells, or else as this router has sent there.

        What is salted finds its tenant's pages only, and events do not say whose a page is: so both must hold.
        """
        sent = self.sent.overlap(prompt.keys)
        if self.listener is None or not self.listener.is_live or prompt.spelled is None:
            return sent
        held = self.listener.held.overlap(prompt.spelled)
        return min(held, sent) if prompt.is_salted else max(held, self.flying.overlap(prompt.keys))

    def rest(self) -> None:
        """Notes that it has refused a request for want of room."""
        self._rests_until = time.monotonic() + self._rest_s
        self._rest_s = min(2 * self._rest_s, _BUSY_S[1])

    def work(self) -> None:
        """Notes that it answers."""
        self._rest_s = _BUSY_S[0]
        self.breaker.succeed()

    @contextlib.asynccontextmanager
    async def ask(self, path: str, body: Body, headers: dict[str, str]) -> AsyncIterator[StreamedResponse]:
        """Sends a POST over a connection of its own and yields the response, whatever its status; raises Broken."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with self._heard():
                    found = await stack.enter_async_context(
                        self._client.exchange("POST", path, body, headers, fresh=True)
                    )
            except RequestFailed as error:
                raise Broken(str(error), has_arrived=error.kind != "connect") from None
            except TimeoutError:
                raise Broken("the instance is silent") from None
            yield found

    async def pieces(self, response: StreamedResponse) -> AsyncIterator[bytes]:
        """Yields the body of a StreamedResponse as it comes; raises Broken."""
        pieces = response.pieces()
        while True:
            try:
                async with self._heard():
                    piece = await anext(pieces, None)
            except (RequestFailed, TimeoutError) as error:
                raise Broken(str(error) or "the instance is silent") from None
            if piece is None:
                return
            yield piece

    async def read(self, response: StreamedResponse, limit: int) -> bytes:
        """Returns the body of a StreamedResponse; raises Broken, also for more than `limit` bytes."""
        body = bytearray()
        async for piece in self.pieces(response):
            body += piece
            if len(body) > limit:
                raise Broken(f"an answer has more than {limit} bytes")
        return bytes(body)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Returns status and body of a GET; raises RequestFailed, and TimeoutError after the time for /health."""
        async with asyncio.timeout(self._health_s), self._client.exchange("GET", path) as response:
            return response.status, await response.read(_MAX_HEALTH_BYTES)

    async def post(self, path: str, body: bytes, limit: int) -> tuple[int, bytes]:
        """Returns status and the first `limit` bytes of what a POST gives; raises what `get` does."""
        async with asyncio.timeout(self._health_s), self._client.exchange("POST", path, body) as response:
            return response.status, await response.read(limit)

    async def probe(self) -> None:
        """Asks for the health and notes the answer."""
        before = self.status
        try:
            code, body = await self.get("/health")
        except TimeoutError:
            self._silences += 1
            if self._silences >= _SILENCES:
                self.status = "silent"
                self._cut()
            return
        except RequestFailed:
            self._note("gone")
            return
        self._note("ok" if code == 200 else _said(body))
        if self.status == "ok" and before != "ok":
            await self._greet(is_new=before != "silent")

    async def close(self) -> None:
        """Closes idle connections, and listens no more."""
        await self._client.close()
        self._listen_to(None)

    def _note(self, status: str) -> None:
        self.status, self._silences = status, 0

    async def _greet(self, is_new: bool) -> None:
        """Learns how much runs there at a time; forgets failures, and what an earlier process had in its cache."""
        self.breaker.succeed()
        if is_new:
            self.sent.clear()
        with contextlib.suppress(RequestFailed, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError):
            models = msgspec.json.decode((await self.get("/v1/models"))[1], type=_ServedModels).data
            if self._given is None:
                self.concurrency = 2 * max((model.max_num_seqs or 0 for model in models), default=0)
                self.concurrency = self.concurrency or DEFAULT_CONCURRENCY
            self.load.ranks = max([1, *(model.data_parallel_size or 1 for model in models)])
            source = next((model.kv_events for model in models if model.kv_events is not None), None)
            if is_new or source is None:
                self._listen_to(None if source is None else source.at(self._address.host))

    def _listen_to(self, source: EventEndpoint | None) -> None:
        if self.listener is not None:
            self.listener.close()
        self.listener = None if source is None else Listener(source, self.url)
        if self.listener is not None:
            self.listener.start()

    @contextlib.asynccontextmanager
    async def _heard(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Raises TimeoutError inside of the `async with` when the instance has fallen silent, or after `seconds`."""
        async with asyncio.timeout(seconds) as wait:
            self._reading.add(wait)
            try:
                yield
            finally:
                self._reading.discard(wait)

    def _cut(self) -> None:
        """Has everybody who waits for this instance wait no more."""
        for wait in list(self._reading):
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())


def _said(body: bytes) -> str:
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "unwell"
    status = found.get("status") if isinstance(found, dict) else None
    return status if isinstance(status, str) and status != "ok" else "unwell"


class Booking:
    """One request at an instance, which finds `pages` of its prompt, as far as its load is concerned."""

    def __init__(self, instance: Instance, prompt: Prompt, pages: int):
        self.instance = instance
        self._cost, self._held = cost_of(prompt, pages), prompt.tokens
        self._flying = prompt.keys if prompt.spelled is not None else ()
        load = instance.load
        load.prefill, load.held, load.requests = load.prefill + self._cost, load.held + self._held, load.requests + 1
        instance.sent.note(prompt.keys)
        instance.flying.add(self._flying)
        instance.breaker.send(self)

    def answer(self, tokens: int) -> None:
        """Notes tokens of the answer; the prompt is computed, then."""
        self.instance.load.prefill -= self._cost
        self.instance.load.held += tokens
        self._cost, self._held = 0.0, self._held + tokens
        self._land()
        if tokens:
            self.instance.breaker.answer(self)

    def _land(self) -> None:
        self.instance.flying.remove(self._flying)
        self._flying = ()

    def close(self) -> None:
        """Takes the request off the load."""
        self._land()
        load = self.instance.load
        load.prefill, load.held, load.requests = load.prefill - self._cost, load.held - self._held, load.requests - 1
        if not load.requests:
            load.prefill = 0.0  # sums of floats
        self.instance.breaker.end(self)
