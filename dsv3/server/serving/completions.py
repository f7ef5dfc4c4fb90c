"""`POST /v1/completions`: maps text to OpenAI's JSON."""

from collections.abc import Iterator

import msgspec

from dsv3.server.protocol.errors import invalid
from dsv3.server.protocol.openai import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse
from dsv3.server.serving.generation import ChoiceUpdate
from dsv3.server.serving.handler import LIST_OF_GAP, CompleteChoice, RequestHandler, to_event
from dsv3.server.serving.logprobs import LogprobEncoder
from dsv3.server.serving.prompts import EncodedPrompt, completion_prompts, echoed_prompts
from dsv3.server.serving.resume import ResumedChoice
from dsv3.server.serving.sampling import prompt_logprobs
from dsv3.server.serving.service import Service
from dsv3.server.tenants import Tenant
from dsv3.text.deltas import TextDelta
from dsv3.text.parser import AnswerParser


class CompletionHandler(RequestHandler[CompletionRequest]):
    """Handles a `CompletionRequest`."""

    request_type = CompletionRequest
    id_prefix = "cmpl-"

    def __init__(self, service: Service, body: bytes | bytearray, tenant: Tenant | None = None):
        super().__init__(service, body, tenant)
        self._offsets: dict[int, int] = {}  # characters of text before the next token, by choice

    def check(self) -> None:
        request = self.request
        if (request.n or 1) > 1 and prompt_logprobs(request) is not None:
            raise invalid("n: must be 1 with prompt_logprobs, and with echo and logprobs together", "n")
        if request.prompt_logprobs is not None and request.stream:
            raise invalid(
                "prompt_logprobs: not available in a stream; send the request without stream", "prompt_logprobs"
            )

    async def read_prompts(self) -> list[EncodedPrompt]:
        prompts = await completion_prompts(self.service, self.request)
        self.request.prompt = None  # frees the second copy
        if self.request.echo:
            return await echoed_prompts(self.service, prompts, self.request.n or 1)
        return prompts

    @property
    def prompt_only(self) -> bool:
        """Whether only the prompt is echoed, as evaluations do to score it."""
        return bool(self.request.echo) and self.request.max_tokens == 0

    def max_tokens(self) -> int | None:
        return 1 if self.prompt_only else self.request.max_tokens

    def num_logprobs(self) -> int | None:
        return self.request.logprobs

    def parser(self, prompt: EncodedPrompt) -> AnswerParser | None:
        return None

    def response(self, choices: msgspec.Raw) -> CompletionResponse:
        return self._response(choices, self.usage)

    def choice(self, whole: CompleteChoice) -> Iterator[bytes]:
        choice = CompletionChoice(
            text=self._echo(whole.index) + whole.text,
            logprobs=None if self.request.logprobs is None else CompletionLogprobs(*[LIST_OF_GAP] * 4),
            stop_reason=whole.stop_reason,
            prompt_token_ids=self._prompt_ids(whole.index),
            prompt_logprobs=msgspec.UNSET if self.request.prompt_logprobs is None else LIST_OF_GAP,
            **self.fields_of(whole),
        )
        return self.fill_choice(choice, whole, whole.columns)

    def logprob_columns(self, update: ChoiceUpdate) -> tuple[bytes, ...]:
        """Returns the lists of `logprobs`, including an echoed prompt's tokens, and of `prompt_logprobs`."""
        request = self.request
        columns: tuple[bytes, ...] = ()
        if request.logprobs is not None:
            columns = self._echoed(update) if update.prompt is not None else self._sampled(update)
        if request.prompt_logprobs is None:
            return columns
        return (*columns, self._prompt_records(update, request.prompt_logprobs))

    @property
    def _encoder(self) -> LogprobEncoder:
        return self.service.logprobs

    def _sampled(self, update: ChoiceUpdate) -> tuple[bytes, ...]:
        encoder, offset = self._encoder, self._offsets.get(update.choice, 0)
        self._offsets[update.choice] = offset + encoder.num_chars(update.token_ids)
        return encoder.completion(update.token_ids, update.logprobs or [], offset)

    def _echoed(self, update: ChoiceUpdate) -> tuple[bytes, ...]:
        if not self.request.echo or update.prompt is None:
            return (b"",) * 4
        encoder, ids = self._encoder, self.generation.prompt_of(update.choice).token_ids
        columns, self._offsets[update.choice] = encoder.echoed(
            ids, update.prompt, self.request.logprobs or 0, self._offsets.get(update.choice, 0)
        )
        return columns

    def _prompt_records(self, update: ChoiceUpdate, count: int) -> bytes:
        if update.prompt is None:
            return b""
        ids = self.generation.prompt_of(update.choice).token_ids
        return self._encoder.prompt_records(ids, update.prompt, count)

    def events(self, update: ChoiceUpdate) -> list[bytes]:
        """Returns an event with the update's text; the last has the finish reason."""
        is_first = update.choice not in self.started
        if self.is_plain and not is_first and update.finish_reason is None:  # the usual case
            version = update.weight_version or msgspec.UNSET
            choice = CompletionChoice(index=update.choice, text=_text(update), weight_version=version)
            return [self.plain_event(choice)] if update.deltas else []
        self.started.add(update.choice)
        choice = self._choice(update, is_first)
        has_arrays = isinstance(choice.routed_experts, msgspec.Raw) or isinstance(choice.sampling_mask, msgspec.Raw)
        if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids or is_first or has_arrays:
            return [to_event(self.chunk([choice]))]
        return []

    def skip(self, choice: int, resumed: ResumedChoice) -> None:
        super().skip(choice, resumed)
        if self.request.logprobs is not None:
            self._offsets[choice] = self.service.logprobs.num_chars(resumed.token_ids)

    def chunk(self, choices: list[CompletionChoice], usage: object = None) -> CompletionResponse:
        return self._response(choices, usage if self.includes_usage else msgspec.UNSET)

    def _response(self, choices: list[CompletionChoice] | msgspec.Raw, usage: object) -> CompletionResponse:
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,  # type: ignore[arg-type]
        )

    def _choice(self, update: ChoiceUpdate, is_first: bool) -> CompletionChoice:
        columns = self.logprob_columns(update)
        return CompletionChoice(
            text=(self._echo(update.choice) if is_first else "") + _text(update),
            logprobs=CompletionLogprobs(*(msgspec.Raw(b"[%s]" % column) for column in columns)) if columns else None,
            stop_reason=update.stop_reason,
            prompt_token_ids=self._prompt_ids(update.choice) if is_first else msgspec.UNSET,
            **self.new_fields_of(update),
        )

    def _echo(self, choice: int) -> str:
        return (self.generation.prompt_of(choice).text or "") if self.request.echo else ""

    def _prompt_ids(self, choice: int) -> list[int] | msgspec.UnsetType:
        """Returns the prompt's tokens, for its first choice only: 128 choices would repeat them 128 times."""
        if not self.request.return_token_ids or choice % self.generation.n:
            return msgspec.UNSET
        return self.generation.prompt_of(choice).token_ids.tolist()


def _text(update: ChoiceUpdate) -> str:
    return "".join(delta.text for delta in update.deltas if isinstance(delta, TextDelta))
