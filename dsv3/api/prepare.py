"""From a validated request to prompts of token ids and sampling parameters."""

import dataclasses
from typing import Any

from dsv3.api import frames
from dsv3.api.errors import invalid
from dsv3.api.frames import EngineInfo
from dsv3.api.schema import MAX_PROMPTS, ChatRequest, CompletionRequest, Message, Sampled, TokenizeRequest
from dsv3.api.service import Service, too_long
from dsv3.sampling_params import SamplingParams
from dsv3.text.chat_template import TemplateError

_COMPLETION_MAX_TOKENS = 16  # OpenAI's default
# All prompts of one HTTP request, n times each; they go to the engine in one message.
_MAX_TOTAL_TOKENS = 2**24
_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as the engine takes it; `text` is what `echo` repeats, and the end of it where reasoning starts."""

    token_ids: list[int]
    text: str | None = None


async def completion_prompts(service: Service, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a text completion: text, token ids, or a list of either."""
    found = request.prompt
    if isinstance(found, str) or (isinstance(found, list) and found and isinstance(found[0], int)):
        found = [found]
    if not isinstance(found, list) or not found:
        raise invalid("prompt: expected text, token ids, or a list of either, and not an empty one", "prompt")
    if len(found) > MAX_PROMPTS:
        raise invalid(f"prompt: {len(found)} prompts, at most {MAX_PROMPTS} are allowed", "prompt")
    add_special = request.add_special_tokens is not False
    return [await _prompt(service, one, add_special) for one in found]


async def chat_prompt(service: Service, request: ChatRequest) -> Prompt:
    """The prompt of a conversation."""
    text = await _rendered(service, request, _tools(request), request.reasoning_effort)
    ids = await service.encode(text, add_special_tokens=False, param="messages")
    return Prompt(ids, text)


async def tokenize_prompt(service: Service, request: TokenizeRequest) -> Prompt:
    """The prompt of a `/tokenize` request, which may be a text or a conversation."""
    if (request.prompt is None) == (request.messages is None):
        raise invalid("exactly one of prompt and messages is needed", "prompt")
    if request.prompt is not None:
        ids = await service.encode(request.prompt, request.add_special_tokens is not False, "prompt")
        return Prompt(ids, request.prompt)
    text = await _rendered(service, request, None, None)
    return Prompt(await service.encode(text, bool(request.add_special_tokens), "messages"), text)


def sampling_params(
    service: Service, request: Sampled, prompts: list[Prompt], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The sampling parameters, checked against the context that `prompts` leave and what the server can hold."""
    info = service.require_ready()
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise invalid("best_of is not supported other than equal to n", "best_of", "unsupported_parameter")
    if max_tokens is None and isinstance(request, CompletionRequest):
        max_tokens = min(
            _COMPLETION_MAX_TOKENS, max(1, info.rules.max_model_len - max(len(p.token_ids) for p in prompts))
        )
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    given = service.config.sampling_defaults | given
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    try:
        sampling = SamplingParams(
            **given,
            n=request.n or 1,
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=tuple(stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            logit_bias=_logit_bias(request.logit_bias or {}, info.rules.vocab_size),
        )
    except ValueError as error:
        raise invalid(str(error), str(error).partition(":")[0]) from None
    for prompt in prompts:
        _check_fits(len(prompt.token_ids), max_tokens, info.rules.max_model_len)
    if sampling.n * sum(len(prompt.token_ids) for prompt in prompts) > _MAX_TOTAL_TOKENS:
        raise invalid(f"prompts and n make more than {_MAX_TOTAL_TOKENS} prompt tokens; send several requests", "n")
    return sampling


async def _prompt(service: Service, found: Any, add_special: bool) -> Prompt:
    if isinstance(found, str):
        if not found or "\0" in found:
            raise invalid("prompt: a text must not be empty and must not contain NUL characters", "prompt")
        return Prompt(await service.encode(found, add_special, "prompt"), found)
    if isinstance(found, list) and found:
        return Prompt(_checked_ids(found, service.require_ready()))
    raise invalid("prompt: expected text, token ids, or a list of either, and not an empty one", "prompt")


def _checked_ids(ids: list[Any], info: EngineInfo) -> list[int]:
    if len(ids) >= info.rules.max_model_len:
        raise too_long(info.rules.max_model_len, f"a prompt of {len(ids)} tokens")
    if not all(type(i) is int and 0 <= i < info.rules.vocab_size for i in ids):
        raise invalid(f"prompt: a token id is an integer from 0 to {info.rules.vocab_size - 1}", "prompt")
    return ids


def _check_fits(prompt: int, max_tokens: int | None, limit: int) -> None:
    if prompt + (max_tokens or 1) > limit:
        wanted = f"{prompt + (max_tokens or 1)} tokens ({prompt} in the prompt, {max_tokens or 1} in the completion)"
        raise too_long(limit, f"{wanted}; please reduce either")


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    """JSON has only strings for keys."""
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise invalid(f"logit_bias: keys are token ids from 0 to {vocab_size - 1}", "logit_bias")
        bias[int(key)] = value
    return bias


def _tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """Tools are shown to the model only when the client asks for no parsing of calls, which this server lacks."""
    if not request.tools:
        if request.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return None
    if request.tool_choice != "none":
        text = 'tool calls are not parsed by this server; with tool_choice "none" the tools are only shown to the model'
        raise invalid(text, "tools", "unsupported_parameter")
    return request.tools


async def _rendered(
    service: Service,
    request: ChatRequest | TokenizeRequest,
    tools: list[dict[str, Any]] | None,
    reasoning_effort: str | None,
) -> str:
    if service.tokenizer is None or service.templates is None:
        what = "no tokenizer" if service.tokenizer is None else "no chat template"
        raise invalid(f"this model has {what}: use /v1/completions", "messages", "no_chat_template")
    continued = bool(request.continue_final_message)
    prompted = request.add_generation_prompt if request.add_generation_prompt is not None else not continued
    kwargs: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", reasoning_effort)
    assert request.messages is not None
    messages = [_template_message(message) for message in request.messages]
    try:
        return await service.templates.render(frames.Render(messages, tools, prompted, continued, kwargs))
    except TemplateError as error:
        raise invalid(str(error), "messages") from None


def _template_message(message: Message) -> dict[str, object]:
    """A message as templates expect it: plain text content, no role they do not know."""
    fields = message.model_dump(exclude_unset=True)
    fields["role"] = "system" if message.role == "developer" else message.role
    if isinstance(message.content, list):
        fields["content"] = "\n".join(part.text for part in message.content)
    if message.content is None and not message.tool_calls:
        raise invalid("messages: a message without tool calls needs content", "messages")
    return fields


def detokenize(service: Service, tokens: list[int]) -> str:
    """The text of token ids; ApiError without a tokenizer."""
    if service.tokenizer is None:
        raise invalid("this model has no tokenizer", "tokens", "no_tokenizer")
    if any(token >= service.tokenizer.vocab_size for token in tokens):
        raise invalid(f"tokens: a token id is an integer from 0 to {service.tokenizer.vocab_size - 1}", "tokens")
    return service.tokenizer.decode(tokens, skip_special_tokens=False)
