"""OpenAI's requests, with a limit on every field, its responses, and vLLM's additions to both.

Unknown top-level fields are ignored, as in vLLM, since client libraries send new ones all the time. Fields that would
change the answer and are not supported are refused by name. `SamplingParams` checks the ranges of sampling parameters;
here a value only needs the right type, a finite value and a bounded size. `dsv3.server.serving.request_parsing` parses
the bodies.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dsv3.kv_cache.transfer.protocol import MAX_BOOTSTRAP_ROOM
from dsv3.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP,
    MAX_STOP_TOKEN_IDS,
    MAX_THINKING_TOKENS,
    StructuredOutputsParams,
)
from dsv3.scheduler.request import MAX_PRIORITY

MAX_FIELD_BYTES = 256 * 1024  # of a field that is neither a text, a conversation nor token ids
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128
MAX_STOP_CHARS = 1024
MAX_NAME_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_TOKENS_LISTED = 2**20
MAX_ADDRESSES = 64

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Host = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Port = Annotated[int, Meta(ge=1, le=65535)]
BootstrapRoom = Annotated[int, Meta(ge=0, le=MAX_BOOTSTRAP_ROOM)]


def require_no_nul(text: object) -> None:
    """Raises ValueError for a text with a NUL character; other types pass."""
    if isinstance(text, str) and "\0" in text:
        raise ValueError("must not contain NUL characters")


class StreamOptions(msgspec.Struct):
    """Which events of a stream have the usage: the last one, or with vLLM's `continuous_usage_stats` each one."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TransferParams(msgspec.Struct):
    """The fields of vLLM's `kv_transfer_params` that are used; a router copies them from a response to a request."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_host: Host | None = None
    remote_port: Port | None = None
    # Our addition, opaque to routers: "host:port" of each process of the instance.
    remote_addresses: (
        Annotated[list[Annotated[str, Meta(max_length=MAX_NAME_CHARS)]], Meta(max_length=MAX_ADDRESSES)] | None
    ) = None
    remote_routed_experts: str | None = None  # ours, too: base64 of the ids of the prompt's experts


class Resume(msgspec.Struct, forbid_unknown_fields=True):
    """An answer's tokens so far: those of its only choice, or a list per choice."""

    output_token_ids: list[TokenId | list[TokenId]]


class SchemaFormat(msgspec.Struct):
    """The JSON schema of `response_format`; it is enforced, `strict` or not."""

    schema: dict[str, Any] | None = None
    name: Name | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """OpenAI's way to constrain an answer to JSON; `dsv3.server.serving.sampling` parses it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class SampledRequest(msgspec.Struct, kw_only=True):
    """Fields of both chat and text completions; None means the default."""

    model: Name | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    best_of: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_sampling_mask: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    kv_transfer_params: TransferParams | None = None
    bootstrap_host: Host | Annotated[list[Host], Meta(max_length=MAX_PROMPTS)] | None = None
    bootstrap_port: Port | Annotated[list[Port | None], Meta(max_length=MAX_PROMPTS)] | None = None
    bootstrap_room: BootstrapRoom | Annotated[list[BootstrapRoom], Meta(max_length=MAX_PROMPTS)] | None = None
    resume: Resume | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None

    def __post_init__(self) -> None:
        require_no_nul(self.cache_salt)


class CompletionRequest(SampledRequest, kw_only=True):
    """`POST /v1/completions`. `prompt` is text, token ids, or a list of either (see `dsv3.server.serving.prompts`)."""

    prompt: str | list[TokenId | str | list[TokenId]] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class TextPart(msgspec.Struct, gc=False):
    type: Literal["text"]
    text: str

    def __post_init__(self) -> None:
        require_no_nul(self.text)


class CalledFunction(msgspec.Struct):
    name: Name
    arguments: str


class ToolCall(msgspec.Struct):
    """A call in the conversation so far."""

    function: CalledFunction
    id: Name | UnsetType | None = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation; templates distinguish a field that is null from one that is absent.

    `reasoning` is what newer vLLM calls `reasoning_content`. The role latest_reminder and `task` are DeepSeek-V4's.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)] | UnsetType | None = UNSET
    name: Name | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_call_id: Name | UnsetType | None = UNSET
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | UnsetType | None = UNSET
    task: Name | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        require_no_nul(self.content)
        require_no_nul(self.reasoning_content)
        require_no_nul(self.reasoning)


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
ThinkingTokenBudget = Annotated[int, Meta(ge=0, le=MAX_THINKING_TOKENS)]
Kwarg = bool | Int | Annotated[str, Meta(max_length=64)] | None
Kwargs = Annotated[dict[str, Kwarg], Meta(max_length=16)]


class NamedFunction(msgspec.Struct):
    name: Name


class NamedTool(msgspec.Struct):
    """A `tool_choice` that names the tool to call."""

    function: NamedFunction
    type: Literal["function"] = "function"


# Every tool-call format can write these characters without an escape.
FUNCTION_NAME_RULE = "a name of 1 to 256 characters, without white space, quotes, braces and angle brackets"
FunctionName = Annotated[str, Meta(pattern=r"^[^\s\"'<>{}\x00-\x1f｜]{1,256}\Z")]


class Function(msgspec.Struct):
    """The fields of a function that are checked; the chat template gets all that the client sends."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool that a model may call."""

    type: Literal["function"]
    function: Function


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model reasons, in DeepSeek's and Anthropic's form; `budget_tokens` bounds the reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ThinkingTokenBudget | None = None


