"""Splits conversations between two versions of the instances; each conversation stays with its version.

A version is what an instance names in /v1/models (`--served_version`). The split is a hash of the conversation, so that
all routers agree, and a larger share moves conversations in one direction only.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Mapping

import msgspec

from dsv3.config.server_options import check_version

SESSION = ("prompt_cache_key", "user")
"""Fields of a request by which its client names a conversation, the first of them that it has."""
_MESSAGES = ("messages", "input")
_SYSTEM = ("system", "instructions")  # the system prompt of routes that have it in a field of its own
_MAX_TOKENS = 4096
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Canary:
    """A `share` of the conversations, from 0 to 1, goes to the instances of `version`, the rest to all others."""

    version: str
    share: float

    @classmethod
    def parse(cls, text: str) -> "Canary":
        """Reads "VERSION=SHARE", such as v2=5%; raises ValueError."""
        version, _, share = text.rpartition("=")
        if not version:
            raise ValueError(f"{text!r} is not VERSION=SHARE, such as v2=5%")
        check_version(text, version)
        return cls(version, parse_share(share))

    def takes(self, conversation: bytes) -> bool:
        """Returns whether a conversation, of 8 bytes, is among the share."""
        return int.from_bytes(conversation) < self.share * 2**64


def parse_share(text: str) -> float:
    """Reads a share such as 5% or 0.5%; raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)%", text)
    if found is None or float(found[1]) > 100:
        raise ValueError(f"{text!r} is not a share from 0% to 100%")
    return float(found[1]) / 100


def choose_version(canary: Canary | None, up: Mapping[str, int], conversation: bytes) -> str | None:
    """Returns the version that answers a conversation, None where none is up.

    `up` has the number of healthy instances by version. A side without any gives its conversations to the other one.
    Versions on the same side share conversations by their numbers of instances.
    """
    preferred = {name: count for name, count in up.items() if canary is not None and name == canary.version}
    others = {name: count for name, count in up.items() if name not in preferred}
    if canary is None or not canary.takes(conversation):
        preferred, others = others, preferred
    versions = sorted((preferred or others).items())
    if len(versions) < 2:
        return versions[0][0] if versions else None
    digest = hashlib.blake2b(conversation, digest_size=8).digest()  # anew: the canary has taken the least values
    place = int.from_bytes(digest) % sum(count for _, count in versions)
    ends = itertools.accumulate(count for _, count in versions)
    return next(version for (version, _), end in zip(versions, ends, strict=True) if place < end)


def conversation_of(fields: Mapping[str, msgspec.Raw], content: bytes | memoryview, salt: str) -> bytes:
    """Returns 8 bytes that all requests of a conversation have in common, and few others.

    These are a hash of the name that the client gives it (`SESSION`), or else of the system prompt and the `content`
    up to the user's first message. A prompt without messages is its own conversation.
    """
    key = hashlib.blake2b(salt.encode(), digest_size=8)
    name = next((name for name in SESSION if name in fields), None)
    if name is not None:
        key.update(memoryview(fields[name]))
        return key.digest()
    for field in _SYSTEM:
        key.update(memoryview(fields.get(field, b"")))
    key.update(_first_turn(content) if any(name in fields for name in _MESSAGES) else content)
    return key.digest()


def _first_turn(messages: bytes | memoryview) -> bytes | memoryview:
    """Returns the JSON of messages up to the end of the user's first one, or of as many strings as are looked at."""
    depth, before, is_user, end = 0, b"", False, len(messages)
    for found in itertools.islice(_TOKEN.finditer(messages), _MAX_TOKENS):
        token, end = found[0], found.end()
        if token in (b"[", b"{"):
            depth += 1
        elif token in (b"]", b"}"):
            depth -= 1
            if depth == 1 and is_user:
                return messages[:end]
        elif depth == 2:
            is_user = is_user or (before, token) == (b'"role"', b'"user"')
            before = token
    return messages[:end]
