"""Traffic from a trace of requests, in the form of Mooncake's: a line of JSON per request, oldest first.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds; `hash_ids`, which may be left out, name the blocks of 512 tokens of the prompt, each
together with all before it. A block that an earlier request had is counted as cached, whenever that was: so hits are
those of a cache without bounds, the most there can be.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tools.capacity.traffic import Span, Traffic, TrafficError

BLOCK = 512
WINDOW_S = 900
"""Requests of a quarter of an hour are taken as even: starting an instance takes minutes."""
_MOST_TOKENS = 2**31
_LONGEST_S = 366 * 86_400


class Line(msgspec.Struct):
    """A request: milliseconds from the start of the trace, tokens of prompt and answer, blocks of the prompt."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path) -> Traffic:
    """Reads a trace; rates are the means of windows of a quarter of an hour.

    Raises TrafficError naming file and line.
    """
    windows: dict[int, list[float]] = {}
    seen: set[int] = set()
    requests, last = 0, 0.0
    try:
        for line in lines(path):
            requests, last = requests + 1, max(last, line.timestamp / 1e3)
            window = windows.setdefault(int(line.timestamp / 1e3 / WINDOW_S), [0.0, 0.0, 0.0])
            for i, tokens in enumerate((line.input_length, _cached(line, seen), line.output_length)):
                window[i] += tokens
        if not requests or not last:
            raise TrafficError(f"has {requests} requests in {last:g} s: no rate follows from it")
        note = f"trace {path.name}: {requests:,} requests in {last / 3600:,.2f} h, hits of a cache without bounds"
        return Traffic(path.stem, _spans(windows, last), requests / last, note)
    except TrafficError as error:
        raise TrafficError(f"{path}: {error}") from None


def lines(path: Path) -> Iterator[Line]:
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


def _cached(line: Line, seen: set[int]) -> int:
    """Returns the tokens of a prompt that earlier ones had, and remembers its blocks; one token is always computed."""
    found = 0
    for block in line.hash_ids:
        if block not in seen:
            break
        found += 1
    seen.update(line.hash_ids[found:])
    return min(found * BLOCK, line.input_length - 1)


def _spans(windows: dict[int, list[float]], last: float) -> tuple[Span, ...]:
    """Returns one span per window, those without requests too; what is left at the end belongs to the last one."""
    count = max(1, round(last / WINDOW_S))
    tokens = [[0.0, 0.0, 0.0] for _ in range(count)]
    for i, window in windows.items():
        mine = tokens[min(i, count - 1)]
        mine[:] = [a + b for a, b in zip(mine, window, strict=True)]
    seconds = [WINDOW_S] * (count - 1) + [last - WINDOW_S * (count - 1)]
    return tuple(Span(s, *(n / s for n in mine)) for s, mine in zip(seconds, tokens, strict=True))
