"""Renders the chat template and tokenizes the prompts of a validated request; parses its tools."""

import array
import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from dsv3.sampling_params import MAX_DEPTH, is_deeper
from dsv3.server.protocol.errors import ApiError, invalid, unavailable
from dsv3.server.protocol.openai import (
    MAX_PROMPTS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    NamedTool,
    TokenizeRequest,
    Tool,
)
from dsv3.server.serving.request_parsing import invalid_field
from dsv3.server.serving.service import Service
from dsv3.server.templates import Render
from dsv3.server.worker_process import WorkerDied
from dsv3.text.call_grammar import CallableFunction, CallRules
from dsv3.text.chat_template import TemplateError
from dsv3.text.parser import Tools


@dataclasses.dataclass(frozen=True)
class RequestTools:
    """A request's tools: `shown` for the chat template, `wanted` for the parser, None where the client gets no calls.

    `calls` constrain the answer; None leaves the model free in how it writes calls.
    """

    shown: list[dict[str, Any]] | None = None
    wanted: Tools | None = None
    calls: CallRules | None = None


def read_tools(service: Service, request: ChatRequest) -> RequestTools:
    """Parses a request's tools; raises ApiError.

    With `tool_choice` "none" the model sees none of them: it would try to call them.
    """
    if not request.tools:
        if request.tool_choice not in (None, "auto", "none"):
            raise invalid("tool_choice: the request has no tools", "tool_choice")
        return RequestTools()
    tools = _checked(request.tools)
    if request.tool_choice == "none":
        return RequestTools()
    if service.parsers is None or service.parsers.dialect is None:
        why = "the tool-call format of this model is unknown; start the server with --tool_call_parser"
        raise invalid(f'tools: {why}, or send tool_choice "none"', "tools", "unsupported_parameter")
    if not service.shows_tools:
        raise invalid("tools: this model's chat template does not render them", "tools", "unsupported_parameter")
    parameters = {tool.function.name: _string_arguments(tool.function.parameters) for tool in tools}
    wanted = Tools(parameters, parallel=request.parallel_tool_calls is not False)
    return RequestTools(request.tools, wanted, _rules(request, tools, wanted.parallel))


def _rules(request: ChatRequest, tools: list[Tool], parallel: bool) -> CallRules | None:
    """Returns the rules for calls where one is required or a tool is strict, else None."""
    found = [tool.function for tool in tools]
    functions = [CallableFunction(each.name, each.parameters, bool(each.strict)) for each in found]
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        named = [function for function in functions if function.name == name]
        if not named:
            raise invalid("tool_choice: none of the tools has this name", "tool_choice")
        return CallRules(named[:1], required=True, parallel=False)
    required = request.tool_choice == "required"
    if required or any(function.strict for function in functions):
        return CallRules(functions, required, parallel)
    return None


def _checked(found: list[dict[str, Any]]) -> list[Tool]:
    if is_deeper(found, MAX_DEPTH):
        raise invalid(f"tools: nested deeper than {MAX_DEPTH}", "tools")
    try:
        return msgspec.convert(found, list[Tool])
    except msgspec.ValidationError as error:
        raise invalid_field(error, "tools", list[Tool]) from None


def _string_arguments(schema: dict[str, Any] | None) -> dict[str, bool | None]:
    """Returns for each argument of a JSON schema whether it is a string; None where the schema leaves it open."""
    properties = (schema or {}).get("properties")
    if not isinstance(properties, dict):
        return {}
    types = {name: each.get("type") if isinstance(each, dict) else None for name, each in properties.items()}
    return {name: kind == "string" if isinstance(kind, str) else None for name, kind in types.items()}


