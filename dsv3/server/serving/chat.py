"""`POST /v1/chat/completions`: maps deltas of an answer to OpenAI's JSON."""

from collections.abc import Iterator
from typing import Any

import msgspec

from dsv3.server.protocol.errors import invalid
from dsv3.server.protocol.openai import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ChunkChoice,
    MessageToolCall,
)
from dsv3.server.serving.generation import ChoiceUpdate
from dsv3.server.serving.handler import LIST_OF_GAP, CompleteChoice, RequestHandler, to_event
from dsv3.server.serving.prompts import EncodedPrompt, RequestTools, chat_prompt, read_tools, thinking_token_budget
from dsv3.server.serving.sampling import build_grammar, can_constrain, parse_constraint
from dsv3.server.serving.service import Service
from dsv3.server.tenants import Tenant
from dsv3.text.call_grammar import AnswerConstraints
from dsv3.text.deltas import AnswerDelta, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallStart
from dsv3.text.dialects import ParserState
from dsv3.text.grammar import ReasoningSpan
from dsv3.text.parser import AnswerParser


class ChatHandler(RequestHandler[ChatRequest]):
    """Handles a `ChatRequest`."""

    request_type = ChatRequest
    id_prefix = "chatcmpl-"

    def __init__(self, service: Service, body: bytes | bytearray, tenant: Tenant | None = None):
        super().__init__(service, body, tenant)
        self._tools = RequestTools()
        self._start: tuple[ParserState, ParserState] | None = None

    @property
    def _no_ids(self) -> list[int] | msgspec.UnsetType:
        return [] if self.request.return_token_ids else msgspec.UNSET

    def _prompt_ids(self, is_first: bool = True) -> list[int] | msgspec.UnsetType:
        wanted = is_first and self.request.return_token_ids
        return self.generation.prompts[0].token_ids.tolist() if wanted else msgspec.UNSET

    def check(self) -> None:
        if self.request.top_logprobs is not None and not self.request.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.request.messages is None:
            raise invalid("messages: at least one is needed", "messages")

    async def read_prompts(self) -> list[EncodedPrompt]:
        self._tools = read_tools(self.service, self.request)
        prompt = await chat_prompt(self.service, self.request, self._tools)
        self.request.messages = None  # the prompt holds the same in a fraction of the memory
        return [prompt]

    async def grammar(self, prompts: list[EncodedPrompt]) -> str:
        constraint, calls, parsers = parse_constraint(self.request), self._tools.calls, self.service.parsers
        reasoning = None if parsers is None else parsers.reasoning(prompts[0].text or "")
        budget = None if reasoning is None else self._budget(reasoning)
        if parsers is None or (constraint is None and calls is None and budget is None):
            return await super().grammar(prompts)
        fields = {"response_format": constraint, "tools": calls, "thinking_token_budget": budget}
        wanted = AnswerConstraints(
            constraint=constraint, calls=calls, reasoning=reasoning, thinking_token_budget=budget
        )
        field = next(name for name, value in fields.items() if value is not None)
        return await build_grammar(self.service, wanted, field)

    def _budget(self, reasoning: ReasoningSpan) -> int | None:
        """Returns the bound on the tokens of `reasoning`.

        That of `thinking`, which agents send to any model, is only a hint where the server cannot constrain answers.
        """
        budget = thinking_token_budget(self.request)
        enforceable = can_constrain(self.service) and isinstance(reasoning.close, int)
        return budget if enforceable or self.request.thinking_token_budget is not None else None

    def max_tokens(self) -> int | None:
        request = self.request
        return request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens

    def num_logprobs(self) -> int | None:
        return (self.request.top_logprobs or 0) if self.request.logprobs else None

    def parser(self, prompt: EncodedPrompt) -> AnswerParser | None:
        parsers = self.service.parsers
        if parsers is None:
            return None
        if self._start is None:  # all choices have one prompt
            self._start = parsers.start(prompt.text or "")
        return parsers.parser(self._start, self._tools.wanted)

    def response(self, choices: msgspec.Raw) -> ChatResponse:
        return ChatResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage,
            prompt_token_ids=self._prompt_ids(),
        )

    def events(self, update: ChoiceUpdate) -> list[bytes]:
        """Returns a chunk with the role first, then one per delta; the last has the finish reason."""
        if self.is_plain and update.finish_reason is None and update.choice in self.started:  # the usual case
            index, version = update.choice, update.weight_version or msgspec.UNSET
            deltas = map(_openai_delta, update.deltas)
            return [self.plain_event(ChunkChoice(index=index, delta=each, weight_version=version)) for each in deltas]
        chunks = [self.chunk([choice]) for choice in self._chunks(update)]
        if update.choice not in self.started:
            self.started.add(update.choice)
            delta = {"role": "assistant", "content": ""}
            first = ChunkChoice(index=update.choice, delta=delta, token_ids=self._no_ids)
            chunks.insert(0, self.chunk([first], is_first=True))
        return [to_event(chunk) for chunk in chunks]

    def chunk(self, choices: list[ChunkChoice], usage: object = None, is_first: bool = False) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage if self.includes_usage else msgspec.UNSET,  # type: ignore[arg-type]
            prompt_token_ids=self._prompt_ids(is_first),
        )

    def choice(self, whole: CompleteChoice) -> Iterator[bytes]:
        content, reasoning = whole.text, whole.reasoning
        calls = [MessageToolCall(call.id, CalledFunction(call.name, arguments)) for call, arguments in whole.calls]
        parsers = self.service.parsers
        thinks = parsers is not None and parsers.splits_reasoning
        choice = ChatChoice(
            message=AssistantMessage(
                content=content if content or not (reasoning or calls) else None,
                reasoning_content=(reasoning or None) if thinks else msgspec.UNSET,
                tool_calls=calls or msgspec.UNSET,
            ),
            logprobs=ChatLogprobs(LIST_OF_GAP) if self.request.logprobs else None,
            stop_reason=whole.stop_reason,
            **self.fields_of(whole),
        )
        return self.fill_choice(choice, whole, whole.columns)

    def logprob_columns(self, update: ChoiceUpdate) -> tuple[bytes, ...]:
        if not self.request.logprobs:
            return ()
        return self.service.logprobs.chat(update.token_ids, update.logprobs or [])

    def _chunks(self, update: ChoiceUpdate) -> list[ChunkChoice]:
        """Returns one chunk per delta; tokens, log-probabilities and the finish reason are in the last.

        If token ids are requested, the other chunks have an empty list: a router holds them back until the last one
        (docs/failures.md).
        """
        columns, fields = self.logprob_columns(update), self.new_fields_of(update)
        logprobs = ChatLogprobs(msgspec.Raw(b"[%s]" % columns[0])) if columns else None
        has_tokens = bool(update.token_ids) and (logprobs is not None or bool(self.request.return_token_ids))
        has_arrays = "routed_experts" in fields or "sampling_mask" in fields
        if not (update.deltas or update.finish_reason or has_tokens or has_arrays):
            return []
        deltas = [_openai_delta(delta) for delta in update.deltas] or [{}]
        chunks = [ChunkChoice(index=update.choice, delta=delta, token_ids=self._no_ids) for delta in deltas[:-1]]
        return [*chunks, ChunkChoice(delta=deltas[-1], logprobs=logprobs, stop_reason=update.stop_reason, **fields)]


def _openai_delta(delta: AnswerDelta) -> dict[str, Any]:
    match delta:
        case TextDelta():
            return {"content": delta.text}
        case ReasoningDelta():
            return {"reasoning_content": delta.text}
        case ToolCallStart():
            function = {"name": delta.name, "arguments": ""}
            return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
        case ToolArgumentsDelta():
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
