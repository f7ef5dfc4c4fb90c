"""What a router knows of a prompt without a tokenizer: keys of its pages, and about how many tokens it has.

A page is 256 bytes: 64 token ids of four bytes, or as much JSON as its client has sent, since a token has about four
bytes. Each key is a hash of all that comes before, as in the prefix cache. The keys are not the cache's; they only say
what begins alike.
"""

import array
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from dsv3.server.answers.reading import read_prompt

BYTES_PER_TOKEN = 4
PAGE_TOKENS = 64
MAX_PAGES = 4096
"""Pages that have keys; what lies behind counts as tokens alone."""
BEFORE = ("model", "cache_salt", "tools", "system", "instructions", "chat_template_kwargs")
"""Fields of a request that say what comes before its content."""
CONTENT = ("messages", "prompt", "input", "token_ids")
"""Fields with the content; a request has one of them."""

_PAGE_BYTES = BYTES_PER_TOKEN * PAGE_TOKENS
_LISTS_IDS = ("prompt", "token_ids")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Keys of the full pages, from the first on, and the number of tokens, about.

    `spelled` are its pages as `router.held` names them, None where its tokens are not known. `is_salted`:
    it finds its tenant's pages only. `ids` are its tokens, None where it brings text. It may be a list of `count`.
    """

    keys: tuple[bytes, ...]
    tokens: int
    spelled: tuple[bytes, ...] | None = None
    is_salted: bool = False
    ids: array.array[int] | None = None
    count: int = 1


def prompt_of(fields: Mapping[str, msgspec.Raw], salt: str | None = None) -> Prompt:
    """Returns what is known of the prompt in a request's fields, with `salt` in place of its own; raises ApiError."""
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
