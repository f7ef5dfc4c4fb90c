"""Parses request bodies; none blocks the interpreter, and with it the event loop, for more than some 50 ms at a time.

msgspec holds the interpreter lock while it decodes, so a thread alone does not help. A body of up to `SMALL_BYTES` is
decoded on the event loop. A larger one is decoded in a thread: first the number of objects that it can make is bounded,
then all of it is decoded at once except its lists of token ids, which follow one by one. As Python objects those would
take ten times their bytes: 32 MiB of them 190 ms and 200 MiB at once.

Errors name the field and never repeat its value.
"""

import array
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import inspect
from msgspec.structs import fields

from dsv3.server.limits import SMALL_BYTES
from dsv3.server.protocol.anthropic import MessagesRequest
from dsv3.server.protocol.errors import ApiError, invalid
from dsv3.server.protocol.openai import (
    FUNCTION_NAME_RULE,
    MAX_FIELD_BYTES,
    MAX_PROMPTS,
    MAX_TOKENS_LISTED,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    Resume,
    SampledRequest,
    TokenId,
    TokenizeRequest,
    TransferParams,
)
from dsv3.server.protocol.responses import ResponsesRequest
from dsv3.server.serving.service import Service

# Types of message parts in the APIs whose requests are parsed here -> why they are refused.
_MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_file"), "this model does not take images"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "this model does not take audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "this model does not take video"),
    **dict.fromkeys(("file", "input_file", "document"), "this model does not take files"),
}


def unknown_value_text(kind: Any, path: str, text: str) -> str:
    """Returns the error text for an unknown value of an enumeration; `path` and `text` are from msgspec's error.

    The text does not repeat the value, which may be anything.
    """
    given = re.match(r"Invalid enum value '(\w{1,32})'", text)
    reason = _MEDIA.get(given[1]) if given and path.endswith(".type") else None
    steps = re.findall(r"\.(\w+)|\[[^\]]*\]", path)  # names; "" for an item of a list or an object
    known = sorted({str(value) for value in _values(_info(kind), steps)})
    return (reason or "this value is not known") + (f"; it may be {' or '.join(known)}" if known else "")


@functools.cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _values(info: inspect.Type, steps: list[str]) -> Iterator[str | int | bool | None]:
    """Yields the values of the enumerations at a path."""
    match info:
        case inspect.UnionType(types):
            for each in types:
                yield from _values(each, steps)
        case inspect.LiteralType(values) if not steps:
            yield from values
        case inspect.StructType(fields=fields) if steps and steps[0]:
            for field in fields:
                if field.encode_name == steps[0]:
                    yield from _values(field.type, steps[1:])
        case inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner) if steps and not steps[0]:
            yield from _values(inner, steps[1:])


MAX_TEXT_BYTES = 16 * 2**20
MAX_MESSAGE_PARTS = 16_384  # of all messages together
MAX_BRACKETS = 2**20  # a nested list takes 8 ns to skip, and a key up to 30 ns
# A character takes at most 12 bytes of JSON, as two escaped surrogates.
_JSON_BYTES_PER_CHAR = 12
_SLACK_BYTES = 2**20  # for the fields other than the prompt
_SLICE_BYTES = 2**20
_ABSENT = msgspec.UNSET

_CONVERSATIONS = (ChatRequest, TokenizeRequest, MessagesRequest, ResponsesRequest)
_Buffer = bytes | bytearray | msgspec.Raw


@dataclasses.dataclass(frozen=True)
class PromptLimits:
    """Limits of a prompt: tokens, and bytes of JSON where it is text."""

    tokens: int = MAX_TOKENS_LISTED
    text_bytes: int = MAX_TEXT_BYTES

    @classmethod
    def of(cls, service: Service) -> "PromptLimits":
        """Returns the limits of the served model; no token is longer than the tokenizer's longest."""
        longest = 1 if service.tokenizer is None else service.tokenizer.max_token_chars
        tokens = service.require_ready().rules.max_model_len
        return cls(tokens, min(tokens * longest * _JSON_BYTES_PER_CHAR, MAX_TEXT_BYTES))


