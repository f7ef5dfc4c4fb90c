"""Reads request bodies: no body keeps the interpreter, and so the event loop, longer than a slice of some 50 ms.

msgspec holds the interpreter's lock while it decodes, so a thread alone helps nobody. A body of up to `SMALL_BYTES` is
decoded at once, which takes 7 ms at most, when it is its turn. A larger one is read in a thread, in pieces: each field,
prompt, message and part by itself, after the number of them has been bounded. Between two pieces the event loop has its
turn.

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

from dsv3.server.answers.errors import ApiError, invalid
from dsv3.server.answers.faces.generate_schema import GenerateRequest
from dsv3.server.answers.faces.messages_schema import ContentBlock, InputMessage, MessagesRequest, TextBlock
from dsv3.server.answers.faces.responses_schema import InputItem, InputPart, ResponsesRequest
from dsv3.server.answers.schema import (
    FUNCTION_NAME_RULE,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_TOKENS_LISTED,
    UNSUPPORTED,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Resume,
    SampledRequest,
    TextPart,
    TokenId,
    TokenizeRequest,
    require_no_nul,
)
from dsv3.server.answers.service import Service
from dsv3.server.limits import SMALL_BYTES

# Types of parts and blocks in the APIs whose requests are read here -> what they would have a model do.
_MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image", "image_file"), "this model reads no images"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "this model hears no audio"),
    **dict.fromkeys(("video_url", "input_video", "video"), "this model sees no video"),
    **dict.fromkeys(("file", "input_file", "document"), "this model reads no files"),
}


def about_unknown(kind: Any, path: str, text: str) -> str:
    """Returns what to say of a value that is none of those known; `path` and `text` are of msgspec's error.

    The value itself is not repeated: it may be any text.
    """
    given = re.match(r"Invalid enum value '(\w{1,32})'", text)
    reason = _MEDIA.get(given[1]) if given and path.endswith(".type") else None
    known = sorted({str(value) for value in _values(_info(kind), _steps(path))})
    return (reason or "this value is not known") + (f"; it may be {' or '.join(known)}" if known else "")


@functools.cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _steps(path: str) -> list[str]:
    """Returns the names in a path, "" for an item of a list or an object."""
    return re.findall(r"\.(\w+)|\[[^\]]*\]", path)


def _values(info: inspect.Type, steps: list[str]) -> Iterator[str | int | bool | None]:
    """Yields the values of the enumerations that a path leads to."""
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


MAX_FIELD_BYTES = 256 * 1024
MAX_TEXT_BYTES = 16 * 2**20  # 64 ms per 32 MiB where every other character is escaped
MAX_MESSAGE_PARTS = 16_384  # of all messages together
MAX_BRACKETS = 2**20  # a nested list takes 8 ns to skip, and a key up to 30 ns
# A character takes at most 12 bytes of JSON, as two escaped surrogates.
_JSON_BYTES_PER_CHAR = 12
_SLACK_BYTES = 2**20  # for the fields beside the prompt
_SLICE_BYTES = 2**20
_ABSENT = msgspec.UNSET

_CONVERSATIONS = (ChatRequest, TokenizeRequest, MessagesRequest, ResponsesRequest)
_Buffer = bytes | bytearray | msgspec.Raw


@dataclasses.dataclass(frozen=True)
class Context:
    """What a prompt may be: so many tokens, and so many bytes of JSON where it is text."""

    tokens: int = MAX_TOKENS_LISTED
    text_bytes: int = MAX_TEXT_BYTES

    @classmethod
    def of(cls, service: Service) -> "Context":
        """Returns the context of the model that is served: no token is longer than the tokenizer's longest."""
        longest = 1 if service.tokenizer is None else service.tokenizer.max_token_chars
        tokens = service.require_ready().rules.max_model_len
        return cls(tokens, min(tokens * longest * _JSON_BYTES_PER_CHAR, MAX_TEXT_BYTES))


async def read_request[T: msgspec.Struct](service: Service, kind: type[T], body: bytes | bytearray) -> T:
    """Returns the request in a body.

    Raises ApiError: 400 that names the first wrong field, 503 where too many bodies wait.
    """
    context = Context.of(service) if len(body) > SMALL_BYTES else Context()
    if kind in _CONVERSATIONS and len(body) > context.text_bytes + _SLACK_BYTES:
        raise _beyond_context("the body", None)
    return await service.read_body(len(body), lambda: read(kind, body, context))


def read[T: msgspec.Struct](kind: type[T], body: bytes | bytearray, context: Context = Context()) -> T:
    """Returns the request in a body, read in pieces if it is large."""
    _require_few_brackets(body)
    request = _Reader(context).struct(kind, body, "")
    if issubclass(kind, SampledRequest):
        _refuse_unsupported(kind, body)
    return request


def read_fields[T: msgspec.Struct](kind: type[T], body: _Buffer) -> T:
    """Returns those fields of a body that `kind` has. They are of type `msgspec.Raw`: nothing is decoded.

    Raises ApiError as `read` does for a body of too many brackets, and for what is no JSON object.
    """
    _require_few_brackets(body)
    return _decode(kind, body, "")


