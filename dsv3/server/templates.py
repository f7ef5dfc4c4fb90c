"""Renders chat templates in worker processes with a time limit.

`TemplatePool` runs in the API server, `python -m dsv3.server.templates` (this file) is the worker.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from dsv3.processes import frames
from dsv3.server.limits import SMALL_BYTES, WAIT_S, WorkerQueue
from dsv3.server.worker_process import PoisonRequest, WorkerProcess, serve_requests
from dsv3.text.chat_template import ChatTemplate, TemplateError, ToolMessages
from dsv3.text.special_tokens import SpecialTokens

DEADLINE_S = 10.0  # processor time of one rendering
_MAX_MEMORY_BYTES = 2**30


class RenderSetup(msgspec.Struct, frozen=True):
    """First message to the worker; prompts contain `markers` in their hidden form (`dsv3.text.special_tokens`)."""

    source: str
    special_tokens: dict[str, str]
    markers: tuple[str, ...] | None = None


class Render(msgspec.Struct, frozen=True):
    """Arguments of `ChatTemplate.render`."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: dict[str, object]
    response_format: dict[str, object] | None = None


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
            WorkerProcess("dsv3.server.templates", "renders chats", setup, deadline_s, TemplateError) for _ in range(2)
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
            reply = await workers.run(len(frame), lambda process: process.call(frame))
        except TimeoutError:
            seconds = f"{self._deadline_s:g}"
            raise TemplateError(f"the chat template took longer than {seconds} s for these messages") from None
        except PoisonRequest:
            raise TemplateError("the chat template crashed two worker processes with these messages") from None
        if reply.error is not None:
            raise TemplateError(reply.error)
        return reply.text

    async def close(self) -> None:
        await asyncio.gather(self._small.close(), self._large.close())
        await asyncio.gather(*(process.stop() for process in self._processes))


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


def _make_renderer(body: bytes) -> Callable[[bytes], str]:
    """Returns the worker's renderer for the template of a `RenderSetup`; raises TemplateError for an invalid one."""
    setup = msgspec.msgpack.decode(body, type=RenderSetup)
    if setup.markers is None:
        template = ChatTemplate(setup.source, setup.special_tokens)
    else:
        template = escaping_template(setup.source, setup.special_tokens, SpecialTokens(setup.markers))
    messages, requests = ToolMessages(template), msgspec.msgpack.Decoder(Render)

    def render(body: bytes) -> str:
        request = requests.decode(body)
        return template.render(
            messages.prepare(request.messages),
            tools=request.tools,
            response_format=request.response_format,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.kwargs,
        )

    return render


def _explain(error: Exception) -> str:
    match error:
        case TemplateError():
            return str(error)
        case MemoryError():
            return "the chat template needs too much memory for these messages"
        case frames.FrameError():
            return f"the chat template makes more than {frames.MAX_FRAME_BYTES} bytes of these messages"
    return f"the chat template cannot render these messages ({type(error).__name__})"


if __name__ == "__main__":
    serve_requests(_make_renderer, _explain, _MAX_MEMORY_BYTES)
