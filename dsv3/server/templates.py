"""Renders chat templates in worker processes with a time limit.

`TemplatePool` runs in the API server, `python -m dsv3.server.templates` (this file) is the worker.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from dsv3.processes import frames
from dsv3.server.limits import SMALL_BYTES, WAIT_S, WorkerQueue
from dsv3.server.worker_process import PoisonRequest, WorkerProcess, serve_requests
from dsv3.text.chat_template import ChatTemplate, TemplateError, ToolMessages
from dsv3.text.special_tokens import SpecialTokens

DEADLINE_S = 10.0  # processor time of one rendering
_MAX_MEMORY_BYTES = 2**30


class RenderSetup(msgspec.Struct, frozen=True, tag=True):
    """First message to the worker; prompts contain `markers` in their hidden form (`dsv3.text.special_tokens`)."""

    source: str
    special_tokens: dict[str, str]
    markers: tuple[str, ...] | None = None


class Render(msgspec.Struct, frozen=True, tag=True):
    """Arguments of `ChatTemplate.render`."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: dict[str, object]
    response_format: dict[str, object] | None = None


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The response: the prompt, or the template's `error`."""

    prompt: str = ""
    error: str | None = None


_to_process = msgspec.msgpack.Decoder(RenderSetup | Render)
_from_process = msgspec.msgpack.Decoder(Rendered)


class TemplateTooSlow(TemplateError):
    """The template did not finish within the deadline."""


class TemplatePool:
    """A worker for small conversations and one for large ones, each started on first use.

    More workers would not help: the API server's own work per conversation takes 2 to 4 times as long as the worker's.
    A request waits at most `wait_s` for a worker. With `markers`, prompts contain the template's own markers in their
    hidden form (`dsv3.text.special_tokens`).
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
        setup = frames.encode(RenderSetup(source, dict(special_tokens), hidden))
        self._deadline_s = deadline_s
        self._processes = [
            WorkerProcess("dsv3.server.templates", "renders chats", setup, deadline_s, _raise_if_invalid)
            for _ in range(2)
        ]
        self._small = WorkerQueue(self._processes[:1], wait_s)
        self._large = WorkerQueue(self._processes[1:], wait_s)

    async def check(self) -> None:
        """Starts the worker for small conversations; raises TemplateError for an invalid template."""
        await self._small.run(0, WorkerProcess.start)

    def render(self, request: Render) -> Coroutine[Any, Any, str]:
        """Returns the prompt; raises TemplateError if the template fails for these messages.

        Raises WorkersBusy and WorkerDied if a retry may succeed. Encodes the messages at once, since a frame is many
        times smaller than they are.
        """
        try:
            frame = frames.encode(request)
        except (OverflowError, ValueError, TypeError, RecursionError, frames.FrameError):
            raise TemplateError("a tool or tool call contains a value that cannot be rendered") from None
        return self._render(frame)

    async def _render(self, frame: bytearray) -> str:
        workers = self._small if len(frame) <= SMALL_BYTES else self._large
        try:
            rendered = _from_process.decode(await workers.run(len(frame), lambda process: process.call(frame)))
        except TimeoutError:
            seconds = f"{self._deadline_s:g}"
            raise TemplateTooSlow(f"the chat template took longer than {seconds} s for these messages") from None
        except PoisonRequest:
            raise TemplateError("the chat template crashed two worker processes with these messages") from None
        if rendered.error is not None:
            raise TemplateError(rendered.error)
        return rendered.prompt

    async def close(self) -> None:
        await asyncio.gather(self._small.close(), self._large.close())
        await asyncio.gather(*(process.stop() for process in self._processes))


def _raise_if_invalid(body: bytes) -> None:
    """Raises TemplateError if the template is invalid."""
    if (error := _from_process.decode(body).error) is not None:
        raise TemplateError(error)


def escaping_template(source: str, special_tokens: Mapping[str, str], markers: SpecialTokens) -> ChatTemplate:
    """Returns the template that writes its markers in their hidden form.

    Raises TemplateError if the prompt of a sample differs in more than that, as when the template builds a marker from
    parts, or searches messages for a marker that it also writes.
    """
    plain, hiding = ChatTemplate(source, special_tokens), ChatTemplate(source, special_tokens, markers)
    all_markers = "".join(f"x{marker}" for marker in markers.hidden if marker in source)
    for text, thinking in itertools.product(("Hi.", f" {all_markers} "), (False, True)):
        for chat, tools in _samples(text):
            arguments: dict[str, Any] = {"tools": tools, "kwargs": {"thinking": thinking}}
            try:
                prompt = plain.render(chat, **arguments)
            except TemplateError:
                continue  # the model supports no tools
            if not _differs_only_in_hiding(hiding.render(chat, **arguments), prompt, markers, text == "Hi."):
                text = "the markers of this chat template cannot be distinguished from text; serve without this option"
                raise TemplateError(f"escape_special_tokens: {text}")
    return hiding


def _differs_only_in_hiding(hidden: str, prompt: str, markers: SpecialTokens, hides_all: bool) -> bool:
    """Returns whether `hidden` is `prompt` with some markers hidden, or all with `hides_all`."""
    try:
        return markers.show(hidden) == prompt and (not hides_all or hidden == markers.hide(prompt))
    except ValueError:
        return False


def _samples(text: str) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Yields conversations with all kinds of messages, all with `text` as content, and their tools."""
    question, answer = {"role": "user", "content": text}, {"role": "assistant", "content": text}
    yield [question], None
    yield [{"role": "system", "content": text}, question, answer | {"reasoning_content": text}, question], None
    function = {"name": "look", "arguments": f'{{"at": "{text}"}}'}
    calls = {"tool_calls": [{"id": "1", "type": "function", "function": function}]}
    tools = [{"type": "function", "function": {"name": "look", "description": text, "parameters": {"type": "object"}}}]
    results = {"role": "tool", "content": text, "tool_call_id": "1"}
    for content in (None, text):
        yield [question, {"role": "assistant", "content": content, **calls}, results, answer, question], tools


