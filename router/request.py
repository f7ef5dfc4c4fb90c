"""Parses a client's request, and makes the bodies that instances are sent for it; needs no tokenizer.

The client's bytes are forwarded unchanged. Only the fields that the router needs are read, and few of these are
decoded. The router's own fields are appended: of two fields with one name the last one holds.

A page of a prompt is 256 bytes: 64 token ids of four bytes, or as much of the JSON, since a token has about four bytes.
Each page's key is a hash of all that comes before it. These are not the keys of the prefix cache; they only compare the
beginnings of prompts.
"""

import array
import dataclasses
import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dsv3.http_client import Body
from dsv3.server.protocol.errors import invalid
from dsv3.server.protocol.openai import MAX_FIELD_BYTES
from dsv3.server.serving.request_parsing import read_fields, read_prompt, read_resume
from router.canary import SESSION, conversation_of

BYTES_PER_TOKEN = 4
PAGE_TOKENS = 64
MAX_PAGES = 4096
"""Pages that get keys; what follows counts only as tokens."""
BEFORE = ("model", "cache_salt", "tools", "system", "instructions", "chat_template_kwargs")
"""Fields of a request that come before its content in the prompt."""
CONTENT = ("messages", "prompt", "input", "token_ids")
"""Fields with the content; a request has one of them."""
_PAGE_BYTES = BYTES_PER_TOKEN * PAGE_TOKENS
_LISTS_IDS = ("prompt", "token_ids")
RESUMABLE = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Routes whose requests take `resume`."""
TOKENIZED = (
    *("model", "prompt", "messages", "add_special_tokens"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
)
"""Fields that `/tokenize` has too."""

_OTHER_HALF = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")
"""Fields that name hosts to connect to: only the router sets them."""
_MAX_CHOICES = 4096
_MAX_SEED = 2**31
_MAX_NUMBER_BYTES = 20
# Fields that a prefill instance does not need: it computes the prompt alone.
_ANSWER_FIELDS = (
    *("stream", "stream_options", "n", "best_of", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "min_tokens"),
    *("max_completion_tokens", "return_token_ids", "resume", "stop", "stop_token_ids"),
    *("response_format", "structured_outputs"),
)
_NAMES = {*BEFORE, *CONTENT, *TOKENIZED, *_OTHER_HALF, *_ANSWER_FIELDS, *SESSION}
_NAMES |= {"seed", "priority", "sampling_params"}
_Fields = msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.UNSET) for name in sorted(_NAMES)])
_Sampling = msgspec.defstruct("Sampling", [("priority", msgspec.Raw, msgspec.UNSET)])


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Keys of the full pages, and the approximate number of tokens.

    `token_keys` are page keys over token ids (`router.cached_pages`), None where these are not known. `is_salted`: it
    finds only its tenant's pages. `ids` are its token ids, None for text. It may be a list of `count` prompts.
    """

    keys: tuple[bytes, ...]
    tokens: int
    token_keys: tuple[bytes, ...] | None = None
    is_salted: bool = False
    ids: array.array[int] | None = None
    count: int = 1


