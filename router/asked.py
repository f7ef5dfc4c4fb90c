"""A client's request, and what an instance is sent for it: at first, behind a failure, and for the prompt alone.

The client's bytes are kept and sent as they came. Only the fields that the router needs are looked at, and few of these
are decoded. The router's own fields stand behind the client's: of two fields of one name the last one holds.
"""

import array
import dataclasses
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dsv3.http_client import Body
from dsv3.server.answers.errors import invalid
from dsv3.server.answers.reading import read_fields, read_resume
from dsv3.server.answers.schema import MAX_FIELD_BYTES
from router.prompt import BEFORE, CONTENT, Prompt, prompt_of

RESUMABLE = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Routes whose requests take `resume`."""
TOKENIZED = (
    *("model", "prompt", "messages", "add_special_tokens"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
)
"""Fields that `/tokenize` takes, too."""

_OTHER_HALF = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields that say whom an instance connects to: the router's to say."""
_MAX_CHOICES = 4096
_MAX_SEED = 2**31
_MAX_NUMBER_BYTES = 20
# What a prefill instance has no use for: it computes the prompt, and all else is said to the decode instance.
_ANSWER_FIELDS = (
    *("stream", "stream_options", "n", "best_of", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "min_tokens"),
    *("max_completion_tokens", "return_token_ids", "resume", "stop", "stop_token_ids"),
    *("response_format", "structured_outputs"),
)
_NAMES = {*BEFORE, *CONTENT, *TOKENIZED, *_OTHER_HALF, *_ANSWER_FIELDS, "seed", "priority", "sampling_params"}
_Fields = msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.UNSET) for name in sorted(_NAMES)])
_Sampling = msgspec.defstruct("Sampling", [("priority", msgspec.Raw, msgspec.UNSET)])


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: its path, its fields with a seed, and what of the answer its client wants.

    `fields` are those that the router looks at and that are not null, undecoded. `head` is the client's body without
    its last brace, `own` is what the router says in it. `given` has the tokens of each choice that the client itself
    resumes from.
    """

    path: str
    fields: Mapping[str, msgspec.Raw]
    head: memoryview
    own: Mapping[str, Any]
    streams: bool
    wants_ids: bool
    is_urgent: bool
    given: tuple[array.array[int], ...]
    prompt: Prompt

    @property
    def is_resumable(self) -> bool:
        """Whether a stream of it can go on elsewhere."""
        return self.path in RESUMABLE and bool(self.given)

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds beside the client's body."""
        return sum(4 * len(ids) for ids in (*self.given, self.prompt.ids or ()))

    def first(self, transfer: Mapping[str, Any] | None) -> Body:
        """Returns what the first instance is sent; `transfer` says where the prompt's pages are."""
        return self._with({}, transfer)

    def again(self, tokens: Sequence[list[int]], transfer: Mapping[str, Any] | None) -> Body:
        """Returns what another one is sent, which goes on behind the tokens that each choice has had."""
        if not any(tokens):
            return self._with({}, transfer)
        return self._with({"resume": {"output_token_ids": tokens}}, transfer)

    def prefill(self) -> Body:
        """Returns what a prefill instance is sent."""
        # vLLM takes null for all of them but `min_tokens`.
        without = {name: 0 if name == "min_tokens" else None for name in _ANSWER_FIELDS if name in self.fields}
        return self._ending(
            self.own | without | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}  # type: ignore
        )

    def _with(self, more: Mapping[str, Any], transfer: Mapping[str, Any] | None) -> Body:
        own = {**self.own, **more}
        if self.streams and self.is_resumable and not self.wants_ids:
            own["return_token_ids"] = True
        if transfer is not None:
            own["kv_transfer_params"] = transfer
        return self._ending(own)

    def _ending(self, own: Mapping[str, Any]) -> Body:
        """Returns the client's body with the router's fields at its end."""
        comma = b"," if own and re.fullmatch(rb"\s*\{\s*", self.head) is None else b""
        return self.head, comma + msgspec.json.encode(own)[1:]


def read_asked(path: str, data: bytes | bytearray, salt: str = "") -> Asked:
    """Returns the request in a body; raises ApiError for what is no JSON object, or has more brackets than a server's.

    `salt` keeps what a tenant has cached from others, whose requests come with the same key.
    """
    found = msgspec.structs.asdict(read_fields(_Fields, data))
    fields = {name: raw for name, raw in found.items() if raw is not msgspec.UNSET and memoryview(raw) != b"null"}
    own: dict[str, Any] = {name: None for name in _OTHER_HALF if name in fields}
    if salt:
        own |= _salted(salt, fields.get("cache_salt"))
    if path in RESUMABLE and "seed" not in fields:
        own["seed"] = secrets.randbelow(_MAX_SEED)
    prompt = prompt_of(fields, own.get("cache_salt"))
    return Asked(
        path,
        fields,
        memoryview(data)[: data.rindex(b"}")],
        own,
        _is_true(fields.get("stream")),
        _is_true(fields.get("return_token_ids")),
        _is_urgent(fields),
        _given(fields, prompt.count) if path in RESUMABLE else (),
        prompt,
    )


def _salted(salt: str, raw: msgspec.Raw | None) -> dict[str, str]:
    """Returns a tenant's `cache_salt`; what is no text is left for the instance to refuse."""
    if raw is None:
        return {"cache_salt": f"{salt}-"}
    if bytes(memoryview(raw)[:1]) != b'"':
        return {}
    if len(raw) > MAX_FIELD_BYTES:
        raise invalid(f"cache_salt: takes more than {MAX_FIELD_BYTES} bytes", "cache_salt")
    try:
        return {"cache_salt": f"{salt}-{msgspec.json.decode(raw, type=str)}"}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise invalid("cache_salt: the text is not valid UTF-8", "cache_salt") from None


def _given(fields: Mapping[str, msgspec.Raw], prompts: int) -> tuple[array.array[int], ...]:
    """Returns the tokens of each choice so far; empty where the request is not one that can be understood here."""
    count = prompts * (_number(fields["n"]) if "n" in fields else 1)
    resume = read_resume(fields["resume"]) if "resume" in fields else None
    if not 1 <= count <= _MAX_CHOICES:
        return ()
    if resume is None:
        return tuple(array.array("i") for _ in range(count))
    found: Any = resume.output_token_ids
    if count == 1 and not any(isinstance(each, list | array.array) for each in found):
        found = [found]
    if len(found) != count or not all(isinstance(each, list | array.array) for each in found):
        return ()
    return tuple(array.array("i", each) for each in found)


def _number(raw: msgspec.Raw) -> int:
    """Returns a small integer; 0 for anything else."""
    text = bytes(memoryview(raw)[: _MAX_NUMBER_BYTES + 1])
    return int(text) if re.fullmatch(rb"[0-9]{1,%d}" % _MAX_NUMBER_BYTES, text) else 0


def _is_urgent(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Returns whether a request asks to be served before others: its priority is a number below 0."""
    priorities = [fields.get("priority")]
    if "sampling_params" in fields and bytes(memoryview(fields["sampling_params"])[:1]) == b"{":
        sampling: Any = read_fields(_Sampling, fields["sampling_params"])
        priorities.append(sampling.priority or None)
    return any(raw is not None and bytes(memoryview(raw)[:1]) == b"-" for raw in priorities)


def _is_true(raw: msgspec.Raw | None) -> bool:
    return raw is not None and memoryview(raw) == b"true"
