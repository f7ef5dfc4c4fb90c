"""vLLM's `/inference/v1/generate`: token ids in, token ids out, for routers and trainers that tokenise themselves."""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from dsv3.server.protocol.errors import ApiError, invalid
from dsv3.server.protocol.openai import ChatLogprobs, CompletionRequest, FinishReason, GenerateRequest, Usage
from dsv3.server.serving.completions import CompletionHandler
from dsv3.server.serving.generation import Update
from dsv3.server.serving.handler import LIST_OF_GAP, WholeChoice, filled, to_event, to_json, with_commas
from dsv3.server.serving.logprobs import LogprobEncoder
from dsv3.server.serving.request_parsing import converted, read_request

_SAME_NAME = ("model", "stream", "stream_options", "cache_salt", "kv_transfer_params")
_NOT_SAMPLING = {*_SAME_NAME, "prompt", "echo", "best_of", "add_special_tokens", "return_token_ids"}


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


class GenerateHandler(CompletionHandler):
    """The answer to a `GenerateRequest`: a text completion of which the tokens alone are told."""

    async def read(self) -> CompletionRequest:
        asked = await read_request(self.service, GenerateRequest, self._body)
        self._request_id = asked.request_id
        if not asked.token_ids:
            raise invalid("token_ids: at least one is needed", "token_ids")
        if asked.priority:
            raise invalid("priority: only 0 is supported", "priority", "unsupported_parameter")
        sampling = {name: value for name, value in asked.sampling_params.items() if name not in _NOT_SAMPLING}
        if sampling.get("prompt_logprobs") is not None:
            what = "ask /v1/completions for log-probabilities of a prompt"
            raise invalid(f"sampling_params.prompt_logprobs: {what}", "sampling_params", "unsupported_parameter")
        try:
            request = converted(CompletionRequest, sampling)
        except ApiError as error:
            raise error.renamed({name: f"sampling_params.{name}" for name in sampling}) from None
        for name in _SAME_NAME:
            setattr(request, name, getattr(asked, name))
        request.prompt, request.return_token_ids = asked.token_ids, True  # type: ignore[assignment]
        return request

    @property
    def id(self) -> str:
        """The client's id of the request, or a new one."""
        return self._request_id or self.generation.id

    def response(self, choices: msgspec.Raw) -> Any:
        return GenerateResponse(request_id=self.id, choices=choices, usage=self.usage)

    def choice(self, whole: WholeChoice) -> Iterator[bytes]:
        choice = GenerateChoice(
            index=whole.index,
            logprobs=None if self.request.logprobs is None else ChatLogprobs(LIST_OF_GAP),
            finish_reason=whole.finish_reason,
            token_ids=whole.token_ids,
        )
        return filled(to_json(choice), [with_commas(column) for column in whole.columns])

    def logprob_columns(self, update: Update) -> tuple[bytes, ...]:
        if self.request.logprobs is None:
            return ()
        return self._encoder.chat(update.token_ids, update.logprobs or [])

    def events(self, update: Update) -> list[bytes]:
        """Returns an event with the tokens of an update."""
        columns = self.logprob_columns(update)
        choice = GenerateChoice(
            index=update.choice,
            logprobs=ChatLogprobs(msgspec.Raw(b"[%s]" % columns[0])) if columns else None,
            finish_reason=update.finish_reason,
            token_ids=update.token_ids,
        )
        return [to_event(self.chunk([choice]))]

    def chunk(self, choices: list, usage: object = None) -> Any:
        told = usage if self.includes_usage else msgspec.UNSET
        return GenerateResponse(request_id=self.id, choices=choices, usage=told)  # type: ignore[arg-type]

    @functools.cached_property
    def _encoder(self) -> LogprobEncoder:
        """Names tokens by their ids."""
        return LogprobEncoder(None)
