"""Requests to replay: read from a trace, or drawn. A session's requests come one after the other.

A Mooncake trace (`.jsonl`) says when each request comes, and names its blocks of 512 tokens:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds; `hash_ids`, which may be left out, name the blocks of the prompt, each together with all
before it. ShareGPT's conversations (`.json`, or `.jsonl` of one per line) have text and no times; a token is taken to
have four bytes, as the router does.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from router.request import BYTES_PER_TOKEN

BLOCK = 512
"""Tokens of a block that a trace names."""
_MOST_TOKENS = 2**31
_LONGEST_S = 366 * 86_400
_SIGMA = 0.8  # of lognormal lengths


class TrafficError(ValueError):
    """Traffic that cannot be, or a file that does not describe it; the text names file and place."""


class TokenRun(NamedTuple):
    """Consecutive tokens of a prompt, named by what they say together with all before them."""

    name: int
    tokens: int


class TracedRequest(NamedTuple):
    """A request: what its prompt is made of, and the tokens of its answer."""

    content: tuple[TokenRun, ...]
    answer: int

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return sum(run.tokens for run in self.content)


class Session(NamedTuple):
    """Requests of which each comes when the one before has been answered; the first at `at` seconds."""

    at: float
    asks: tuple[TracedRequest, ...]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Drawn requests: mean tokens of prompts and answers, lognormal, and the share of prompts that others have too.

    A prompt begins with one of `num_prefixes` prefixes, chosen by Zipf's law. Raises TrafficError for what cannot be.
    """

    prompt: float
    answer: float
    shared: float = 0.0
    num_prefixes: int = 256

    def __post_init__(self) -> None:
        for name in ("prompt", "answer", "num_prefixes"):
            if not 1 <= getattr(self, name) < 2**31:
                raise TrafficError(f"{name} {getattr(self, name)}: must be at least 1")
        if not 0 <= self.shared < 1:
            raise TrafficError(f"shared {self.shared}: must be at least 0 and below 1")


