"""Renders chat templates for the event loop, in processes that are killed past a deadline."""

import asyncio
import sys
from collections.abc import Mapping

from dsv3.api import frames
from dsv3.api.templates import messages
from dsv3.text.chat_template import TemplateError

DEADLINE_S = 10.0
# Larger conversations have a worker of their own, so that a slow one delays no small one.
_SMALL_BYTES = 64 * 1024


class TemplateTooSlow(TemplateError):
    """The template did not finish within the deadline."""


class TemplatePool:
    """Two workers for one template: small conversations, large conversations; started when first used."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], deadline_s: float = DEADLINE_S):
        setup = frames.encode(messages.RenderSetup(source, dict(special_tokens)))
        self._small = _Worker(setup, deadline_s)
        self._large = _Worker(setup, deadline_s)

    async def check(self) -> None:
        """Starts the worker for small conversations; raises TemplateError if the template does not compile."""
        await self._small.start()

    async def render(self, request: messages.Render) -> str:
        """Returns the prompt; raises TemplateError, of which TemplateTooSlow is a case."""
        try:
            frame = frames.encode(request)
        except (OverflowError, ValueError, TypeError, RecursionError, frames.FrameError):
            raise TemplateError("a tool or tool call holds a value that cannot be rendered") from None
        worker = self._small if len(frame) <= _SMALL_BYTES else self._large
        answer = await worker.ask(frame)
        if answer.error is not None:
            raise TemplateError(answer.error)
        return answer.prompt

    async def close(self) -> None:
        """Ends the workers."""
        await asyncio.gather(self._small.stop(), self._large.stop())


class _Worker:
    """One process, one question at a time; replaced when it is late or has died."""

    def __init__(self, setup: bytearray, deadline_s: float):
        self._setup = setup
        self._deadline_s = deadline_s
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        async with self._lock:
            await self._running()

    async def ask(self, frame: bytearray) -> messages.Rendered:
        """Returns the answer; the deadline counts the wait for earlier questions, a new process's start does not."""
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                await self._lock.acquire()
        except TimeoutError:
            raise TemplateTooSlow("the server is busy with other chat templates; try again") from None
        try:
            process = await self._running()
            remaining = (deadline.when() or 0) - asyncio.get_running_loop().time()
            return await self._exchange(process, frame, max(remaining, self._deadline_s / 2))
        finally:
            self._lock.release()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dsv3.api.templates.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            answer = await self._exchange(self._process, self._setup, 60.0)
            if answer.error is not None:
                raise TemplateError(answer.error)
        return self._process

    async def _exchange(
        self, process: asyncio.subprocess.Process, frame: bytearray, seconds: float
    ) -> messages.Rendered:
        assert process.stdin is not None and process.stdout is not None
        finished = False
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(frame)
                await process.stdin.drain()
                body = await frames.read_frame_async(process.stdout)
            finished = body is not None
        except TimeoutError:
            raise TemplateTooSlow(f"the chat template took longer than {seconds:.0f} s for these messages") from None
        except ConnectionError:
            body = None
        finally:
            if not finished:  # late, dead, or its client has gone: the next question gets a fresh process
                await self._kill(process)
        if body is None:
            raise TemplateError("the chat template cannot render these messages (its process ended)")
        return messages.from_worker.decode(body)

    async def stop(self) -> None:
        if self._process is not None:
            await self._kill(self._process)

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._process = None
        if process.returncode is None:
            process.kill()
        await process.wait()
