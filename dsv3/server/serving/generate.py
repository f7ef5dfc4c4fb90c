"""`POST /inference/v1/generate`, as vLLM's: token ids in, token ids out, for clients that tokenize themselves."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from dsv3.server.protocol.errors import ApiError, invalid
from dsv3.server.protocol.openai import ChatLogprobs, CompletionRequest, FinishReason, GenerateRequest, Usage
from dsv3.server.serving.completions import CompletionHandler
from dsv3.server.serving.generation import ChoiceUpdate
from dsv3.server.serving.handler import LIST_OF_GAP, CompleteChoice, to_event, with_commas
from dsv3.server.serving.logprobs import LogprobEncoder
from dsv3.server.serving.request_parsing import converted, read_request

_SAME_NAME = ("model", "stream", "stream_options", "cache_salt", "kv_transfer_params")
_NOT_SAMPLING = {*_SAME_NAME, "prompt", "echo", "best_of", "add_special_tokens", "return_token_ids"}
# A router clears these fields of a request, not of its `sampling_params`: they name a host to connect to.
_NOT_SAMPLING |= {"bootstrap_host", "bootstrap_port", "bootstrap_room"}

_NAMES_BY_ID = LogprobEncoder(None)


class GenerateChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    routed_experts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    sampling_mask: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int]
    weight_version: str | msgspec.UnsetType = msgspec.UNSET
    weight_versions: list[tuple[int, str]] | msgspec.UnsetType = msgspec.UNSET


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The complete response, or one event with the tokens of a step."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None = None
    choices: list[GenerateChoice] | msgspec.Raw
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_logprobs: msgspec.Raw | None = None


class GenerateHandler(CompletionHandler):
    """Handles a `GenerateRequest`: a text completion whose response has token ids alone."""

    async def read(self) -> CompletionRequest:
        generate = await read_request(self.service, GenerateRequest, self._body)
        self._request_id = generate.request_id
        if not generate.token_ids:
            raise invalid("token_ids: at least one is needed", "token_ids")
        if generate.priority:
            raise invalid("priority: only 0 is supported", "priority", "unsupported_parameter")
        sampling = {name: value for name, value in generate.sampling_params.items() if name not in _NOT_SAMPLING}
        try:
            request = converted(CompletionRequest, sampling)
        except ApiError as error:
            raise error.renamed({name: f"sampling_params.{name}" for name in sampling}) from None
        for name in _SAME_NAME:
            setattr(request, name, getattr(generate, name))
        request.prompt, request.return_token_ids = generate.token_ids, True  # type: ignore[assignment]
        return request

    @property
    def id(self) -> str:
        """The client's id of the request, or a new one."""
        return self._request_id or self.generation.id

    def response(self, choices: msgspec.Raw) -> Any:
        prompt = None if self.request.prompt_logprobs is None else LIST_OF_GAP
        return GenerateResponse(request_id=self.id, choices=choices, usage=self.usage, prompt_logprobs=prompt)

    def gaps(self, wholes: list[CompleteChoice]) -> list[Iterable[bytes]]:
        """Returns the choices, and the log-probabilities of the prompt if they are requested."""
        found = super().gaps(wholes)
        return found if self.request.prompt_logprobs is None else [*found, with_commas(wholes[0].columns[-1])]

    def choice(self, whole: CompleteChoice) -> Iterator[bytes]:
        logprobs = None if self.request.logprobs is None else ChatLogprobs(LIST_OF_GAP)
        columns = whole.columns[:1] if logprobs is not None else []
        return self.fill_choice(GenerateChoice(logprobs=logprobs, **self.fields_of(whole)), whole, columns)

    def logprob_columns(self, update: ChoiceUpdate) -> tuple[bytes, ...]:
        """Returns the records of `logprobs`, and those of `prompt_logprobs`, which the response has."""
        request = self.request
        columns: tuple[bytes, ...] = ()
        if request.logprobs is not None:
            columns = self._encoder.chat(update.token_ids, update.logprobs or [])
        if request.prompt_logprobs is None:
            return columns
        return (*columns, self._prompt_records(update, request.prompt_logprobs))

    def events(self, update: ChoiceUpdate) -> list[bytes]:
        """Returns an event with the tokens of an update."""
        columns = self.logprob_columns(update)
        logprobs = ChatLogprobs(msgspec.Raw(b"[%s]" % columns[0])) if columns else None
        return [to_event(self.chunk([GenerateChoice(logprobs=logprobs, **self.new_fields_of(update))]))]

    def chunk(self, choices: list, usage: object = None) -> Any:
        shown = usage if self.includes_usage else msgspec.UNSET
        return GenerateResponse(request_id=self.id, choices=choices, usage=shown)  # type: ignore[arg-type]

    @property
    def _encoder(self) -> LogprobEncoder:
        return _NAMES_BY_ID
