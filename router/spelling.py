"""The tokens of a prompt, where an instance says which pages it holds: given, or asked of an instance."""

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from dsv3.http_client import RequestFailed
from dsv3.server.answers.kinds import KINDS
from router.asked import RESUMABLE, TOKENIZED, Asked
from router.held import spelled_keys
from router.instance import Instance
from router.prompt import MAX_PAGES, PAGE_TOKENS, Prompt

_MOST_BYTES = 2**23


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def spelled(asked: Asked, instances: Sequence[Instance]) -> Prompt:
    """Returns a request's prompt with the names of its pages, where any of `instances` tells what it holds.

    Text is tokenized by the one of these that has the least to do. Chats with tools, and what comes over other routes
    or is not answered in time, stay as they are: then the router goes by what it has sent.
    """
    telling = [each for each in instances if each.tells and each.status == "ok"]
    if not telling or asked.path not in KINDS:
        return asked.prompt
    ids: np.ndarray | None = np.array(asked.prompt.ids, np.int32) if asked.prompt.ids else None
    if ids is None and asked.path in RESUMABLE and "tools" not in asked.fields:
        ids = await _tokens(min(telling, key=lambda each: each.load.requests), asked.fields)
    if ids is None:
        return asked.prompt
    pages = spelled_keys(ids[: MAX_PAGES * PAGE_TOKENS])
    return dataclasses.replace(asked.prompt, tokens=max(1, len(ids)), spelled=pages)


async def _tokens(instance: Instance, fields: Mapping[str, msgspec.Raw]) -> np.ndarray | None:
    """Returns the tokens of a text or of messages as an instance reads them; None where it does not say."""
    if bytes(memoryview(fields.get("prompt", b'"'))[:1]) != b'"':
        return None
    body = b",".join(b'"%b":%b' % (name.encode(), fields[name]) for name in TOKENIZED if name in fields)
    try:
        status, content = await instance.post("/tokenize", b"{%b}" % body, _MOST_BYTES)
        tokens = msgspec.json.decode(content, type=_Tokens).tokens if status == 200 else None
        return None if tokens is None else np.array(tokens, np.int32)
    except (RequestFailed, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
        return None
