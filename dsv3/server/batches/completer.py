"""Answers batch lines with the functions that the server's routes call: no socket, no HTTP, the same answers.

So a line's body means exactly what it means to `launch.serve`, refusals included. The engine runs in a process of its
own, as under the server; this one reads, tokenises, detokenises and writes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from dsv3.batch.journal import BatchError
from dsv3.batch.run import Reply
from dsv3.scheduler.request import MAX_PRIORITY
from dsv3.server.config import ServerConfig
from dsv3.server.protocol.errors import ENGINE_DIED, QUEUE_FULL, ApiError, internal, invalid
from dsv3.server.serving.handlers import KINDS
from dsv3.server.serving.request_parsing import read
from dsv3.server.serving.service import Service, make_client, make_service, start_engine
from dsv3.server.tenants import Tenant

# A line that finds no room asks again after the first, and each time after twice as long, up to the last.
_BUSY_SECONDS = 0.05, 1.0
# A 503 other than for want of room is the last answer of a line when it comes so often.
_MAX_FAILURES = 8
# Lines that are parsed, rendered and tokenised at a time: more keeps the workers no busier, and holds more memory.
_NUM_PREPARED = 16
# When the engine dies, the failures of its requests arrive before the news of its death.
_OBITUARY_SECONDS = 2.0


class _Streamed(msgspec.Struct):
    """The one field of a request that a batch treats differently from a server."""

    stream: Any = None


_streamed = msgspec.json.Decoder(_Streamed)
_log = logging.getLogger("dsv3.batch")


class ServerCompleter:
    """Answers through a `Service` whose engine is ready, for `tenant` if that is known.

    Lines have a priority number of `earliest_priority` at least. All completers with the same `permits` together answer
    no more lines at a time than these allow.
    """

    def __init__(
        self,
        service: Service,
        tenant: Tenant | None = None,
        earliest_priority: int = -MAX_PRIORITY,
        permits: asyncio.Semaphore | None = None,
    ):
        self._service, self._tenant, self._earliest_priority = service, tenant, earliest_priority
        self._permits = permits or contextlib.nullcontext()
        self._preparing = asyncio.Semaphore(_NUM_PREPARED)

    @property
    def concurrency(self) -> int:
        """Lines to answer at a time: twice what the engine runs, so that one waits for each that ends."""
        info = self._service.engine.info
        assert info is not None  # the engine is ready
        return 2 * info.max_num_seqs

    async def complete(self, url: str, body: bytes) -> Reply:
        """See `Completer`; raises BatchError when the engine has stopped."""
        try:
            if _streamed.decode(body).stream:
                raise invalid("stream: a batch has no streams; leave it out", "stream", "unsupported_parameter")
            async with self._permits:
                return await self._answer(url, body)
        except ApiError as error:
            if error.status == 503:
                raise BatchError(error.body.message) from None
            if error.status >= 500 and error.body.code != ENGINE_DIED:
                await self._check_engine()
            return Reply(error.status, "", msgspec.Raw(error.envelope()))

    async def _answer(self, url: str, body: bytes) -> Reply:
        """Asks until the line is taken, for as long as the engine lives."""
        (seconds, longest), failures = _BUSY_SECONDS, 0
        while True:
            try:
                return await self._ask(url, body)
            except ApiError as error:
                failures += error.body.code != QUEUE_FULL
                if error.status != 503 or self._service.status != "ok" or failures == _MAX_FAILURES:
                    raise
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, longest)

    async def _ask(self, url: str, body: bytes) -> Reply:
        try:
            async with self._preparing:
                answer = KINDS[url](self._service, body, self._tenant)
                answer.earliest_priority = self._earliest_priority
                await answer.prepare()
            whole = await answer.whole()
            return Reply(200, answer.id, msgspec.Raw(whole), answer.usage.completion_tokens)
        except ApiError:
            raise
        except Exception:
            _log.exception("a line failed")
            raise internal() from None

    async def _check_engine(self) -> None:
        """Raises BatchError where a failure was the whole engine's: its requests are then not answered."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.engine.ended.wait(), _OBITUARY_SECONDS)
        if self._service.status != "ok" or self._service.reason:
            raise BatchError(self._service.reason)


def check_fields(url: str, fields: dict[str, Any]) -> None:
    """Raises BatchError for fields with which no row can be asked at `url`, whatever its prompt is."""
    try:
        read(KINDS[url].request_type, msgspec.json.encode(fields))
    except ApiError as error:
        raise BatchError(f"--body: {error}") from None


@contextlib.asynccontextmanager
async def server_completer(config: ServerConfig) -> AsyncIterator[ServerCompleter]:
    """Yields a completer for the time of the `async with`, its engine loaded and warm.

    Raises BatchError when the model's files cannot be used or the engine cannot start.
    """
    engine = make_client(config)
    try:
        service = await make_service(config, engine, wait_s=None)
    except ValueError as error:
        raise BatchError(str(error)) from error
    try:
        supervisor = await start_engine(config, service)
        try:
            await engine.settled.wait()
            if service.status != "ok":
                raise BatchError(service.reason)
            yield ServerCompleter(service)
        finally:
            await supervisor.close()
    finally:
        await service.close()