def prompt_of(fields: Mapping[str, msgspec.Raw], salt: str | None = None) -> Prompt:
    """Returns the prompt of a request's fields, with `salt` in place of its own; raises ApiError."""
    before: list[bytes | memoryview] = [(salt or "").encode(), *(memoryview(fields.get(name, b"")) for name in BEFORE)]
    name = next((name for name in CONTENT if name in fields), None)
    found = read_prompt(fields[name], name) if name in _LISTS_IDS else None
    if isinstance(found, array.array):
        data = memoryview(np.array(found, "<i4").tobytes())
        ids, size = found, len(data)
    else:
        data = memoryview(b"" if name is None else fields[name])
        ids, size = None, len(data) - 3 * bytes(data).count(rb"\u")  # six bytes of an escape stand for three of text
    tokens, count = max(1, size // BYTES_PER_TOKEN), len(found) if isinstance(found, list) else 1
    is_salted = salt is not None or "cache_salt" in fields
    return Prompt(tuple(_keys(before, data)), tokens, None, is_salted, ids, count)


def _keys(before: Iterable[bytes | memoryview], data: memoryview) -> Iterator[bytes]:
    key = hashlib.blake2b(digest_size=16)
    for part in before:
        key.update(len(part).to_bytes(8))
        key.update(part)
    for start in range(0, min(len(data), MAX_PAGES * _PAGE_BYTES) - _PAGE_BYTES + 1, _PAGE_BYTES):
        key = hashlib.blake2b(key.digest(), digest_size=16)
        key.update(data[start : start + _PAGE_BYTES])
        yield key.digest()


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A request: path, body, and the fields that the router reads.

    `fields` are undecoded, without those that are null. `head` is the client's body without its last brace, `own` are
    the fields that the router appends. `given` has the tokens of each choice from which the client itself resumes.
    `conversation` are 8 bytes that all requests of a conversation have in common.
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
    conversation: bytes

    @property
    def is_resumable(self) -> bool:
        """Whether another instance can resume its stream."""
        return self.path in RESUMABLE and bool(self.given)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes beside the client's body."""
        return sum(4 * len(ids) for ids in (*self.given, self.prompt.ids or ()))

    def body(self, transfer: Mapping[str, Any] | None, tokens: Sequence[list[int]] = ()) -> Body:
        """Returns the body for an instance that answers, and resumes behind `tokens` of each choice.

        `transfer` are the prompt's kv_transfer_params.
        """
        own = dict(self.own)
        if any(tokens):
            own["resume"] = {"output_token_ids": tokens}
        if self.streams and self.is_resumable and not self.wants_ids:
            own["return_token_ids"] = True
        if transfer is not None:
            own["kv_transfer_params"] = transfer
        return self._ending(own)

    def prefill_body(self) -> Body:
        """Returns the body for a prefill instance."""
        # vLLM takes null for all of them but `min_tokens`.
        without = {name: 0 if name == "min_tokens" else None for name in _ANSWER_FIELDS if name in self.fields}
        return self._ending(
            self.own | without | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}  # type: ignore
        )

    def _ending(self, own: Mapping[str, Any]) -> Body:
        """Returns the client's body with the router's fields at its end."""
        comma = b"," if own and re.fullmatch(rb"\s*\{\s*", self.head) is None else b""
        return self.head, comma + msgspec.json.encode(own)[1:]


def parse_request(path: str, data: bytes | bytearray, salt: str = "") -> ParsedRequest:
    """Parses a body; raises ApiError where it is not a JSON object or has too many brackets.

    `salt` separates a tenant's cached pages from those of other tenants, which share the instances' key.
    """
    found = msgspec.structs.asdict(read_fields(_Fields, data))
    fields = {name: raw for name, raw in found.items() if raw is not msgspec.UNSET and memoryview(raw) != b"null"}
    own: dict[str, Any] = {name: None for name in _OTHER_HALF if name in fields}
    if salt:
        own |= _salted(salt, fields.get("cache_salt"))
    if path in RESUMABLE and "seed" not in fields:
        own["seed"] = secrets.randbelow(_MAX_SEED)
    prompt = prompt_of(fields, own.get("cache_salt"))
    content = memoryview(next((fields[name] for name in CONTENT if name in fields), b""))
    return ParsedRequest(
        path,
        fields,
        memoryview(data)[: data.rindex(b"}")],
        own,
        _is_true(fields.get("stream")),
        _is_true(fields.get("return_token_ids")),
        _is_urgent(fields),
        _given(fields, prompt.count) if path in RESUMABLE else (),
        prompt,
        conversation_of(fields, content, salt),
    )


def _salted(salt: str, raw: msgspec.Raw | None) -> dict[str, str]:
    """Returns a tenant's `cache_salt`; a value that is not text is left for the instance to refuse."""
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
    """Returns the tokens of each choice so far; empty where they cannot be parsed."""
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
    """Returns a non-negative integer of up to 20 digits; 0 for anything else."""
    text = bytes(memoryview(raw)[: _MAX_NUMBER_BYTES + 1])
    return int(text) if re.fullmatch(rb"[0-9]{1,%d}" % _MAX_NUMBER_BYTES, text) else 0


def _is_urgent(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Returns whether a request has a priority below 0, before all others."""
    priorities = [fields.get("priority")]
    if "sampling_params" in fields and bytes(memoryview(fields["sampling_params"])[:1]) == b"{":
        sampling: Any = read_fields(_Sampling, fields["sampling_params"])
        priorities.append(sampling.priority or None)
    return any(raw is not None and bytes(memoryview(raw)[:1]) == b"-" for raw in priorities)


def _is_true(raw: msgspec.Raw | None) -> bool:
    return raw is not None and memoryview(raw) == b"true"
