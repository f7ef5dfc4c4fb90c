"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dsv3.api.errors import invalid
from dsv3.api.generate import Generation, Update, collect
from dsv3.api.http import EventStream, read_json_body, unless_disconnected
from dsv3.api.logprobs import chat_logprobs
from dsv3.api.prepare import Prompt, chat_prompt, sampling_params
from dsv3.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatResponse,
    ChunkChoice,
    Delta,
)
from dsv3.api.schema import ChatRequest, parse
from dsv3.api.service import Service
from dsv3.text.reasoning import ReasoningSplitter, start_state


async def chat_completions(service: Service, http: Request) -> Response:
    """Answers a conversation, streamed or whole."""
    request = parse(ChatRequest, await read_json_body(http))
    answer = _Answer(service, request)
    await unless_disconnected(http.receive, answer.prepare())
    if request.stream:
        return EventStream(answer.events())
    return Response(await unless_disconnected(http.receive, answer.whole()), media_type="application/json")


class _Answer:
    """One request on its way to a response."""

    def __init__(self, service: Service, request: ChatRequest):
        self._service, self._request = service, request
        self._model = service.require_model(request.model)
        self._created = int(time.time())
        self._parser = service.config.reasoning_parser
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")

    async def prepare(self) -> None:
        """Reads the prompt; nothing is generated yet."""
        service, request = self._service, self._request
        service.require_ready()
        self._prompt: Prompt = await chat_prompt(service, request)
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        sampling = sampling_params(service, request, [self._prompt], limit, logprobs)
        self._generation = Generation(service, [self._prompt], sampling, request.cache_salt)

    async def whole(self) -> bytes:
        """The JSON of the complete response."""
        choices = [self._choice(update) for update in await collect(self._generation)]
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._generation.usage,
            prompt_token_ids=self._prompt.token_ids if self._request.return_token_ids else msgspec.UNSET,
        )
        return msgspec.json.encode(response)

    async def events(self) -> AsyncGenerator[bytes]:
        """The JSON of each chunk: the role, the text as it comes, why it ended, and the usage if wanted."""
        splitters = [self._splitter() for _ in range(self._generation.n)]
        greeted: set[int] = set()
        async for updates in self._generation.updates():
            for update in updates:
                if update.choice not in greeted:
                    greeted.add(update.choice)
                    yield self._chunk(
                        [ChunkChoice(index=update.choice, delta=Delta(role="assistant", content=""))], True
                    )
                for choice in self._deltas(update, splitters[update.choice]):
                    yield self._chunk([choice])
        if self._with_usage:
            yield self._chunk([], usage=True)

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self._generation.id}"

    @property
    def _with_usage(self) -> bool:
        options = self._request.stream_options
        return options is not None and bool(options.include_usage)

    def _splitter(self) -> ReasoningSplitter:
        return ReasoningSplitter(start_state(self._prompt.text or "", self._parser))

    def _choice(self, update: Update) -> ChatChoice:
        splitter = self._splitter()
        parts = [splitter.push(update.text), splitter.finish()]
        reasoning, content = "".join(r for r, _ in parts), "".join(c for _, c in parts)
        thinks = self._parser != "none"
        return ChatChoice(
            index=update.choice,
            message=AssistantMessage(
                content=content if content or not reasoning else None,
                reasoning_content=(reasoning or None) if thinks else msgspec.UNSET,
            ),
            logprobs=self._logprobs(update),
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            token_ids=update.token_ids if self._request.return_token_ids else msgspec.UNSET,
        )

    def _deltas(self, update: Update, splitter: ReasoningSplitter) -> list[ChunkChoice]:
        """Chunks of one update: reasoning before content; tokens, log-probabilities and the end go with the last."""
        reasoning, content = splitter.push(update.text)
        if update.finish_reason is not None:
            late = splitter.finish()
            reasoning, content = reasoning + late[0], content + late[1]
        deltas = [Delta(reasoning_content=reasoning)] if reasoning else []
        deltas += [Delta(content=content)] if content else []
        logprobs = self._logprobs(update)
        wants_ids = bool(self._request.return_token_ids)
        if not deltas and not (update.finish_reason or (update.token_ids and (logprobs or wants_ids))):
            return []
        last = deltas.pop() if deltas else Delta()
        chunks = [ChunkChoice(index=update.choice, delta=delta) for delta in deltas]
        chunks.append(
            ChunkChoice(
                index=update.choice,
                delta=last,
                logprobs=logprobs,
                finish_reason=update.finish_reason,
                stop_reason=update.stop_reason,
                token_ids=update.token_ids if wants_ids else msgspec.UNSET,
            )
        )
        return chunks

    def _logprobs(self, update: Update) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._service.tokenizer, update.token_ids, update.logprobs or [])

    def _chunk(self, choices: list[ChunkChoice], first: bool = False, usage: bool = False) -> bytes:
        with_ids = first and bool(self._request.return_token_ids)
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=(self._generation.usage if usage else None) if self._with_usage else msgspec.UNSET,
            prompt_token_ids=self._prompt.token_ids if with_ids else msgspec.UNSET,
        )
        return msgspec.json.encode(chunk)
