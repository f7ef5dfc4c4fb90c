"""`POST /v1/completions`."""

import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dsv3.api.errors import invalid
from dsv3.api.generate import Generation, Update, collect
from dsv3.api.http import EventStream, read_json_body, unless_disconnected
from dsv3.api.logprobs import completion_logprobs
from dsv3.api.prepare import completion_prompts, sampling_params
from dsv3.api.responses import CompletionChoice, CompletionResponse
from dsv3.api.schema import CompletionRequest, parse
from dsv3.api.service import Service


async def completions(service: Service, http: Request) -> Response:
    """Answers a text completion, streamed or whole."""
    request = parse(CompletionRequest, await read_json_body(http))
    answer = _Answer(service, request)
    await unless_disconnected(http.receive, answer.prepare())
    if request.stream:
        return EventStream(answer.events())
    return Response(await unless_disconnected(http.receive, answer.whole()), media_type="application/json")


class _Answer:
    """One request on its way to a response."""

    def __init__(self, service: Service, request: CompletionRequest):
        self._service, self._request = service, request
        self._model = service.require_model(request.model)
        self._created = int(time.time())
        if request.echo and request.logprobs is not None:
            raise invalid("echo with logprobs is not supported", "echo", "unsupported_parameter")

    async def prepare(self) -> None:
        """Reads the prompts; nothing is generated yet."""
        service, request = self._service, self._request
        service.require_ready()
        prompts = await completion_prompts(service, request)
        sampling = sampling_params(service, request, prompts, request.max_tokens, request.logprobs)
        self._generation = Generation(service, prompts, sampling, request.cache_salt)

    async def whole(self) -> bytes:
        """The JSON of the complete response."""
        choices = [self._choice(update, 0, first=True) for update in await collect(self._generation)]
        return self._encode(choices, self._generation.usage)

    async def events(self) -> AsyncGenerator[bytes]:
        """The JSON of each chunk."""
        with_usage = self._request.stream_options is not None and bool(self._request.stream_options.include_usage)
        usage = None if with_usage else msgspec.UNSET
        seen: dict[int, int] = {}  # characters of text before the next token, by choice
        async for updates in self._generation.updates():
            for update in updates:
                first = update.choice not in seen
                choice = self._choice(update, seen.get(update.choice, 0), first)
                seen[update.choice] = seen.get(update.choice, 0) + sum(
                    map(len, choice.logprobs.tokens if choice.logprobs else ())
                )
                if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids or first:
                    yield self._encode([choice], usage)
        if with_usage:
            yield self._encode([], self._generation.usage)

    def _choice(self, update: Update, offset: int, first: bool) -> CompletionChoice:
        request, prompt = self._request, self._generation.prompt_of(update.choice)
        echoed = self._echo(update.choice) if first and request.echo else ""
        logprobs = None
        if request.logprobs is not None:
            logprobs = completion_logprobs(self._service.tokenizer, update.token_ids, update.logprobs or [], offset)
        return CompletionChoice(
            index=update.choice,
            text=echoed + update.text,
            logprobs=logprobs,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            token_ids=update.token_ids if request.return_token_ids else msgspec.UNSET,
            prompt_token_ids=prompt.token_ids if request.return_token_ids and first else msgspec.UNSET,
        )

    def _echo(self, choice: int) -> str:
        prompt, tokenizer = self._generation.prompt_of(choice), self._service.tokenizer
        if prompt.text is not None:
            return prompt.text
        return "" if tokenizer is None else tokenizer.decode(prompt.token_ids)

    def _encode(self, choices: list[CompletionChoice], usage: object) -> bytes:
        return msgspec.json.encode(
            CompletionResponse(
                id=f"cmpl-{self._generation.id}",
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage,  # type: ignore[arg-type]
            )
        )