def drawn(lengths: Lengths, longest: int, seed: int) -> Iterator[TracedRequest]:
    """Yields requests without end, the same ones for the same seed; prompt and answer each fit half of `longest`."""
    random = np.random.default_rng(seed)
    draw = functools.partial(_lognormal, random, longest // 2)
    chances = 1 / np.arange(1, lengths.num_prefixes + 1)
    # Popular prefixes make most of the prompts: the mean over prompts is what shall be.
    prefixes = draw(lengths.prompt * lengths.shared, lengths.num_prefixes)
    chances /= chances.sum()
    wanted, found = lengths.prompt * lengths.shared, float(chances @ prefixes)
    prefixes = (prefixes * (wanted / found)).astype(int) if found else prefixes * 0
    for first in itertools.count(step=_SLICE):
        chosen = random.choice(lengths.num_prefixes, _SLICE, p=chances).tolist()
        own = draw(lengths.prompt * (1 - lengths.shared), _SLICE).astype(int)
        answers = draw(lengths.answer, _SLICE).astype(int)
        for i, (prefix, tokens, answer) in enumerate(zip(chosen, own.tolist(), answers.tolist(), strict=True)):
            shared = min(int(prefixes[prefix]), longest // 2 - 1)
            runs = (TokenRun(prefix, shared), TokenRun(-1 - first - i, max(1, min(tokens, longest // 2 - shared))))
            yield TracedRequest(runs if shared else runs[1:], max(1, answer))


_SLICE = 1024


def _lognormal(random: np.random.Generator, most: int, mean: float, count: int) -> np.ndarray:
    """Returns lengths of at most `most` tokens whose mean is near `mean`."""
    if mean <= 0:
        return np.zeros(count)
    return np.minimum(random.lognormal(math.log(mean) - _SIGMA**2 / 2, _SIGMA, count), most)


def open_loop(
    asks: Iterable[TracedRequest], rate: Callable[[float], float], most: float, seed: int
) -> Iterator[Session]:
    """Yields sessions of one request at the times of a Poisson process with `rate(seconds)`, at most `most`."""
    random, now = np.random.default_rng((seed, 1)), 0.0
    for ask in asks:
        while True:
            now += random.exponential(1 / most)
            if random.random() * most < rate(now):
                break
        yield Session(now, (ask,))


class Line(msgspec.Struct):
    """A request: milliseconds from the start of the trace, tokens of prompt and answer, blocks of the prompt."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_mooncake(path: Path) -> list[Session]:
    """Reads a trace of requests; raises TrafficError naming file and line."""
    try:
        found = [Session(line.timestamp / 1e3, (_ask_of(line, -1 - i),)) for i, line in enumerate(_lines(path))]
    except TrafficError as error:
        raise TrafficError(f"{path}: {error}") from None
    return _some(sorted(found, key=lambda session: session.at), path)


def _lines(path: Path) -> Iterator[Line]:
    """Yields the requests of a trace; raises TrafficError naming the line."""
    decoder = msgspec.json.Decoder(Line)
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield _checked(decoder.decode(text), number)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise TrafficError(f"line {number}: {error}") from None
    except OSError as error:
        raise TrafficError(f"cannot be read: {error}") from None


def _checked(line: Line, number: int) -> Line:
    for name in ("input_length", "output_length"):
        if not 0 < getattr(line, name) < _MOST_TOKENS:
            raise TrafficError(f"line {number}: {name} {getattr(line, name)} must be above 0, below 2^31")
    if not 0 <= line.timestamp <= _LONGEST_S * 1e3:
        raise TrafficError(f"line {number}: timestamp {line.timestamp} ms must be from 0 to a year")
    return line


def _ask_of(line: Line, own: int) -> TracedRequest:
    """Returns the request of a line; what no block names is its `own`."""
    left, runs = line.input_length, []
    for name in line.hash_ids:
        if not left:
            break
        runs.append(TokenRun(name, min(BLOCK, left)))
        left -= runs[-1].tokens
    return TracedRequest((*runs, *([TokenRun(own, left)] if left else [])), line.output_length)


def read_sharegpt(path: Path) -> list[Session]:
    """Reads conversations, each a session at second 0; raises TrafficError naming file and place."""
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".jsonl":
            records = [(f"line {i}", json.loads(line)) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        else:
            whole = json.loads(text)
            if not isinstance(whole, list):
                raise TrafficError(f"{path}: holds a {type(whole).__name__}, not a list of conversations")
            records = [(f"conversation {i}", each) for i, each in enumerate(whole, 1)]
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, TrafficError):
            raise
        raise TrafficError(f"{path}: cannot be read: {error}") from None
    found = [_conversation(record, f"{path}: {where}", i) for i, (where, record) in enumerate(records)]
    return _some([session for session in found if session.asks], path)


def _conversation(record: Any, where: str, number: int) -> Session:
    """Returns a session with a request for each answer of the assistant."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise TrafficError(f"{where}: conversations is {turns!r}, but must be a list of turns")
    asks, runs = [], list[TokenRun]()
    for i, turn in enumerate(turns):
        says = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(says[0], str) or not isinstance(says[1], str):
            raise TrafficError(f"{where}: turn {i + 1} is {turn!r:.80}, but must have a text in from and in value")
        tokens = max(1, len(says[1].encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
        if says[0] in ("gpt", "assistant", "chatgpt") and runs:
            asks.append(TracedRequest(tuple(runs), tokens))
        runs.append(TokenRun(number * _MOST_TURNS + i, tokens))
    return Session(0.0, tuple(asks))


_MOST_TURNS = 2**16


def _some(sessions: list[Session], path: Path) -> list[Session]:
    if not sessions:
        raise TrafficError(f"{path}: has no requests")
    return sessions


def read_trace(path: Path) -> tuple[list[Session], bool]:
    """Reads a trace by what its first line looks like; returns its sessions, and whether it says when they come.

    Raises TrafficError naming file and line.
    """
    if path.suffix not in (".json", ".jsonl"):
        raise TrafficError(f"{path}: the name must end in .jsonl (Mooncake, ShareGPT) or .json (ShareGPT)")
    try:
        with path.open("rb") as file:
            is_conversation = path.suffix == ".json" or b'"conversations"' in file.readline()
    except OSError as error:
        raise TrafficError(f"{path}: cannot be read: {error}") from None
    return (read_sharegpt(path), False) if is_conversation else (read_mooncake(path), True)