async def read_request[T: msgspec.Struct](service: Service, kind: type[T], body: bytes | bytearray) -> T:
    """Returns the request in a body.

    Raises ApiError: 400 with the first invalid field, 503 where too many bodies wait.
    """
    limits = PromptLimits.of(service) if len(body) > SMALL_BYTES else PromptLimits()
    if kind in _CONVERSATIONS and len(body) > limits.text_bytes + _SLACK_BYTES:
        raise _beyond_context("the body", None)
    return await service.read_body(len(body), lambda: read(kind, body, limits))


def read[T: msgspec.Struct](kind: type[T], body: bytes | bytearray, limits: PromptLimits = PromptLimits()) -> T:
    """Returns the request in a body."""
    require_few_brackets(body)
    request = _decode(kind, body, "") if len(body) <= SMALL_BYTES else _read_large(kind, body, limits)
    if issubclass(kind, SampledRequest):
        _refuse_unsupported(kind, body)
    return request


def read_fields[T: msgspec.Struct](kind: type[T], body: _Buffer) -> T:
    """Returns the fields of a body that `kind` declares: small ones, or undecoded as `msgspec.Raw`.

    Raises ApiError as `read` does for too many brackets, for a body that is not a JSON object, and for invalid fields.
    """
    require_few_brackets(body)
    return _decode(kind, body, "")


def read_resume(raw: msgspec.Raw) -> Resume | None:
    """Decodes the field `resume` of a request within the limits of `read`; raises ApiError as it does."""
    return _read_resume(raw, "resume", PromptLimits())


def read_prompt(raw: msgspec.Raw, at: str) -> list[msgspec.Raw] | array.array[int] | msgspec.Raw:
    """Returns the items of a list of prompts, undecoded, or the token ids of a list of these.

    Returns any other value unchanged. Raises ApiError as `read` does.
    """
    if not _is_list(raw):
        return raw
    if _is_list_of_prompts(raw):
        return _items(raw, MAX_PROMPTS, at)
    return _read_ids(raw, at, PromptLimits())


def require_few_brackets(body: _Buffer) -> None:
    """Raises ApiError for a body that takes too long to decode."""
    if len(body) > SMALL_BYTES and _count(body, b"[{:") > MAX_BRACKETS:
        raise invalid(f"the body holds more than {MAX_BRACKETS} brackets, braces and colons")


