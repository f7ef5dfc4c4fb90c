"""Traffic to replay: read from a Mooncake or ShareGPT trace, or drawn at random.

A Mooncake trace (`.jsonl`) has the time of each request, and hashes of its blocks of 512 tokens:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds. The optional `hash_ids` identify each block of the prompt together with all before it.
ShareGPT's conversations (`.json`, or `.jsonl` with one per line) have text and no times; a token is assumed to have
four bytes, as in the router.
"""

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
from tools.simulate.options import SimulateOptions

BLOCK = 512
"""Tokens of a block of a Mooncake trace."""
_MOST_TOKENS = 2**31
_LONGEST_S = 366 * 86_400
_SIGMA = 0.8  # of lognormal lengths


class TrafficError(ValueError):
    """Invalid traffic or an invalid trace; the message names file and line."""


class TokenRun(NamedTuple):
    """Consecutive tokens of a prompt; equal names mean equal tokens here and before."""

    name: int
    tokens: int


class TracedRequest(NamedTuple):
    """A request: the content of its prompt, and the number of tokens of its answer."""

    content: tuple[TokenRun, ...]
    answer: int

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return sum(run.tokens for run in self.content)


class Session(NamedTuple):
    """A conversation: the first request arrives at `at` seconds, each other one after the previous answer."""

    at: float
    requests: tuple[TracedRequest, ...]


