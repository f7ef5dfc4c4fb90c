"""The sampling parameters of a validated request, and the grammar that constrains its answers.

A grammar is written and compiled in a process that can be killed, before anything is sent to the engine.
"""

from dsv3.sampling_params import SamplingParams, StructuredOutputsParams
from dsv3.server.protocol.errors import ApiError, invalid, too_long, unavailable
from dsv3.server.protocol.openai import CompletionRequest, ResponseFormat, SampledRequest
from dsv3.server.serving.prompts import EncodedPrompt
from dsv3.server.serving.service import Service
from dsv3.server.worker_process import WorkerDied
from dsv3.text.call_grammar import AnswerConstraints
from dsv3.text.matcher import GrammarError, VocabularyError

MAX_TOTAL_CHARS = 2**24
"""Limit on the characters of the grammars of all prompts of one request: each prompt's message has its own copy."""


def parse_constraint(request: SampledRequest) -> StructuredOutputsParams | None:
    """Returns the constraint of a request; None without one. Raises ApiError where it has two."""
    wanted = None if request.response_format is None else _of_format(request.response_format)
    if wanted is not None and request.structured_outputs is not None:
        raise invalid(
            "structured_outputs: cannot be combined with response_format; send one of them", "structured_outputs"
        )
    return wanted or request.structured_outputs


def _of_format(given: ResponseFormat) -> StructuredOutputsParams | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    schema = None if given.json_schema is None else given.json_schema.schema
    if schema is None:
        raise invalid("response_format: json_schema.schema is missing", "response_format")
    return StructuredOutputsParams(json=schema)


def can_constrain(service: Service) -> bool:
    """Returns whether the server can constrain answers."""
    return service.grammars is not None and service.require_ready().rules.takes_grammars


async def build_grammar(service: Service, wanted: AnswerConstraints, field: str, prompts: int = 1) -> str:
    """Returns the grammar of an answer; it has been compiled once, so it is valid.

    Raises ApiError: 400 with `field` and the reason, 503 where too many grammars wait.
    """
    rules = service.require_ready().rules
    if service.grammars is None or not can_constrain(service):
        what = "this server cannot constrain answers: it has no tokenizer.json, or synthetic_acceptance_rates are set"

        raise invalid(f"{field}: {what}", field, "unsupported_parameter")
    try:
        with service.busy_is_503():
            grammar = await service.grammars.compile(wanted, rules)
        if prompts * len(grammar) > MAX_TOTAL_CHARS:
            raise invalid(f"{field}: too large for {prompts} prompts in one request; send several", field)
    except (GrammarError, VocabularyError) as error:
        service.metrics.add("grammars_refused", 1)
        raise invalid(f"{field}: {str(error).removeprefix(f'{field}: ')}", field) from None
    except WorkerDied as error:
        service.metrics.record_rejected("failed")
        raise unavailable(str(error), "grammar_worker_died") from None
    return grammar


_COMPLETION_MAX_TOKENS = 16  # OpenAI's default
# All prompts of one request, n times each: one message to the engine has them all.
_MAX_TOTAL_TOKENS = 2**24
# Of a response that is not streamed: 60 bytes each. A whole context of 163,840 tokens has 3.4 million.
MAX_WHOLE_LOGPROBS = 2**22
_SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)


def sampling_params(
    service: Service,
    request: SampledRequest,
    prompts: list[EncodedPrompt],
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    """Returns the sampling parameters, validated against the context length and the server's limits."""
    info = service.require_ready()
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise invalid("best_of: must equal n", "best_of", "unsupported_parameter")
    if max_tokens is None and isinstance(request, CompletionRequest):
        max_tokens = min(
            _COMPLETION_MAX_TOKENS, max(1, info.rules.max_model_len - max(len(p.token_ids) for p in prompts))
        )
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    given = service.sampling_defaults | given
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    try:
        sampling = SamplingParams(
            **given,
            n=request.n or 1,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs(request),
            return_routed_experts=bool(request.return_routed_experts),
            return_sampling_mask=bool(request.return_sampling_mask),
            stop=tuple(stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            logit_bias=_logit_bias(request.logit_bias or {}, info.rules.vocab_size),
        )
    except ValueError as error:
        raise invalid(str(error), str(error).partition(":")[0]) from None
    limit = info.rules.max_model_len
    for prompt in prompts:
        if max_tokens is not None and len(prompt.token_ids) + max_tokens > limit:
            raise does_not_fit(len(prompt.token_ids), max_tokens, limit)
    if sampling.n * sum(len(prompt.token_ids) for prompt in prompts) > _MAX_TOTAL_TOKENS:
        raise invalid(f"prompts and n make more than {_MAX_TOTAL_TOKENS} prompt tokens; send several requests", "n")
    _bound_prompt_logprobs(sampling, sum(len(prompt.token_ids) for prompt in prompts))
    if not request.stream:
        _bound_logprobs(sampling, [limit - len(prompt.token_ids) for prompt in prompts])
    return sampling


def prompt_logprobs(request: SampledRequest) -> int | None:
    """Returns how many alternatives each prompt token comes with; None without log-probabilities of the prompt."""
    if not isinstance(request, CompletionRequest):
        return None
    echoed = request.logprobs if request.echo else None
    return max((count for count in (request.prompt_logprobs, echoed) if count is not None), default=None)


def _bound_prompt_logprobs(sampling: SamplingParams, tokens: int) -> None:
    if sampling.prompt_logprobs is None:
        return
    if (count := tokens * (sampling.prompt_logprobs + 1)) > MAX_WHOLE_LOGPROBS:
        what = f"the prompts have {count} log-probabilities, at most {MAX_WHOLE_LOGPROBS} are returned"
        raise invalid(f"logprobs: {what}; send several requests, or lower logprobs", "logprobs")


def _bound_logprobs(sampling: SamplingParams, left: list[int]) -> None:
    """Raises ApiError for more log-probabilities than a response may hold; prompts leave `left` tokens."""
    if sampling.logprobs is None:
        return
    tokens = sampling.n * sum(max(0, min(sampling.max_tokens or rest, rest)) for rest in left)
    if (count := tokens * (sampling.logprobs + 1)) > MAX_WHOLE_LOGPROBS:
        what = f"the answer may hold {count} log-probabilities, at most {MAX_WHOLE_LOGPROBS} are returned"
        raise invalid(f"logprobs: {what}; lower max_tokens, n or the alternatives per token, or stream", "logprobs")


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    """Returns the biases by token id; keys are strings in JSON."""
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise invalid(f"logit_bias: keys are token ids from 0 to {vocab_size - 1}", "logit_bias")
        bias[int(key)] = value
    return bias


def does_not_fit(prompt: int, max_tokens: int, limit: int) -> ApiError:
    """400: prompt and `max_tokens` together exceed the context."""
    total = prompt + max_tokens
    wanted = f"{total} tokens ({prompt} in the prompt, {max_tokens} in the completion)"
    return too_long(limit, f"{wanted}; please reduce either")