class ChatRequest(SampledRequest, kw_only=True):
    """`POST /v1/chat/completions`. `thinking_token_budget` and `thinking.budget_tokens` mean the same."""

    messages: Messages | None = None
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=16)] | None = None
    thinking: Thinking | None = None
    thinking_token_budget: ThinkingTokenBudget | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Kwargs | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: of a `prompt`, or of the prompt that `messages` make."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Kwargs | None = None
    return_token_strs: bool | None = None

    def __post_init__(self) -> None:
        require_no_nul(self.prompt)


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_LISTED)] | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """`POST /inference/v1/generate`; `sampling_params` has vLLM's names, which are those of a text completion."""

    token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_LISTED)] | None = None
    sampling_params: Annotated[dict[str, Any], Meta(max_length=64)] = {}
    request_id: Name | None = None
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Int | None = None
    features: None = None
    kv_transfer_params: TransferParams | None = None


# Fields that would change the answer: refused unless they have one of these values, which change nothing. A request
# type that declares such a field supports it.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (False,),
    "prompt_embeds": (),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "store": (False,),
    "verbosity": ("medium",),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "thinking_token_budget": (),
}

FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request's time went, in milliseconds: `usage.timing` of requests with `X-Request-Timing: 1`.

    From `tokenize_ms` to `decode_ms` parts follow one another: together they take at most `total_ms`. `first_token_ms`
    counts from the request's arrival. `detokenize_ms` is processor time of the API server beside `decode_ms`.
    """

    total_ms: float
    tokenize_ms: float = 0.0
    grammar_ms: float = 0.0
    queue_ms: float = 0.0
    lookup_ms: float = 0.0
    transfer_ms: float = 0.0
    load_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    first_token_ms: float | None = None
    detokenize_ms: float = 0.0
    computed_tokens: int = 0
    cached_tokens: dict[str, int] = {}
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    preemptions: int = 0
    retractions: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    timing: Timing | msgspec.UnsetType = msgspec.UNSET


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Lists of log-probabilities, here and below, are JSON that `dsv3.server.serving.logprobs` has encoded."""

    content: msgspec.Raw
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: msgspec.Raw
    token_logprobs: msgspec.Raw
    top_logprobs: msgspec.Raw
    text_offset: msgspec.Raw


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    """`token_ids` (and a completion's `prompt_token_ids` and `prompt_logprobs`) are absent unless requested.

    So are `routed_experts` and `sampling_mask`, JSON strings that `dsv3.server.serving.handler` encodes.
    `weight_version` names the weights of the last token; `weight_versions`, where there are several, the number of the
    first token and the version for each in turn. They are absent without `--enable_weight_updates`.
    """

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    sampling_mask: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    weight_version: str | msgspec.UnsetType = msgspec.UNSET
    weight_versions: list[tuple[int, str]] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(_Choice, frozen=True, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class MessageToolCall(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: str = "function"


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET
    refusal: None = None


class ChatChoice(_Choice, frozen=True, kw_only=True):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class ChunkChoice(_Choice, frozen=True, kw_only=True):
    """`delta` has new parts of an `AssistantMessage`; the first one of a call has its id, type and name."""

    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None


class _CompletionBase(msgspec.Struct, frozen=True, kw_only=True):
    """`usage` is null in the chunks of a stream that reports it, and absent in the others."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(_CompletionBase, frozen=True, kw_only=True):
    object: str = "text_completion"
    choices: list[CompletionChoice] | msgspec.Raw


class ChatResponse(_CompletionBase, frozen=True, kw_only=True):
    object: str = "chat.completion"
    choices: list[ChatChoice] | msgspec.Raw
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(_CompletionBase, frozen=True, kw_only=True):
    object: str = "chat.completion.chunk"
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
