"""The tokens of a prompt, where an instance says which pages it holds: given, or asked of an instance."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dsv3.api.answers.kinds import KINDS
from dsv3.fleet.router.asked import RESUMABLE, Asked
from dsv3.fleet.router.held import spelled_keys
from dsv3.fleet.router.instance import Instance
from dsv3.fleet.router.prompt import MAX_PAGES, PAGE_TOKENS, Prompt
from dsv3.http_client import RequestFailed

_ASKED = (
    *("model", "prompt", "messages", "add_special_tokens"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
)
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
    ids = given_ids(asked.body)
    if ids is None and asked.path in RESUMABLE and not asked.body.get("tools"):
        ids = await _tokens(min(telling, key=lambda each: each.load.requests), asked.body)
    if ids is None:
        return asked.prompt
    pages = spelled_keys(ids[: MAX_PAGES * PAGE_TOKENS])
    return dataclasses.replace(asked.prompt, tokens=max(1, len(ids)), spelled=pages)


def given_ids(body: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the prompt of a request that brings tokens and no text, `[n]` int32."""
    ids = body.get("token_ids") if body.get("token_ids") is not None else body.get("prompt")
    if isinstance(ids, list) and ids and all(type(each) is int and 0 <= each < 2**31 for each in ids):
        return np.array(ids, np.int32)
    return None


async def _tokens(instance: Instance, body: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the tokens of a text or of messages as an instance reads them; None where it does not say."""
    asked = {name: body[name] for name in _ASKED if body.get(name) is not None}
    if not isinstance(asked.get("prompt", ""), str):
        return None
    try:
        status, content = await instance.post("/tokenize", msgspec.json.encode(asked), _MOST_BYTES)
        tokens = msgspec.json.decode(content, type=_Tokens).tokens if status == 200 else None
        return None if tokens is None else np.array(tokens, np.int32)
    except (RequestFailed, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
        return None