def read_resume(raw: msgspec.Raw) -> Resume | None:
    """Returns the field `resume` of a request, decoded within the bounds of `read`; raises ApiError as that does."""
    return _Reader(Context()).resume(raw, "resume")


def read_prompt(raw: msgspec.Raw, at: str) -> list[msgspec.Raw] | array.array[int] | msgspec.Raw:
    """Returns the prompts in a field, undecoded, where it lists several; its token ids, where it lists these.

    What is no list is returned as it is. Raises ApiError as `read` does.
    """
    if not _is_list(raw):
        return raw
    if _is_list_of_prompts(raw):
        return _items(raw, MAX_PROMPTS, at)
    return _Reader(Context()).prompt_ids(raw, at)


def _require_few_brackets(body: _Buffer) -> None:
    if len(body) > SMALL_BYTES and _count(body, b"[{:") > MAX_BRACKETS:
        raise invalid(f"the body holds more than {MAX_BRACKETS} brackets, braces and colons")


def converted[T: SampledRequest](kind: type[T], fields: Mapping[str, Any]) -> T:
    """Returns a request of values that were decoded already; those that are None are left out.

    Raises ApiError as `read` does for the same in a body.
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


class _Reader:
    """Reads what is large piece by piece; `at` is the path of a piece, for errors."""

    def __init__(self, context: Context):
        self._context = context
        self._large = self._large_fields()

    def struct[T: msgspec.Struct](self, kind: type[T], raw: _Buffer, at: str) -> T:
        """Returns an object; of a large one those fields that may be large are read by themselves, the rest at once."""
        readers = self._large.get(kind, {})
        if len(raw) <= SMALL_BYTES or not readers:
            return _decode(kind, raw, at)
        found = msgspec.structs.asdict(_decode(_fields_of(kind), raw, at))
        given = {name: field for name, field in found.items() if field is not _ABSENT}
        values = {name: readers[name](given.pop(name), f"{at}{name}") for name in readers if name in given}
        for name, field in given.items():
            if len(field) > MAX_FIELD_BYTES:
                raise _invalid_at(f"{at}{name}", f"takes more than {MAX_FIELD_BYTES} bytes")
        required = {
            field.encode_name: b"[]" for field in fields(kind) if field.required and field.encode_name in values
        }
        rest = b",".join(b'"%s":%s' % (name.encode(), field) for name, field in (given | required).items())
        result = _decode(kind, b"{%s}" % rest, at)
        for name, value in values.items():
            setattr(result, name, value)
        return result

    def _large_fields(self) -> dict[type, dict[str, Callable[[msgspec.Raw, str], Any]]]:
        """Returns for each type its fields that may be large, and what reads them. They have defaults or are lists."""
        messages, content = self._of(self._messages, ChatMessage), self._of(self._content, TextPart)
        texts, parts = self._of(self._content, TextBlock), self._of(self._content, InputPart)
        return {
            ChatMessage: {"content": content, "reasoning_content": self._text, "reasoning": self._text},
            CompletionRequest: {"prompt": self._prompts, "resume": self.resume},
            Resume: {"output_token_ids": self._prompts},
            DetokenizeRequest: {"tokens": self._token_ids},
            TokenizeRequest: {"prompt": self._text, "messages": messages},
            ChatRequest: {"messages": messages, "resume": self.resume},
            GenerateRequest: {"token_ids": self._token_ids},
            MessagesRequest: {"system": texts, "messages": self._of(self._messages, InputMessage)},
            InputMessage: {"content": self._of(self._content, ContentBlock)},
            ContentBlock: {"text": self._text, "thinking": self._text, "content": texts},
            ResponsesRequest: {"instructions": self._text, "input": self._of(self._messages, InputItem)},
            InputItem: {"content": parts, "output": parts},
        }

    def resume(self, raw: msgspec.Raw, at: str) -> Resume | None:
        small = len(raw) <= max(SMALL_BYTES, len("null"))
        return _decode(Resume | None, raw, at) if small else self.struct(Resume, raw, f"{at}.")

    @staticmethod
    def _of(read: Callable[..., Any], kind: type) -> Callable[[msgspec.Raw, str], Any]:
        return functools.partial(read, kind)

    def _messages(self, kind: Any, raw: msgspec.Raw, at: str) -> list[Any] | str | None:
        """Returns the messages of a conversation, or the text that stands for them in some."""
        if not _is_list(raw):
            return self._text(raw, at) if kind is InputItem else _decode(list[kind] | None, raw, at)
        messages, num_parts = [], 0
        for i, item in enumerate(_items(raw, MAX_MESSAGES, at)):
            messages.append(message := self.struct(kind, item, f"{at}[{i}]."))
            num_parts += len(message.content) if isinstance(message.content, list) else 0
            if num_parts > MAX_MESSAGE_PARTS:
                raise _invalid_at(at, f"more than {MAX_MESSAGE_PARTS} parts in all messages together")
        if not messages:
            raise _invalid_at(at, "at least one is needed")
        return messages

    def _content(self, kind: type[msgspec.Struct], raw: msgspec.Raw, at: str) -> str | list[Any] | None:
        if not _is_list(raw):
            return self._text(raw, at)
        items = enumerate(_items(raw, MAX_PARTS, at))
        return [self.struct(kind, self._bounded(item, at), f"{at}[{i}].") for i, item in items]

    def _prompts(self, raw: msgspec.Raw, at: str) -> Any:
        if not _is_list(raw):
            return self._text(raw, at)
        if not _is_list_of_prompts(raw):
            return self.prompt_ids(raw, at)
        items = enumerate(_items(raw, MAX_PROMPTS, at))
        return [self._prompt(item, f"{at}[{i}]") for i, item in items]

    def _prompt(self, raw: msgspec.Raw, at: str) -> str | array.array[int]:
        return self.prompt_ids(raw, at) if _is_list(raw) else _decode(str, self._bounded(raw, at), at)

    def _text(self, raw: msgspec.Raw, at: str) -> str | None:
        text = _decode(str | None, self._bounded(raw, at), at)
        try:
            require_no_nul(text)
        except ValueError as error:
            raise _invalid_at(at, str(error)) from None
        return text

    def _token_ids(self, raw: msgspec.Raw, at: str) -> array.array[int] | None:
        if _count(raw, b",") >= MAX_TOKENS_LISTED:
            raise _invalid_at(at, f"more than {MAX_TOKENS_LISTED} token ids")
        found = _decode(list[TokenId] | None, raw, at)
        return None if found is None else array.array("i", found)

    def prompt_ids(self, raw: msgspec.Raw, at: str) -> array.array[int]:
        if _count(raw, b",") >= self._context.tokens:
            raise _beyond_context(at, at)
        return array.array("i", _decode(list[TokenId], raw, at))

    def _bounded(self, raw: msgspec.Raw, at: str) -> msgspec.Raw:
        """Returns a text that may fit the context; ApiError for one that cannot."""
        if len(raw) > self._context.text_bytes:
            raise _beyond_context(at, at)
        return raw


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder:
    return msgspec.json.Decoder(kind)


def _decode(kind: Any, raw: _Buffer, at: str) -> Any:
    """Decodes a piece; raises ApiError with the path of what is wrong in it."""
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
    """400: names the field of the `kind` that is at `at`, and never its value."""
    text, _, path = str(error).partition(" - at `$")
    path = path.removesuffix("`")
    return _invalid_at(_joined_path(at, path), _without_value(text, kind, path))


def _joined_path(at: str, path: str) -> str:
    """Returns the path of a field: of a piece at `at`, where it is at `path` (".role", "[0].text" or "")."""
    return at + path.removeprefix(".") if at.endswith(".") or not at else at + path


def _without_value(text: str, kind: Any, path: str) -> str:
    """Returns what msgspec says, without the value that an enumeration does not have: that may be any text."""
    if "matching regex" in text:
        return f"Expected {FUNCTION_NAME_RULE}"
    is_unknown = text.startswith(("Invalid enum value", "Invalid value"))
    return about_unknown(kind, path, text) if is_unknown else text[:200]


def _invalid_at(path: str, text: str) -> ApiError:
    path = path.removesuffix(".")[:200]
    return invalid(f"{path or 'body'}: {text}", re.split(r"[.\[]", path)[0] or None)


def _beyond_context(path: str, param: str | None) -> ApiError:
    """400: refused before it is decoded."""
    text = f"{path}: longer than any prompt that fits the model's context"
    return invalid(text, param and re.split(r"[.\[]", param)[0], "context_length_exceeded")


@functools.cache
def _fields_of(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Returns a type with the same fields, none of them decoded."""
    return msgspec.defstruct(f"{kind.__name__}Fields", [(f.encode_name, msgspec.Raw, _ABSENT) for f in fields(kind)])


@functools.cache
def _list_of(limit: int) -> type[msgspec.Struct]:
    """Returns a type for the items of a list, none of them decoded; decoding ends with an error at one too many.

    msgspec checks the length of a list only when it has built all of it.
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
    """Returns how often any of some bytes occur; numpy does not hold the interpreter's lock meanwhile."""
    values, count = np.frombuffer(raw, np.uint8), 0
    for start in range(0, len(values), _SLICE_BYTES):
        piece = values[start : start + _SLICE_BYTES]
        count += sum(int(np.count_nonzero(piece == byte)) for byte in wanted)
    return count


_unsupported_decoder = msgspec.json.Decoder(
    msgspec.defstruct("Unsupported", [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in UNSUPPORTED])
)


def _refuse_unsupported(kind: type[msgspec.Struct], body: bytes | bytearray) -> None:
    """Looks only at the fields of `UNSUPPORTED`; everything else in the body is skipped without being built."""
    found = _unsupported_decoder.decode(body)
    for name, harmless in UNSUPPORTED.items():
        raw = bytes(getattr(found, name))
        if raw == b"null" or name in kind.__struct_fields__:
            continue
        if len(raw) > 256 or msgspec.json.decode(raw) not in harmless:
            raise _unsupported(name)
