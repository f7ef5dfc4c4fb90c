"""Renders chat templates for the event loop, in processes that are killed past a deadline.

`TemplatePool` is the side of an API server. The process is this file too: `python -m dsv3.server.templates`.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from dsv3.processes import frames
from dsv3.server.limits import SMALL_BYTES, WAIT_S, Workers
from dsv3.server.worker_process import PoisonRequest, WorkerProcess, answer_questions
from dsv3.text.chat_template import ChatTemplate, TemplateError, ToolMessages
from dsv3.text.markers import Markers

# Time of the processor that one rendering may take.
DEADLINE_S = 10.0
_MAX_MEMORY_BYTES = 2**30


class RenderSetup(msgspec.Struct, frozen=True, tag=True):
    """First message to the process; with `markers`, prompts carry those in their hidden spelling."""

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


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The answer; `error` instead of a prompt if the template refuses."""

    prompt: str = ""
    error: str | None = None


_to_process = msgspec.msgpack.Decoder(RenderSetup | Render)
_from_process = msgspec.msgpack.Decoder(Rendered)


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
        setup = frames.encode(RenderSetup(source, dict(special_tokens), hidden))
        self._deadline_s = deadline_s
        self._processes = [
            WorkerProcess("dsv3.server.templates", "renders chats", setup, deadline_s, _require_sound) for _ in range(2)
        ]
        self._small = Workers(self._processes[:1], wait_s)
        self._large = Workers(self._processes[1:], wait_s)

    async def check(self) -> None:
        """Starts a worker for small conversations; raises TemplateError for a template that cannot be used."""
        await self._small.run(0, WorkerProcess.start)

    def render(self, request: Render) -> Coroutine[Any, Any, str]:
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
        try:
            answer = _from_process.decode(await workers.run(len(frame), lambda process: process.ask(frame)))
        except TimeoutError:
            seconds = f"{self._deadline_s:g}"
            raise TemplateTooSlow(f"the chat template took longer than {seconds} s for these messages") from None
        except PoisonRequest:
            raise TemplateError("the chat template has ended two processes over these messages") from None
        if answer.error is not None:
            raise TemplateError(answer.error)
        return answer.prompt

    async def close(self) -> None:
        """Ends the workers."""
        await asyncio.gather(self._small.close(), self._large.close())
        await asyncio.gather(*(process.stop() for process in self._processes))


def _require_sound(body: bytes) -> None:
    """Raises TemplateError where the template cannot be used."""
    if (error := _from_process.decode(body).error) is not None:
        raise TemplateError(error)


def escaping_template(source: str, special_tokens: Mapping[str, str], markers: Markers) -> ChatTemplate:
    """Returns the template whose prompts have hidden markers.

    Raises TemplateError where a sample's prompt differs in more than that: the template then makes a marker of parts,
    or searches messages for one that it also writes.
    """
    plain, hiding = ChatTemplate(source, special_tokens), ChatTemplate(source, special_tokens, markers)
    spelled = "".join(f"x{marker}" for marker in markers.hidden if marker in source)
    for text, thinking in itertools.product(("Hi.", f" {spelled} "), (False, True)):
        for chat, tools in _samples(text):
            arguments: dict[str, Any] = {"tools": tools, "kwargs": {"thinking": thinking}}
            try:
                prompt = plain.render(chat, **arguments)
            except TemplateError:
                continue  # not every model knows tools
            if not _differs_in_spelling_alone(hiding.render(chat, **arguments), prompt, markers, text == "Hi."):
                raise TemplateError("escape_special_tokens: the markers of this chat template cannot be told from text")
    return hiding


def _differs_in_spelling_alone(hidden: str, prompt: str, markers: Markers, all_are_written: bool) -> bool:
    """Returns whether two prompts differ in nothing but markers that are hidden: in all of them, or in some."""
    try:
        return markers.show(hidden) == prompt and (not all_are_written or hidden == markers.hide(prompt))
    except ValueError:
        return False


def _samples(text: str) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Yields conversations of all kinds of messages that say `text`, with the tools they may use."""
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
    """Renders one template, which the first message brings."""

    def __init__(self) -> None:
        self._chat: ChatTemplate | None = None
        self._messages: ToolMessages | None = None

    def answer(self, body: bytes) -> bytearray:
        """Returns the frame of the answer."""
        message = _to_process.decode(body)
        if isinstance(message, Render):
            return self._answer(message)
        try:
            self._chat = _template(message)
        except TemplateError as error:
            return frames.encode(Rendered(error=str(error)))
        self._messages = ToolMessages(self._chat)
        return frames.encode(Rendered())

    def _answer(self, request: Render) -> bytearray:
        """Returns the frame of the answer whatever happens: messages that end the process are asked for once more."""
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
        assert self._chat is not None and self._messages is not None  # the first message has brought them
        return self._chat.render(
            self._messages.prepared(request.messages),
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.kwargs,
        )


def _template(setup: RenderSetup) -> ChatTemplate:
    if setup.markers is None:
        return ChatTemplate(setup.source, setup.special_tokens)
    return escaping_template(setup.source, setup.special_tokens, Markers(setup.markers))


if __name__ == "__main__":
    answer_questions(_Renderer().answer, _MAX_MEMORY_BYTES)
