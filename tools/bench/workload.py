"""Decides what a load test sends and when: prompts of given lengths or from a file, and when each is due."""

import dataclasses
import json
import math
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# These are common in English and in programs. With the blank before it each is one token in most vocabularies.
_COMMON = """
    the of and to in is for that this with as are by from or an be not if it will can on at when all has have one but
    use which its used number name value list data file code time string return object method function class set type
    key path line text module import other new should must same first last only default index test error case part
    read write call result input output state order form size point end start make
"""
WORDS = _COMMON.split()


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The content of one request: token ids or text for /v1/completions, messages for /v1/chat/completions."""

    content: list[int] | str | list[dict[str, Any]]
    output_len: int


@dataclasses.dataclass(frozen=True)
class RandomPrompts:
    """Random prompts: a shared prefix of `prefix_len` tokens, then `input_len` tokens that belong to one prompt.

    Lengths of inputs and outputs are drawn evenly from `length * (1 - range_ratio)` to `length * (1 + range_ratio)`.
    `num_prefixes` different prefixes are used equally often. Raises ValueError with the option that is out of range.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1")
        if self.prefix_len < 0:
            raise ValueError(f"--prefix_len {self.prefix_len}: must not be negative")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"--range_ratio {self.range_ratio}: must be at least 0 and less than 1")

    def draw(self, count: int, units: Sequence[int] | Sequence[str], seed: int) -> Iterator[Prompt]:
        """Yields `count` prompts made of `units`: token ids give prompts of token ids, words give text."""
        rng = random.Random(seed)
        prefixes = [rng.choices(units, k=self.prefix_len) for _ in range(self.num_prefixes)]
        for i in range(count):
            own = rng.choices(units, k=self._length(rng, self.input_len))
            sequence = [*prefixes[i % self.num_prefixes], *own]
            yield Prompt(_join(sequence), self._length(rng, self.output_len))

    def _length(self, rng: random.Random, mean: int) -> int:
        low, high = math.floor(mean * (1 - self.range_ratio)), math.ceil(mean * (1 + self.range_ratio))
        return rng.randint(max(1, low), max(1, high))


def _join(sequence: list[Any]) -> list[int] | str:
    return " ".join(sequence) if isinstance(sequence[0], str) else sequence


def load_dataset(path: pathlib.Path, output_len: int) -> list[Prompt]:
    """Reads the prompts of a JSON Lines file: `prompt` (text or token ids) or `messages`, optionally `max_tokens`.

    Lines without `max_tokens` ask for `output_len`. Raises ValueError with the line that holds anything else.
    """
    prompts = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                prompts.append(_dataset_prompt(line, f"{path}:{number}", output_len))
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def _dataset_prompt(line: bytes, where: str, output_len: int) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError(f'{where}: expected an object with either "prompt" or "messages"')
    content, limit = row.get("prompt", row.get("messages")), row.get("max_tokens", output_len)
    if not isinstance(content, str | list) or not content:
        raise ValueError(f"{where}: the prompt must be text or a list, and not empty")
    if not isinstance(limit, int) or limit < 1:
        raise ValueError(f"{where}: max_tokens {limit!r} is not a positive number")
    return Prompt(content, limit)


def repeat(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """Returns `count` of the prompts in random order; the uses of two prompts differ by one at most."""
    rng, drawn = random.Random(seed), list[Prompt]()
    while len(drawn) < count:
        drawn += rng.sample(prompts, min(len(prompts), count - len(drawn)))
    return drawn


@dataclasses.dataclass(frozen=True)
class RequestFormat:
    """Turns prompts into request bodies; `endpoint` is "completions" or "chat".

    `extensions` adds fields that OpenAI's API does not have: `ignore_eos` (answers have exactly the length asked for)
    and `return_token_ids` (tokens can be counted). Servers that refuse unknown fields need it off.
    """

    endpoint: str
    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    extensions: bool = True

    @property
    def path(self) -> str:
        """The route that the requests go to."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, prompt: Prompt) -> bytes:
        """Returns the JSON body. Raises ValueError where the endpoint cannot take the prompt."""
        fields = {
            "model": self.model,
            **self._content(prompt),
            "max_tokens": prompt.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.extensions:
            fields |= {"ignore_eos": self.ignore_eos, "return_token_ids": True}
        return json.dumps(fields).encode()

    def _content(self, prompt: Prompt) -> dict[str, Any]:
        content = prompt.content
        is_messages = isinstance(content, list) and isinstance(content[0], dict)
        if self.endpoint == "completions":
            if is_messages:
                raise ValueError('a prompt of "messages" needs --endpoint=chat')
            return {"prompt": content}
        if not is_messages and not isinstance(content, str):
            raise ValueError("--endpoint=chat takes text or messages, not token ids")
        return {"messages": content if is_messages else [{"role": "user", "content": content}]}


def arrival_offsets(count: int, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Returns when each of `count` requests is due, in seconds from the start.

    Gaps follow a gamma distribution of mean 1 / `request_rate` and shape `burstiness`: 1 is a Poisson process, less
    is burstier, more is steadier. With an infinite rate all are due at once. Raises ValueError for values that are not
    positive.
    """
    if not request_rate > 0 or not burstiness > 0:
        raise ValueError(f"--request_rate {request_rate} and --burstiness {burstiness} must be greater than 0")
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (request_rate * burstiness), count)
    return np.cumsum(gaps).tolist()
