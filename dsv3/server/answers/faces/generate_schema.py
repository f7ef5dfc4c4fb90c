"""What clients of vLLM's `/inference/v1/generate` send and get."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dsv3.server.answers.responses import ChatLogprobs, FinishReason, Usage
from dsv3.server.answers.schema import (
    MAX_SALT_CHARS,
    MAX_TOKENS_LISTED,
    Int,
    Name,
    StreamOptions,
    TokenId,
    TransferParams,
)


class GenerateRequest(msgspec.Struct, kw_only=True):
    """`POST /inference/v1/generate`; `sampling_params` has vLLM's names, which are those of a text completion."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_LISTED)] | None = None
    sampling_params: Annotated[dict[str, Any], Meta(max_length=64)] = {}
    request_id: Name | None = None
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Int | None = None
    features: None = None
    kv_transfer_params: TransferParams | None = None


class GenerateChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int]


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, or with the tokens of one step an event of it."""

    request_id: str
    choices: list[GenerateChoice] | msgspec.Raw
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: Literal[None] = None
    kv_transfer_params: dict[str, Any] | None = None
