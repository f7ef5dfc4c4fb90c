"""The process that renders chat templates for a server: one frame in, one frame out, on its standard streams.

It can be killed when a template takes too long, which a thread cannot, and its memory is bounded.
"""

import resource
import signal
import sys

from dsv3.api import frames
from dsv3.api.templates import messages
from dsv3.text.chat_template import ChatTemplate, TemplateError

_MAX_MEMORY_BYTES = 2**30
# The parent kills a late worker much earlier; this ends one whose parent was itself killed.
_MAX_RENDER_S = 60


def main() -> None:
    """Serves until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    template: ChatTemplate | None = None
    while (body := frames.read_frame(sys.stdin.buffer)) is not None:
        message = messages.to_worker.decode(body)
        if isinstance(message, messages.RenderSetup):
            template, answer = _compile(message)
        else:
            signal.alarm(_MAX_RENDER_S)
            answer = _render(template, message)
            signal.alarm(0)
        sys.stdout.buffer.write(frames.encode(answer))
        sys.stdout.buffer.flush()


def _compile(setup: messages.RenderSetup) -> tuple[ChatTemplate | None, messages.Rendered]:
    try:
        return ChatTemplate(setup.source, setup.special_tokens), messages.Rendered()
    except TemplateError as error:
        return None, messages.Rendered(error=str(error))


def _render(template: ChatTemplate | None, request: messages.Render) -> messages.Rendered:
    if template is None:
        return messages.Rendered(error="the chat template does not compile")
    try:
        prompt = template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.kwargs,
        )
    except TemplateError as error:
        return messages.Rendered(error=str(error))
    except MemoryError:
        return messages.Rendered(error="the chat template needs too much memory for these messages")
    return messages.Rendered(prompt=prompt)


if __name__ == "__main__":
    main()