_MAX_CHARS = 2**25  # of a text that a response repeats: as much as a body may hold
_INLINE_IDS = 4096  # more are detokenized in a thread: 0.2 us per token


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A tokenized prompt; `text` is what `echo` repeats, and its end decides whether the answer starts with reasoning.

    `token_ids` are int32: a list takes 40 bytes per token.
    """

    token_ids: array.array[int]
    text: str | None = None


async def completion_prompts(service: Service, request: CompletionRequest) -> list[EncodedPrompt]:
    """Returns the prompts of a text completion: text, token ids, or a list of either."""
    found: Any = request.prompt
    if isinstance(found, str):
        found = [found]
    elif isinstance(found, list) and found and isinstance(found[0], int):
        found = [_token_ids(found, service)]
    elif isinstance(found, array.array):
        found = [found]
    if not isinstance(found, list) or not found:
        raise invalid("prompt: expected text, token ids, or a list of either, and not an empty one", "prompt")
    if len(found) > MAX_PROMPTS:
        raise invalid(f"prompt: {len(found)} prompts, at most {MAX_PROMPTS} are allowed", "prompt")
    add_special = request.add_special_tokens is not False
    return [await _prompt(service, one, add_special) for one in found]


async def echoed_prompts(service: Service, prompts: list[EncodedPrompt], n: int) -> list[EncodedPrompt]:
    """Returns the prompts with the texts that `echo` repeats in each of `n` choices; ApiError if they are too long."""
    tokenizer, vocab_size = service.tokenizer, service.require_ready().rules.vocab_size
    if tokenizer is None:
        return prompts

    def echoed(prompt: EncodedPrompt) -> EncodedPrompt:
        if prompt.text is not None:
            return prompt
        if max(prompt.token_ids) >= vocab_size:
            raise not_in_vocabulary(vocab_size)
        return EncodedPrompt(prompt.token_ids, tokenizer.decode(prompt.token_ids))

    is_long = sum(len(p.token_ids) for p in prompts) > _INLINE_IDS
    prompts = await service.run(is_long, lambda: [echoed(prompt) for prompt in prompts])
    if (count := n * sum(len(p.text or "") for p in prompts)) > _MAX_CHARS:
        raise invalid(f"echo: prompts and n make {count} characters, at most {_MAX_CHARS} are repeated", "echo")
    return prompts


async def chat_prompt(service: Service, request: ChatRequest, tools: RequestTools) -> EncodedPrompt:
    """Returns the prompt of a conversation."""
    rendered = await _rendered(service, request, tools, request.reasoning_effort)
    return await _encoded_chat(service, rendered, add_special_tokens=False)


async def tokenize_prompt(service: Service, request: TokenizeRequest) -> EncodedPrompt:
    """Returns the prompt of a `/tokenize` request: a text or a conversation."""
    if (request.prompt is None) == (request.messages is None):
        raise invalid("exactly one of prompt and messages is needed", "prompt")
    if request.prompt is not None:
        ids = await service.encode(request.prompt, request.add_special_tokens is not False, "prompt")
        return EncodedPrompt(ids, request.prompt)
    rendered = await _rendered(service, request, RequestTools(), None)
    return await _encoded_chat(service, rendered, bool(request.add_special_tokens))


async def _encoded_chat(service: Service, rendered: str, add_special_tokens: bool) -> EncodedPrompt:
    """Tokenizes a rendered conversation; the prompt's `text` has the special tokens in their usual form."""
    tokenizer = service.chat_tokenizer
    assert tokenizer is not None  # or nothing could be rendered
    try:
        text = tokenizer.markers.show(rendered)
    except ValueError as error:
        raise invalid(f"the chat template cannot render these messages ({error})", "messages") from None
    ids = await service.encode(rendered, add_special_tokens=add_special_tokens, param="messages", tokenizer=tokenizer)
    return EncodedPrompt(ids, text)


async def _prompt(service: Service, found: Any, add_special: bool) -> EncodedPrompt:
    if isinstance(found, str):
        if not found or "\0" in found:
            raise invalid("prompt: a text must not be empty and must not contain NUL characters", "prompt")
        return EncodedPrompt(await service.encode(found, add_special, "prompt"), found)
    if isinstance(found, list | array.array) and found:
        return EncodedPrompt(array.array("i", found))
    raise invalid("prompt: expected text, token ids, or a list of either, and not an empty one", "prompt")


def _token_ids(found: list[Any], service: Service) -> array.array[int]:
    """Converts a list of token ids; raises ApiError for other items. `prepare` checks their range."""
    try:
        return array.array("i", found)
    except TypeError:
        raise not_in_vocabulary(service.require_ready().rules.vocab_size) from None


def not_in_vocabulary(vocab_size: int) -> ApiError:
    """400: a prompt has an item that is not a token id."""
    return invalid(f"prompt: a token id is an integer from 0 to {vocab_size - 1}", "prompt")


