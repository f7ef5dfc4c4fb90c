"""What a router knows of a prompt without a tokenizer: keys of its pages, and about how many tokens it has.

A page is 256 bytes: 64 token ids of four bytes, or as much text, since a token has about four bytes. Each key is a hash
of all that comes before, as in the prefix cache. The keys are not the cache's; they only say what begins alike.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

BYTES_PER_TOKEN = 4
PAGE_TOKENS = 64
MAX_PAGES = 4096
"""Pages that have keys; what lies behind counts as tokens alone."""

_PAGE_BYTES = BYTES_PER_TOKEN * PAGE_TOKENS
_BEFORE = ("model", "cache_salt", "tools", "system", "instructions", "chat_template_kwargs")
_CONTENT = ("messages", "prompt", "input", "token_ids")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Keys of the full pages, from the first on, and the number of tokens, about.

    `spelled` are its pages as `dsv3.fleet.router.held` names them, None where its tokens are not known. `is_salted`:
    it finds its tenant's pages only.
    """

    keys: tuple[bytes, ...]
    tokens: int
    spelled: tuple[bytes, ...] | None = None
    is_salted: bool = False


def prompt_of(body: dict[str, Any]) -> Prompt:
    """Returns what is known of a request's prompt."""
    before = msgspec.json.encode([body.get(name) for name in _BEFORE])
    content = next((body[name] for name in _CONTENT if body.get(name) is not None), "")
    data = _bytes(content)
    tokens = max(1, len(data) // BYTES_PER_TOKEN)
    return Prompt(tuple(_keys(before, data)), tokens, is_salted=bool(body.get("cache_salt")))


def _bytes(content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    if isinstance(content, list) and all(type(each) is int and 0 <= each < 2**31 for each in content):
        return np.array(content, "<i4").tobytes()
    return msgspec.json.encode(content)


def _keys(before: bytes, data: bytes) -> Iterable[bytes]:
    key = hashlib.blake2b(before, digest_size=16).digest()
    for start in range(0, min(len(data), MAX_PAGES * _PAGE_BYTES) - _PAGE_BYTES + 1, _PAGE_BYTES):
        key = hashlib.blake2b(key + data[start : start + _PAGE_BYTES], digest_size=16).digest()
        yield key