def converted[T: SampledRequest](kind: type[T], fields: Mapping[str, Any]) -> T:
    """Builds a request from decoded values; those that are None are left out.

    Raises ApiError as `read` does for the same values in a body.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given.keys() & UNSUPPORTED.keys() - set(kind.__struct_fields__):
        if given[name] not in UNSUPPORTED[name]:
            raise _unsupported(name)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error, "", kind) from None


def _unsupported(name: str) -> ApiError:
    return invalid(f"{name} is not supported by this server", name, "unsupported_parameter")


def _read_large[T: msgspec.Struct](kind: type[T], body: _Buffer, limits: PromptLimits) -> T:
    """Decodes a large body: checks the size of its fields first, and decodes lists of token ids separately."""
    found, large = msgspec.structs.asdict(_decode(_fields_of(kind), body, "")), _LARGE[kind]
    given = {name: raw for name, raw in found.items() if raw is not _ABSENT}
    for name, raw in given.items():
        if name not in large and len(raw) > MAX_FIELD_BYTES:
            raise _invalid_at(name, f"takes more than {MAX_FIELD_BYTES} bytes")
    values = {name: read(given.pop(name), name, limits) for name, read in large.items() if read and name in given}
    rest = body if not values else b"{%s}" % b",".join([b'"%s":%s' % (n.encode(), raw) for n, raw in given.items()])
    result = _decode(kind, rest, "")
    for name, value in values.items():
        setattr(result, name, value)
    for name in ("messages", "input"):
        if isinstance(messages := getattr(result, name, None), list):
            parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
            if parts > MAX_MESSAGE_PARTS:
                raise _invalid_at(name, f"more than {MAX_MESSAGE_PARTS} parts in all messages together")
    return result


def _read_prompts(raw: msgspec.Raw, at: str, limits: PromptLimits) -> Any:
    """Returns the text or the token ids in a field, or a list of either."""
    if not _is_list(raw):
        return _read_text(raw, at, limits)
    if not _is_list_of_prompts(raw):
        return _read_ids(raw, at, limits)
    items = enumerate(_items(raw, MAX_PROMPTS, at))
    return [(_read_ids if _is_list(item) else _read_text)(item, f"{at}[{i}]", limits) for i, item in items]


def _read_text(raw: msgspec.Raw, at: str, limits: PromptLimits) -> str | None:
    """Decodes a text; raises ApiError if it cannot fit the context."""
    if len(raw) > max(limits.text_bytes, MAX_FIELD_BYTES):
        raise _beyond_context(at, at)
    return _decode(str | None, raw, at)


def _read_ids(raw: msgspec.Raw, at: str, limits: PromptLimits) -> array.array[int]:
    """Decodes token ids; raises ApiError if they cannot fit the context."""
    if len(raw) > MAX_FIELD_BYTES and _count(raw, b",") >= limits.tokens:
        raise _beyond_context(at, at)
    return array.array("i", _decode(list[TokenId], raw, at))


def _read_listed(raw: msgspec.Raw, at: str, _: PromptLimits) -> array.array[int] | None:
    """Decodes token ids that need not fit the context."""
    if _count(raw, b",") >= MAX_TOKENS_LISTED:
        raise _invalid_at(at, f"more than {MAX_TOKENS_LISTED} token ids")
    found = _decode(list[TokenId] | None, raw, at)
    return None if found is None else array.array("i", found)


def _read_resume(raw: msgspec.Raw, at: str, limits: PromptLimits) -> Resume | None:
    if len(raw) <= max(SMALL_BYTES, len("null")):
        return _decode(Resume | None, raw, at)
    ids = _decode(_fields_of(Resume), raw, at).output_token_ids
    if ids is _ABSENT:
        raise _invalid_at(f"{at}.output_token_ids", "this field is required")
    return Resume(_read_prompts(ids, f"{at}.output_token_ids", limits))


def _read_transfer(raw: msgspec.Raw, at: str, _: PromptLimits) -> TransferParams | None:
    """Decodes transfer parameters, of which only the experts of a prompt may be large: 0.6 KB per token."""
    if len(raw) > MAX_FIELD_BYTES:
        fields = msgspec.structs.asdict(_decode(_fields_of(TransferParams), raw, at))
        for name, value in fields.items():
            if name != "remote_routed_experts" and value is not _ABSENT and len(value) > MAX_FIELD_BYTES:
                raise _invalid_at(f"{at}.{name}", f"takes more than {MAX_FIELD_BYTES} bytes")
    return _decode(TransferParams | None, raw, at)


# Fields that may be large, per request, with the decoder of those that are decoded alone; the others have text.
_LARGE: dict[type, dict[str, Callable[[msgspec.Raw, str, PromptLimits], Any] | None]] = {
    ChatRequest: {"messages": None, "resume": _read_resume, "kv_transfer_params": _read_transfer},
    CompletionRequest: {"prompt": _read_prompts, "resume": _read_resume, "kv_transfer_params": _read_transfer},
    TokenizeRequest: {"prompt": None, "messages": None},
    DetokenizeRequest: {"tokens": _read_listed},
    MessagesRequest: {"messages": None, "system": None},
    ResponsesRequest: {"input": None, "instructions": None},
    GenerateRequest: {"token_ids": _read_listed, "kv_transfer_params": _read_transfer},
}


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder:
    return msgspec.json.Decoder(kind)


def _decode(kind: Any, raw: _Buffer, at: str) -> Any:
    """Decodes a part of a body that lies at the path `at`; raises ApiError with the path of the invalid field."""
    try:
        return _decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        raise invalid_field(error, at, kind) from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not valid JSON: {error}"[:200]) from None
    except UnicodeDecodeError:
        raise invalid("the body is not valid UTF-8") from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None


def invalid_field(error: msgspec.ValidationError, at: str, kind: Any) -> ApiError:
    """400: names the invalid field of the `kind` at the path `at`, and never its value."""
    text, _, path = str(error).partition(" - at `$")
    path = path.removesuffix("`")
    inner = path.removeprefix(".") if at.endswith(".") or not at else path  # ".role", "[0].text" or ""
    return _invalid_at(at + inner, _without_value(text, kind, path))


def _without_value(text: str, kind: Any, path: str) -> str:
    """Returns msgspec's text without the value, which may be anything."""
    if "matching regex" in text:
        return f"Expected {FUNCTION_NAME_RULE}"
    is_unknown = text.startswith(("Invalid enum value", "Invalid value"))
    return unknown_value_text(kind, path, text) if is_unknown else text[:200]


