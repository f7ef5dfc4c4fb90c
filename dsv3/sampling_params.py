"""Sampling parameters of a request, with the names that users know from OpenAI's API and from vLLM."""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_CHOICES = 1024
MAX_DEPTH = 100
"""Nesting of a JSON schema; its parsers recurse."""


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A constraint under vLLM's names, exactly one of these; raises ValueError, naming the field, otherwise.

    `json` is a JSON schema, as an object or as text; `json_object` allows any JSON object. `regex` is in the syntax of
    Rust's regex crate and must match the whole answer; `choice` lists the allowed answers. `grammar` is in Lark's
    syntax as llguidance extends it, or in GBNF.
    """

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(self.__struct_fields__)}, not {given}")
        if self.choice is not None:
            _check_choice(self.choice)
        if any(getattr(self, name) == "" for name in ("json", "regex", "grammar")):
            raise ValueError(f"{given[0]}: must not be empty")

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema, None for another constraint; raises ValueError where the text is not a JSON schema."""
        if self.json_object:
            return {"type": "object"}
        schema = read_schema(self.json) if isinstance(self.json, str) else self.json
        if schema is not None and is_deeper(schema, MAX_DEPTH):
            raise ValueError(f"json: nested deeper than {MAX_DEPTH}")
        return schema


def read_schema(text: str) -> dict[str, Any]:
    """Parses the text of a JSON schema; raises ValueError where it is not one."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("json: the schema's text is not valid JSON") from None
    if not isinstance(schema, dict):
        raise ValueError(f"json: a JSON schema must be an object, not {type(schema).__name__}")
    return schema


def schema_text(schema: Mapping[str, Any]) -> str:
    """Returns a JSON schema as text, with its properties in their order, which is significant."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def is_deeper(value: object, limit: int) -> bool:
    """Returns whether a JSON value is nested deeper than `limit`, without recursion."""
    level: list[Any] = [value]
    for _ in range(limit):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
        if not level:
            return False
    return True


def _check_choice(choice: list[str]) -> None:
    if not 1 <= len(choice) <= MAX_CHOICES:
        raise ValueError(f"choice: {len(choice)} entries; give 1 to {MAX_CHOICES}")
    if not all(choice):
        raise ValueError("choice: an entry is empty; give texts of at least one character")


MAX_N = 1024
MAX_LOGPROBS = 20
MAX_STOP = 16
MAX_THINKING_TOKENS = 2**20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 128
MAX_REPETITION_PENALTY = 100.0
MIN_REPETITION_PENALTY = 1 / MAX_REPETITION_PENALTY
"""The inverse of the maximum, so that logits up to 1e36, multiplied or divided by a penalty, stay finite in float32."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request; raises ValueError, naming the field, for a value out of range.

    `temperature` 0 is greedy. `top_k` 0 (or -1) keeps every token. `logprobs` counts the alternatives reported for each
    token (0: only the sampled one), `prompt_logprobs` the same for each token of the prompt but the first.
    `return_routed_experts` asks for the experts of all tokens of prompt and answer but the last (docs/rl.md).
    `return_sampling_mask` asks for the tokens that each one was drawn from, after all filters.
    `seed` fixes the text whatever else is in the batch. `max_tokens` None: as many as fit. `min_tokens` suppresses
    end-of-sequence and stop tokens, and stop strings, until so many have been generated. `structured_outputs`
    constrains the answer. Where it allows nothing but the end, the answer ends, whatever `min_tokens` and `ignore_eos`
    say. The reasoning of a chat's answer has at most `thinking_token_budget` tokens; then its end marker follows.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    return_sampling_mask: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _within("n", self.n, 1, MAX_N)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _within("top_k", self.top_k, -1, 2**31 - 1)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("seed", self.seed, -(2**63), 2**63 - 1)
        _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens if self.max_tokens is not None else 2**31 - 1)
        _within("thinking_token_budget", self.thinking_token_budget, 0, MAX_THINKING_TOKENS)
        _at_most("stop", self.stop, MAX_STOP)
        _at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _at_most("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        if any(not s for s in self.stop):
            raise ValueError("stop: a string is empty and would stop every text at once; leave it out")
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias[{token}]", bias, -100.0, 100.0)


def _within(name: str, value: float | None, low: float, high: float, *, open_below: bool = False) -> None:
    if value is None:
        return
    if math.isnan(value) or not low <= value <= high or (open_below and value == low):
        raise ValueError(f"{name}: {value} is not between {low}{' (excluded)' if open_below else ''} and {high}")


def _at_most(name: str, items: object, limit: int) -> None:
    count = len(items)  # type: ignore[arg-type]
    if count > limit:
        raise ValueError(f"{name}: {count} entries, at most {limit} are allowed")
