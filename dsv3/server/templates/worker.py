"""The process that renders chat templates for a server: one frame in, one frame out, on its standard streams.

It can be killed when a template takes too long, which a thread cannot, and its memory is bounded.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from dsv3.processes import frames
from dsv3.server.asking import answer_questions
from dsv3.server.templates import messages
from dsv3.text.chat_template import ChatTemplate, TemplateError
from dsv3.text.markers import Markers
from dsv3.text.tool_messages import ToolMessages


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


_MAX_MEMORY_BYTES = 2**30


class _Renderer:
    """Renders one template, which the first message brings."""

    def __init__(self) -> None:
        self._chat: ChatTemplate | None = None
        self._messages: ToolMessages | None = None

    def answer(self, body: bytes) -> bytearray:
        """Returns the frame of the answer."""
        message = messages.to_worker.decode(body)
        if isinstance(message, messages.Render):
            return self._answer(message)
        try:
            self._chat = _template(message)
        except TemplateError as error:
            return frames.encode(messages.Rendered(error=str(error)))
        self._messages = ToolMessages(self._chat)
        return frames.encode(messages.Rendered())

    def _answer(self, request: messages.Render) -> bytearray:
        """Returns the frame of the answer whatever happens: messages that end the process are asked for once more."""
        try:
            return frames.encode(messages.Rendered(prompt=self._render(request)))
        except TemplateError as error:
            problem = str(error)
        except MemoryError:
            problem = "the chat template needs too much memory for these messages"
        except frames.FrameError:
            problem = f"the chat template makes more than {frames.MAX_FRAME_BYTES} bytes of these messages"
        except Exception as error:
            problem = f"the chat template cannot render these messages ({type(error).__name__})"
        return frames.encode(messages.Rendered(error=problem))

    def _render(self, request: messages.Render) -> str:
        assert self._chat is not None and self._messages is not None  # the first message has brought them
        return self._chat.render(
            self._messages.prepared(request.messages),
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.kwargs,
        )


def _template(setup: messages.RenderSetup) -> ChatTemplate:
    if setup.markers is None:
        return ChatTemplate(setup.source, setup.special_tokens)
    return escaping_template(setup.source, setup.special_tokens, Markers(setup.markers))


if __name__ == "__main__":
    answer_questions(_Renderer().answer, _MAX_MEMORY_BYTES)
