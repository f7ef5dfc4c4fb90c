"""The answer to a text completion: maps text to OpenAI's JSON."""

import functools
from collections.abc import Sequence

import msgspec

from dsv3.api.answers.answer import Answer, ChunkTemplate, to_json
from dsv3.api.answers.errors import invalid
from dsv3.api.answers.generation import Update
from dsv3.api.answers.logprobs import completion_logprobs
from dsv3.api.answers.prompts import EncodedPrompt, completion_prompts
from dsv3.api.answers.responses import CompletionChoice, CompletionResponse
from dsv3.api.answers.schema import CompletionRequest
from dsv3.api.answers.service import Service
from dsv3.text.parsers import OutputParser


class CompletionAnswer(Answer[CompletionRequest]):
    """The answer to a `CompletionRequest`."""

    request_type = CompletionRequest
    id_prefix = "cmpl"

    def __init__(self, service: Service, body: bytes):
        super().__init__(service, body)
        self._seen: dict[int, int] = {}  # characters of text before the next token, by choice
        self._templates: dict[int, ChunkTemplate] = {}

    @functools.cached_property
    def _is_plain(self) -> bool:
        return self.request.logprobs is None and not self.request.return_token_ids

    def check(self) -> None:
        if self.request.echo and self.request.logprobs is not None:
            raise invalid("echo with logprobs is not supported", "echo", "unsupported_parameter")

    async def read_prompts(self) -> list[EncodedPrompt]:
        return await completion_prompts(self.service, self.request)

    def max_tokens(self) -> int | None:
        return self.request.max_tokens

    def num_logprobs(self) -> int | None:
        return self.request.logprobs

    def parsers(self, prompt: EncodedPrompt) -> Sequence[OutputParser]:
        return ()

    def response(self, updates: list[Update]) -> CompletionResponse:
        return self._response([self._choice(update, 0, is_first=True) for update in updates], self.usage)

    def events(self, update: Update) -> list[bytes]:
        """Returns the text as it comes, and why it ended."""
        is_first = update.choice not in self._seen
        if self._is_plain and not is_first and update.finish_reason is None:  # nearly always
            return [self._template(update.choice).fill(piece.text) for piece in update.pieces]
        seen = self._seen.get(update.choice, 0)
        choice = self._choice(update, seen, is_first)
        self._seen[update.choice] = seen + sum(map(len, choice.logprobs.tokens if choice.logprobs else ()))
        if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids or is_first:
            return [to_json(self.chunk([choice]))]
        return []

    def chunk(self, choices: list[CompletionChoice], usage: object = None) -> CompletionResponse:
        return self._response(choices, usage if self.tells_usage else msgspec.UNSET)

    def _response(self, choices: list[CompletionChoice], usage: object) -> CompletionResponse:
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,  # type: ignore[arg-type]
        )

    def _template(self, choice: int) -> ChunkTemplate:
        template = self._templates.get(choice)
        if template is None:
            template = self._templates[choice] = ChunkTemplate(
                lambda text: self.chunk([CompletionChoice(index=choice, text=text)])
            )
        return template

    def _choice(self, update: Update, offset: int, is_first: bool) -> CompletionChoice:
        request, prompt = self.request, self.generation.prompt_of(update.choice)
        echoed = self._echo(prompt) if is_first and request.echo else ""
        logprobs = None
        if request.logprobs is not None:
            logprobs = completion_logprobs(self.service.tokenizer, update.token_ids, update.logprobs or [], offset)
        return CompletionChoice(
            index=update.choice,
            text=echoed + "".join(piece.text for piece in update.pieces),
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            token_ids=update.token_ids if request.return_token_ids else msgspec.UNSET,
            prompt_token_ids=prompt.token_ids if request.return_token_ids and is_first else msgspec.UNSET,
        )

    def _echo(self, prompt: EncodedPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return "" if self.service.tokenizer is None else self.service.tokenizer.decode(prompt.token_ids)
