"""Answers batch lines with the server's request handlers: the same responses without HTTP.

A line's body means exactly what it means to `launch.serve`, errors included. The engine runs in its own process, as
under the server; this process parses, tokenizes, detokenizes and writes.
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
from dsv3.server.serving.service import Service, make_client, make_service, start_engines
from dsv3.server.serving.spans import begin_timeline, end_trace
from dsv3.server.tenants import Tenant

# A line that finds the queue full retries after the first, and then after twice as long each time, up to the last.
_BUSY_SECONDS = 0.05, 1.0
# Other 503s of a line are retried this often.
_MAX_FAILURES = 8
# Lines that are parsed, rendered and tokenized at a time: more keeps the workers no busier, and takes more memory.
_NUM_PREPARED = 16
# When the engine dies, its requests fail before the client reports the death.
_DEATH_REPORT_SECONDS = 2.0


class _StreamField(msgspec.Struct):
    """The field of a request that a batch refuses."""

    stream: Any = None


_stream_field = msgspec.json.Decoder(_StreamField)
_log = logging.getLogger("dsv3.batch")


class ServiceCompleter:
    """Answers lines through a `Service` whose engine is ready, for `tenant` if it is known.

    Priority numbers of lines are raised to `min_priority`. `permits` limits the lines in flight of all completers that
    share it.
    """

    def __init__(
        self,
        service: Service,
        tenant: Tenant | None = None,
        min_priority: int = -MAX_PRIORITY,
        permits: asyncio.Semaphore | None = None,
    ):
        self._service, self._tenant, self._min_priority = service, tenant, min_priority
        self._permits = permits or contextlib.nullcontext()
        self._preparing = asyncio.Semaphore(_NUM_PREPARED)

    @property
    def concurrency(self) -> int:
        """Lines in flight: twice what the engine runs, so that one waits for each that ends; 1 before it is ready."""
        info = self._service.engine.info
        return 1 if info is None else 2 * info.max_num_seqs

    async def complete(self, url: str, body: bytes) -> Reply:
        """See `Completer`; raises BatchError when the engine has stopped."""
        try:
            async with self._permits:
                return await self._answer(url, body)
        except ApiError as error:
            if error.status == 503:
                raise BatchError(error.body.message) from None
            if error.status >= 500 and error.body.code != ENGINE_DIED:
                await self._check_engine()
            return Reply(error.status, "", msgspec.Raw(error.envelope()))

    async def _answer(self, url: str, body: bytes) -> Reply:
        """Retries until the line is taken, for as long as the engine lives."""
        (seconds, longest), failures = _BUSY_SECONDS, 0
        while True:
            try:
                return await self._try(url, body)
            except ApiError as error:
                failures += error.body.code != QUEUE_FULL
                if error.status != 503 or self._service.status != "ok" or failures == _MAX_FAILURES:
                    raise
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, longest)

    async def _try(self, url: str, body: bytes) -> Reply:
        timeline, prepared = begin_timeline(self._service), None
        try:
            if _stream_field.decode(body).stream:
                raise invalid("stream: not available in a batch; leave it out", "stream", "unsupported_parameter")
            async with self._preparing:
                handler = KINDS[url](self._service, body, self._tenant)
                handler.min_priority, handler.timeline = self._min_priority, timeline
                await handler.prepare()
            prepared = handler
            whole = await handler.whole()
        except Exception as caught:
            if not isinstance(caught, ApiError):
                _log.exception("%s: a line failed", url)
            error = caught if isinstance(caught, ApiError) else internal()
            if error.status != 503:  # after which the line is tried again
                end_trace(self._service, timeline, prepared, error.status)
            raise error from None
        end_trace(self._service, timeline, handler, 200)
        return Reply(200, handler.id, msgspec.Raw(whole), handler.usage.completion_tokens)

    async def _check_engine(self) -> None:
        """Raises BatchError if the engine is down: the failure was not the line's own."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._service.engine.ended.wait(), _DEATH_REPORT_SECONDS)
        if self._service.status != "ok" or self._service.reason:
            raise BatchError(self._service.reason)


def check_fields(url: str, fields: dict[str, Any]) -> None:
    """Raises BatchError for fields that `url` refuses whatever the prompt is."""
    try:
        read(KINDS[url].request_type, msgspec.json.encode(fields))
    except ApiError as error:
        raise BatchError(f"--body: {error}") from None


@contextlib.asynccontextmanager
async def service_completer(config: ServerConfig) -> AsyncIterator[ServiceCompleter]:
    """Yields a completer whose engine is loaded and warm; stops the engine at the end.

    Raises BatchError where the model's files are invalid or the engine cannot start.
    """
    engine = make_client(config)
    try:
        service = await make_service(config, engine, wait_s=None)
    except ValueError as error:
        raise BatchError(str(error)) from error
    try:
        [supervisor] = await start_engines(config, service)
        try:
            await engine.settled.wait()
            if service.status != "ok":
                raise BatchError(service.reason)
            yield ServiceCompleter(service)
        finally:
            await supervisor.close()
    finally:
        await service.close()
