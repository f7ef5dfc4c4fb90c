"""Renders chat templates for the event loop, in processes that are killed past a deadline."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from dsv3.processes import frames
from dsv3.server.asking import AskedProcess, DeadlyQuestion
from dsv3.server.limits import SMALL_BYTES, WAIT_S, Workers
from dsv3.server.templates import messages
from dsv3.text.chat_template import TemplateError

# Time of the processor that one rendering may take.
DEADLINE_S = 10.0


class TemplateTooSlow(TemplateError):
    """The template did not finish within the deadline."""


class TemplatePool:
    """A worker for small conversations and one for large ones, each started when first used.

    A second one of a kind would wait for the front, whose own work per conversation takes 2 to 4 times its worker's
    (benchmarks/chat_prompts.py). Nobody waits longer than `wait_s` for a worker. With `markers`, prompts carry the
    template's own in their hidden spelling (`dsv3.text.markers`).
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        deadline_s: float = DEADLINE_S,
        wait_s: float | None = WAIT_S,
        markers: Iterable[str] | None = None,
    ):
        hidden = None if markers is None else tuple(markers)
        setup = frames.encode(messages.RenderSetup(source, dict(special_tokens), hidden))
        self._workers = [_Worker(setup, deadline_s) for _ in range(2)]
        self._small = Workers(self._workers[:1], wait_s)
        self._large = Workers(self._workers[1:], wait_s)

    async def check(self) -> None:
        """Starts a worker for small conversations; raises TemplateError for a template that cannot be used."""
        await self._small.run(0, lambda worker: worker.start())

    def render(self, request: messages.Render) -> Coroutine[Any, Any, str]:
        """Returns the prompt; raises TemplateError where template or messages are to blame.

        WorkersBusy and WorkerDied say that the same messages may be rendered later. Who waits keeps a frame of bytes:
        the messages as objects are many times larger.
        """
        try:
            frame = frames.encode(request)
        except (OverflowError, ValueError, TypeError, RecursionError, frames.FrameError):
            raise TemplateError("a tool or tool call holds a value that cannot be rendered") from None
        return self._render(frame)

    async def _render(self, frame: bytearray) -> str:
        workers = self._small if len(frame) <= SMALL_BYTES else self._large
        answer = await workers.run(len(frame), lambda worker: worker.render(frame))
        if answer.error is not None:
            raise TemplateError(answer.error)
        return answer.prompt

    async def close(self) -> None:
        """Ends the workers."""
        await asyncio.gather(self._small.close(), self._large.close())
        await asyncio.gather(*(worker.stop() for worker in self._workers))


class _Worker(AskedProcess):
    """One process that renders."""

    def __init__(self, setup: bytearray, deadline_s: float):
        super().__init__("dsv3.server.templates.worker", "renders chats", setup, deadline_s, _require_sound)
        self._seconds = deadline_s

    async def render(self, frame: bytearray) -> messages.Rendered:
        """Returns the answer to a question; raises TemplateTooSlow, and TemplateError where two processes die of it."""
        try:
            return messages.from_worker.decode(await self.ask(frame))
        except TimeoutError:
            seconds = f"{self._seconds:g}"
            raise TemplateTooSlow(f"the chat template took longer than {seconds} s for these messages") from None
        except DeadlyQuestion:
            raise TemplateError("the chat template has ended two processes over these messages") from None


def _require_sound(body: bytes) -> None:
    """Raises TemplateError where the template cannot be used."""
    if (error := messages.from_worker.decode(body).error) is not None:
        raise TemplateError(error)