def _invalid_at(path: str, text: str) -> ApiError:
    path = path.removesuffix(".")[:200]
    return invalid(f"{path or 'body'}: {text}", re.split(r"[.\[]", path)[0] or None)


def _beyond_context(path: str, param: str | None) -> ApiError:
    """400: too long, refused before it is decoded."""
    text = f"{path}: longer than any prompt that fits the model's context"
    return invalid(text, param and re.split(r"[.\[]", param)[0], "context_length_exceeded")


@functools.cache
def _fields_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Returns a type with the same fields, all `msgspec.Raw`."""
    return msgspec.defstruct(f"{kind.__name__}Fields", [(f.encode_name, msgspec.Raw, _ABSENT) for f in fields(kind)])


@functools.cache
def _list_of(limit: int) -> type[msgspec.Struct]:
    """Returns a type for a list of up to `limit` undecoded items; decoding fails at the first one beyond.

    msgspec checks the length of a list only after it has built all of it.
    """
    names = [(f"item_{i}", msgspec.Raw, _ABSENT) for i in range(limit)]
    return msgspec.defstruct(f"AtMost{limit}", names, array_like=True, forbid_unknown_fields=True)


def _items(raw: msgspec.Raw, limit: int, at: str) -> list[msgspec.Raw]:
    items = msgspec.structs.astuple(_decode(_list_of(limit), raw, at))
    return [item for item in items if item is not _ABSENT]


def _is_list(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"["


def _is_list_of_prompts(raw: msgspec.Raw) -> bool:
    return re.match(rb"\[\s{0,64}[\"\[]", memoryview(raw)) is not None


def _count(raw: _Buffer, wanted: bytes) -> int:
    """Counts the occurrences of any of the bytes `wanted`; numpy releases the interpreter lock meanwhile."""
    values, count = np.frombuffer(raw, np.uint8), 0
    for start in range(0, len(values), _SLICE_BYTES):
        piece = values[start : start + _SLICE_BYTES]
        count += sum(int(np.count_nonzero(piece == byte)) for byte in wanted)
    return count


_unsupported_decoder = msgspec.json.Decoder(
    msgspec.defstruct("Unsupported", [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in UNSUPPORTED])
)


def _refuse_unsupported(kind: type[msgspec.Struct], body: bytes | bytearray) -> None:
    """Raises ApiError for `UNSUPPORTED` fields; skips everything else in the body without building it."""
    found = _unsupported_decoder.decode(body)
    for name, harmless in UNSUPPORTED.items():
        raw = bytes(getattr(found, name))
        if raw == b"null" or name in kind.__struct_fields__:
            continue
        if len(raw) > 256 or msgspec.json.decode(raw) not in harmless:
            raise _unsupported(name)
