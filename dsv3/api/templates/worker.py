"""The process that renders chat templates for a server: one frame in, one frame out, on its standard streams.

It can be killed when a template takes too long, which a thread cannot, and its memory is bounded.
"""

import contextlib
import resource
import signal
import sys

from dsv3.api import frames
from dsv3.api.templates import messages
from dsv3.text.chat_template import ChatTemplate, TemplateError
from dsv3.text.escaping import escaping_template
from dsv3.text.markers import Markers
from dsv3.text.tool_messages import ToolMessages

_MAX_MEMORY_BYTES = 2**30
# The parent kills a late worker much earlier; this ends one whose parent was itself killed.
_MAX_RENDER_S = 60


class _Template:
    """The chat template, and what prepares messages for it."""

    def __init__(self, chat: ChatTemplate):
        self.chat, self.messages = chat, ToolMessages(chat)


def main() -> None:
    """Serves until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # macOS reserves more addresses than this and refuses the bound
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    template: _Template | None = None
    while (body := frames.read_frame(sys.stdin.buffer)) is not None:
        if template is None:
            template, answer = _compiled(body)
        else:
            signal.alarm(_MAX_RENDER_S)
            answer = _answer(template, body)
            signal.alarm(0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def _compiled(body: bytes) -> tuple[_Template | None, bytearray]:
    setup = messages.to_worker.decode(body)
    if not isinstance(setup, messages.RenderSetup):
        return None, frames.encode(messages.Rendered(error="the chat template does not compile"))
    try:
        return _Template(_template(setup)), frames.encode(messages.Rendered())
    except TemplateError as error:
        return None, frames.encode(messages.Rendered(error=str(error)))


def _template(setup: messages.RenderSetup) -> ChatTemplate:
    if setup.markers is None:
        return ChatTemplate(setup.source, setup.special_tokens)
    return escaping_template(setup.source, setup.special_tokens, Markers(setup.markers))


def _answer(template: _Template, body: bytes) -> bytearray:
    """Returns the frame of the answer whatever happens: a worker that dies is taken for a fault of the machine."""
    try:
        return frames.encode(messages.Rendered(prompt=_render(template, body)))
    except TemplateError as error:
        problem = str(error)
    except MemoryError:
        problem = "the chat template needs too much memory for these messages"
    except frames.FrameError:
        problem = f"the chat template makes more than {frames.MAX_FRAME_BYTES} bytes of these messages"
    except Exception as error:
        problem = f"the chat template cannot render these messages ({type(error).__name__})"
    return frames.encode(messages.Rendered(error=problem))


def _render(template: _Template, body: bytes) -> str:
    request = messages.to_worker.decode(body)
    assert isinstance(request, messages.Render)
    return template.chat.render(
        template.messages.prepared(request.messages),
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        kwargs=request.kwargs,
    )


if __name__ == "__main__":
    main()
