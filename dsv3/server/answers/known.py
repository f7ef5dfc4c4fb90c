"""The values that a field of a request may have, for the errors about others."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

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
