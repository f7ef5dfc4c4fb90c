"""Messages between a front and its template workers; see `dsv3.processes.frames`."""

import msgspec


class RenderSetup(msgspec.Struct, frozen=True, tag=True):
    """First message to a template worker; with `markers`, prompts carry those in their hidden spelling."""

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
    """A template worker's answer; `error` instead of a prompt if the template refuses."""

    prompt: str = ""
    error: str | None = None


ToWorker = RenderSetup | Render

to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(Rendered)