async def _rendered(
    service: Service,
    request: ChatRequest | TokenizeRequest,
    tools: RequestTools,
    reasoning_effort: str | None,
) -> str:
    if service.tokenizer is None or service.templates is None:
        what = "no tokenizer" if service.tokenizer is None else "no chat template"
        raise invalid(f"this model has {what}: use /v1/completions", "messages", "no_chat_template")
    try:
        with service.busy_is_503():
            return await service.templates.render(_render_request(request, tools, reasoning_effort))
    except TemplateError as error:
        raise invalid(str(error), "messages") from None
    except WorkerDied as error:
        service.metrics.record_rejected("failed")
        raise unavailable(str(error), "template_worker_died") from None


def _render_request(
    request: ChatRequest | TokenizeRequest, tools: RequestTools, reasoning_effort: str | None
) -> Render:
    continued = bool(request.continue_final_message)
    prompted = request.add_generation_prompt if request.add_generation_prompt is not None else not continued
    kwargs: dict[str, Any] = _thinking_kwargs(request) if isinstance(request, ChatRequest) else {}
    kwargs |= {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    kwargs |= request.chat_template_kwargs or {}
    assert request.messages is not None
    wanted = request.response_format if isinstance(request, ChatRequest) else None
    return Render(
        [_template_message(message, i) for i, message in enumerate(request.messages)],
        tools.shown,
        prompted,
        continued,
        kwargs,
        wanted.json_schema.schema if wanted is not None and wanted.json_schema is not None else None,
    )


def _thinking_kwargs(request: ChatRequest) -> dict[str, Any]:
    """Returns the template's variables: DeepSeek's `thinking`, GLM's `enable_thinking`, and the budget in tokens."""
    kwargs: dict[str, Any] = {}
    if request.thinking is not None and request.thinking.type != "adaptive":
        kwargs |= dict.fromkeys(("thinking", "enable_thinking"), request.thinking.type == "enabled")
    if (budget := thinking_token_budget(request)) is not None:
        kwargs["thinking_budget"] = budget
    return kwargs


def thinking_token_budget(request: ChatRequest) -> int | None:
    """Returns how many tokens the reasoning may have, None for any number; raises ApiError where two fields differ."""
    given = {request.thinking_token_budget, request.thinking.budget_tokens if request.thinking is not None else None}
    given -= {None}
    if len(given) > 1:
        raise invalid("thinking_token_budget: differs from thinking.budget_tokens; send one", "thinking_token_budget")
    return next(iter(given), None)


def _template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    """Returns a message as templates expect it: plain text content, and only roles that they know."""
    fields = msgspec.structs.asdict(message)
    fields = {name: value for name, value in fields.items() if value is not msgspec.UNSET}
    reasoning = fields.pop("reasoning", None)
    if reasoning is not None and message.reasoning_content in (None, msgspec.UNSET):
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [{"type": "function", **msgspec.to_builtins(call)} for call in message.tool_calls]
        fields.setdefault("content", None)
    else:  # an empty list is not None: DeepSeek's templates would open a block of calls
        fields.pop("tool_calls", None)
    fields["role"] = "system" if message.role == "developer" else message.role
    if isinstance(message.content, list):
        fields["content"] = "\n".join(part.text for part in message.content)
    if fields.get("content") is None and message.role != "assistant":
        raise invalid(f"messages[{index}]: a message of the role {message.role} needs content", "messages")
    return fields


async def detokenize(service: Service, tokens: Sequence[int] | None) -> str:
    """Returns the text of token ids, of at most 2^25 characters; raises ApiError, also without a tokenizer."""
    if tokens is None:
        raise invalid("tokens: a list of token ids is needed", "tokens")
    if service.tokenizer is None:
        raise invalid("this model has no tokenizer", "tokens", "no_tokenizer")
    if tokens and max(tokens) >= service.tokenizer.vocab_size:
        raise invalid(f"tokens: a token id is an integer from 0 to {service.tokenizer.vocab_size - 1}", "tokens")
    tokenizer = service.tokenizer
    text = await service.run(len(tokens) > _INLINE_IDS, lambda: tokenizer.decode(tokens, skip_special_tokens=False))
    if len(text) > _MAX_CHARS:  # a token may have 128 characters, and a request a million tokens
        raise invalid(f"tokens: they make {len(text)} characters, at most {_MAX_CHARS} are returned", "tokens")
    return text


async def token_strings(service: Service, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token; empty without a tokenizer."""
    tokenizer = service.tokenizer
    if tokenizer is None:
        return []
    return await service.run(
        len(ids) > _INLINE_IDS, lambda: [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    )