def draw_requests(options: SimulateOptions) -> Iterator[TracedRequest]:
    """Yields endless random requests, equal for equal seeds: lognormal prompts and answers of the given mean lengths.

    A prompt begins with a common prefix, by Zipf's law. Prompt and answer each have at most half of `max_model_len`.
    """
    random, longest = np.random.default_rng(options.seed), options.max_model_len
    wanted = options.prompt * options.shared
    draw = functools.partial(_lognormal, random, longest // 2)
    chances = 1 / np.arange(1, options.num_prefixes + 1)
    # Popular prefixes dominate: scale their lengths so that the mean over prompts is the wanted one.
    prefixes = draw(wanted, options.num_prefixes)
    chances /= chances.sum()
    found = float(chances @ prefixes)
    prefixes = (prefixes * (wanted / found)).astype(int) if found else prefixes * 0
    for first in itertools.count(step=_SLICE):
        chosen = random.choice(options.num_prefixes, _SLICE, p=chances).tolist()
        own = draw(options.prompt * (1 - options.shared), _SLICE).astype(int)
        answers = draw(options.answer, _SLICE).astype(int)
        for i, (prefix, tokens, answer) in enumerate(zip(chosen, own.tolist(), answers.tolist(), strict=True)):
            shared = min(int(prefixes[prefix]), longest // 2 - 1)
            runs = (TokenRun(prefix, shared), TokenRun(-1 - first - i, max(1, min(tokens, longest // 2 - shared))))
            yield TracedRequest(runs if shared else runs[1:], max(1, answer))


_SLICE = 1024


def _lognormal(random: np.random.Generator, most: int, mean: float, count: int) -> np.ndarray:
    """Returns lengths of at most `most` tokens with a mean near `mean`."""
    if mean <= 0:
        return np.zeros(count)
    return np.minimum(random.lognormal(math.log(mean) - _SIGMA**2 / 2, _SIGMA, count), most)


def open_loop(
    requests: Iterable[TracedRequest], rate: Callable[[float], float], most: float, seed: int
) -> Iterator[Session]:
    """Yields sessions of one request at the times of a Poisson process of `rate(seconds)`, which is at most `most`."""
    random, now = np.random.default_rng((seed, 1)), 0.0
    for request in requests:
        while True:
            now += random.exponential(1 / most)
            if random.random() * most < rate(now):
                break
        yield Session(now, (request,))


class Line(msgspec.Struct):
    """A request: milliseconds from the start of the trace, tokens of prompt and answer, blocks of the prompt."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_mooncake(path: Path) -> list[Session]:
    """Reads a Mooncake trace; raises TrafficError with file and line."""
    try:
        found = [Session(line.timestamp / 1e3, (_parse_request(line, -1 - i),)) for i, line in enumerate(_lines(path))]
    except TrafficError as error:
        raise TrafficError(f"{path}: {error}") from None
    return _require_requests(sorted(found, key=lambda session: session.at), path)


def _lines(path: Path) -> Iterator[Line]:
    """Yields the lines of a Mooncake trace; raises TrafficError with the line's number."""
    decoder = msgspec.json.Decoder(Line)
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield _validate(decoder.decode(text), number)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise TrafficError(f"line {number}: {error}") from None
    except OSError as error:
        raise TrafficError(f"cannot be read: {error}") from None


def _validate(line: Line, number: int) -> Line:
    for name in ("input_length", "output_length"):
        if not 0 < getattr(line, name) < _MOST_TOKENS:
            raise TrafficError(f"line {number}: {name} {getattr(line, name)} must be above 0, below 2^31")
    if not 0 <= line.timestamp <= _LONGEST_S * 1e3:
        raise TrafficError(f"line {number}: timestamp {line.timestamp} ms must be from 0 to a year")
    return line


def _parse_request(line: Line, own: int) -> TracedRequest:
    """Returns the request of a line; tokens beyond its blocks get the name `own`."""
    left, runs = line.input_length, []
    for name in line.hash_ids:
        if not left:
            break
        runs.append(TokenRun(name, min(BLOCK, left)))
        left -= runs[-1].tokens
    return TracedRequest((*runs, *([TokenRun(own, left)] if left else [])), line.output_length)


def read_sharegpt(path: Path) -> list[Session]:
    """Reads ShareGPT's conversations, each a session at second 0; raises TrafficError with file and place."""
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".jsonl":
            records = [(f"line {i}", json.loads(line)) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        else:
            whole = json.loads(text)
            if not isinstance(whole, list):
                raise TrafficError(f"{path}: contains a {type(whole).__name__}; must be a list of conversations")
            records = [(f"conversation {i}", each) for i, each in enumerate(whole, 1)]
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, TrafficError):
            raise
        raise TrafficError(f"{path}: cannot be read: {error}") from None
    found = [_parse_conversation(record, f"{path}: {where}", i) for i, (where, record) in enumerate(records)]
    return _require_requests([session for session in found if session.requests], path)


def _parse_conversation(record: Any, where: str, number: int) -> Session:
    """Returns a session with one request per answer of the assistant."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise TrafficError(f"{where}: conversations is {turns!r}, but must be a list of turns")
    requests, runs = [], list[TokenRun]()
    for i, turn in enumerate(turns):
        role, text = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(text, str):
            raise TrafficError(f"{where}: turn {i + 1} is {turn!r:.80}, but must have a text in from and in value")
        tokens = max(1, len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
        if role in ("gpt", "assistant", "chatgpt") and runs:
            requests.append(TracedRequest(tuple(runs), tokens))
        runs.append(TokenRun(number * _MOST_TURNS + i, tokens))
    return Session(0.0, tuple(requests))


_MOST_TURNS = 2**16


def _require_requests(sessions: list[Session], path: Path) -> list[Session]:
    if not sessions:
        raise TrafficError(f"{path}: has no requests")
    return sessions


def read_trace(path: Path) -> tuple[list[Session], bool]:
    """Reads a trace in the format of its first line; returns its sessions, and whether it has their times.

    Raises TrafficError with file and line.
    """
    if path.suffix not in (".json", ".jsonl"):
        raise TrafficError(f"{path}: the file's name must end in .jsonl (Mooncake, ShareGPT) or .json (ShareGPT)")
    try:
        with path.open("rb") as file:
            is_conversation = path.suffix == ".json" or b'"conversations"' in file.readline()
    except OSError as error:
        raise TrafficError(f"{path}: cannot be read: {error}") from None
    return (read_sharegpt(path), False) if is_conversation else (read_mooncake(path), True)
