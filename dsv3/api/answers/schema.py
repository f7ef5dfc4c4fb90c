"""What clients may send: OpenAI's requests and vLLM's additions, with a bound on everything.

Unknown top-level fields are ignored, as vLLM ignores them, since client libraries send new ones all the time; fields
that would change the answer, and that this server does not honour, are refused by name. Ranges of sampling
parameters are `SamplingParams`'s business: here a value only has to be of the right type, finite and of bounded size.
"""

from typing import Annotated, Any, Literal

import msgspec
import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from dsv3.api.answers.errors import ApiError, invalid
from dsv3.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP, MAX_STOP_TOKEN_IDS

MAX_BODY_BYTES = 32 * 2**20
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128
MAX_N = 128
MAX_STOP_CHARS = 1024
MAX_NAME_CHARS = 256
MAX_SALT_CHARS = 1024
MAX_TOKENS_LISTED = 2**20


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain NUL characters")
    return text


Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Float = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, AfterValidator(_no_nul)]
Name = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Model):
    include_usage: bool | None = None


class SampledRequest(_Model):
    """Fields that chat and text completions share; None means the default throughout."""

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    logit_bias: Annotated[dict[str, Float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[Text, StringConstraints(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    user: Any = None


class CompletionRequest(SampledRequest):
    """`POST /v1/completions`. `prompt` is text, token ids, or a list of either; it is read by `prompts`."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class TextPart(_Model):
    type: Literal["text"]
    text: Text


class ChatMessage(_Model):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    tool_call_id: Name | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]
Kwarg = bool | Int | Annotated[str, StringConstraints(max_length=64)] | None


class ChatRequest(SampledRequest):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    reasoning_effort: Annotated[str, StringConstraints(max_length=16)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Kwarg], Field(max_length=16)] | None = None


class TokenizeRequest(_Model):
    """`POST /tokenize`: of a `prompt`, or of the prompt that `messages` make."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Kwarg], Field(max_length=16)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Model):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKENS_LISTED, fail_fast=True)]


# Fields that would change the answer: refused unless they have one of the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none",),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "structured_outputs": (),
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
    "chat_template": (),
    "mm_processor_kwargs": (),
    "kv_transfer_params": (),
    "thinking_token_budget": (),
}


def parse[T: _Model](model: type[T], body: bytes) -> T:
    """Reads a request body; raises ApiError 400 that names the first wrong field and never repeats its value."""
    try:
        request = model.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _first_error(error) from None
    if issubclass(model, SampledRequest):
        _refuse_unsupported(body)
    return request


# Just the fields of `_UNSUPPORTED`; everything else in the body is skipped without being built.
_unsupported_decoder = msgspec.json.Decoder(
    msgspec.defstruct("Unsupported", [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in _UNSUPPORTED])
)


def _refuse_unsupported(body: bytes) -> None:
    try:
        found = _unsupported_decoder.decode(body)
    except msgspec.MsgspecError:  # NaN, Infinity: pydantic reads them
        raise invalid("the body is not valid JSON") from None
    for name, harmless in _UNSUPPORTED.items():
        raw = bytes(getattr(found, name))
        if raw == b"null":
            continue
        if len(raw) > 256 or msgspec.json.decode(raw) not in harmless:
            raise invalid(f"{name} is not supported by this server", name, "unsupported_parameter")


def _first_error(error: pydantic.ValidationError) -> ApiError:
    """Returns the error that lies deepest: of a union's variants that is the one the client meant."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    worst = max(found, key=lambda e: len(e["loc"]))
    if worst["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {worst['msg'].removeprefix('Invalid JSON: ')}"[:200])
    path = [str(part)[:32] for part in worst["loc"][:6] if not _is_variant(part)]
    text = worst["msg"][:200].removeprefix("Value error, ")
    return invalid(f"{'.'.join(path) or 'body'}: {text}", path[0] if path else None)


def _is_variant(part: int | str) -> bool:
    """Names pydantic gives to the variants of a union mean nothing to a client."""
    return isinstance(part, str) and (part in ("str", "int", "bool") or "[" in part or part.startswith("constrained"))