class _Renderer:
    """The worker's side: renders the template of the first message."""

    def __init__(self) -> None:
        self._chat: ChatTemplate | None = None
        self._messages: ToolMessages | None = None

    def handle(self, body: bytes) -> bytearray:
        message = _to_process.decode(body)
        if isinstance(message, Render):
            return self._handle_render(message)
        try:
            if message.markers is None:
                self._chat = ChatTemplate(message.source, message.special_tokens)
            else:
                self._chat = escaping_template(message.source, message.special_tokens, SpecialTokens(message.markers))
        except TemplateError as error:
            return frames.encode(Rendered(error=str(error)))
        self._messages = ToolMessages(self._chat)
        return frames.encode(Rendered())

    def _handle_render(self, request: Render) -> bytearray:
        """Returns the frame of the response, for any exception, too: a crash would make the API server retry."""
        try:
            return frames.encode(Rendered(prompt=self._render(request)))
        except TemplateError as error:
            problem = str(error)
        except MemoryError:
            problem = "the chat template needs too much memory for these messages"
        except frames.FrameError:
            problem = f"the chat template makes more than {frames.MAX_FRAME_BYTES} bytes of these messages"
        except Exception as error:
            problem = f"the chat template cannot render these messages ({type(error).__name__})"
        return frames.encode(Rendered(error=problem))

    def _render(self, request: Render) -> str:
        assert self._chat is not None and self._messages is not None  # by the first message
        return self._chat.render(
            self._messages.prepare(request.messages),
            tools=request.tools,
            response_format=request.response_format,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.kwargs,
        )


if __name__ == "__main__":
    serve_requests(_Renderer().handle, _MAX_MEMORY_BYTES)
