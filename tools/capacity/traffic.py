"""What a fleet is asked for: rates of tokens over a day, read from a table or from a trace of requests.

A table, `.toml` or `.json`, has the tokens of a day and, if they are not even, hours with their relative load:

    input_tokens = 608e9        # of prompts, per day
    cached_tokens = 342e9       # of these, found in a cache
    output_tokens = 168e9
    context_length = 4989       # mean tokens of a request in the cache; or: requests = 139e6
    spans = [{hours = 16, load = 1.2}, {hours = 8, load = 0.6}]    # 24 hours; left out: an even day
    prices = {input = 0.55, cached = 0.14, output = 2.19}          # dollars per million tokens; may be left out

A trace, `.jsonl`, is read by `tools.capacity.trace`.
"""

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DAY_S = 86_400
_MILLION = 1e6


class TrafficError(ValueError):
    """Traffic that cannot be, or a file that does not describe one; the text names the field."""


@dataclasses.dataclass(frozen=True)
class Span:
    """A stretch of `seconds` with even traffic, in tokens per second.

    `input` are tokens of prompts, `cached` those of them that a cache has, `output` tokens of answers.
    """

    seconds: float
    input: float
    cached: float
    output: float

    @property
    def computed(self) -> float:
        """Tokens of prompts that must be computed, per second."""
        return self.input - self.cached


@dataclasses.dataclass(frozen=True)
class Prices:
    """Dollars per million tokens: of prompts, of prompts where a cache has them, of answers."""

    input: float
    cached: float
    output: float

    def __post_init__(self) -> None:
        for name, price in dataclasses.asdict(self).items():
            if not 0 <= price < math.inf:
                raise TrafficError(f"prices.{name} {price} must be at least 0")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Spans one after the other, the requests per second in them at the mean, and what is paid for tokens.

    `note` says where it comes from. Raises TrafficError where no tokens come in or go out, or more are cached than
    come in.
    """

    name: str
    spans: tuple[Span, ...]
    requests: float
    note: str
    prices: Prices | None = None

    def __post_init__(self) -> None:
        for field in ("input", "output"):
            if not 0 < self.mean(field) < math.inf:
                raise TrafficError(f"{self.name}: {field}_tokens {self.mean(field) * DAY_S:g} must be above 0")
        if any(not 0 <= span.cached <= span.input for span in self.spans) or not self.mean("computed"):
            raise TrafficError(f"{self.name}: cached_tokens must be at least 0 and below input_tokens")
        if not 0 < self.requests < math.inf:
            raise TrafficError(f"{self.name}: requests {self.requests * DAY_S:g} must be above 0")

    @property
    def seconds(self) -> float:
        """The length of all spans."""
        return sum(span.seconds for span in self.spans)

    def mean(self, field: str) -> float:
        """Returns the mean of a rate, `input`, `cached`, `computed` or `output`: tokens per second."""
        return sum(getattr(span, field) * span.seconds for span in self.spans) / self.seconds

    def per_day(self, field: str) -> float:
        """Returns the tokens of a day at the mean rate."""
        return self.mean(field) * DAY_S

    @property
    def prompt(self) -> float:
        """Tokens of a mean prompt."""
        return self.mean("input") / self.requests

    @property
    def answer(self) -> float:
        """Tokens of a mean answer."""
        return self.mean("output") / self.requests

    @property
    def context(self) -> float:
        """Tokens of a mean request in the cache while it is answered: the prompt and half of the answer."""
        return self.prompt + self.answer / 2

    @property
    def income(self) -> float | None:
        """Dollars per day if every token is paid for; None without prices."""
        if self.prices is None:
            return None
        paid = ("computed", self.prices.input), ("cached", self.prices.cached), ("output", self.prices.output)
        return sum(self.per_day(field) * price for field, price in paid) / _MILLION


def requests_of(input_tokens: float, output_tokens: float, context: float) -> float:
    """Returns how many requests have these tokens, if `context` is the mean of a prompt and half of its answer."""
    return (input_tokens + output_tokens / 2) / context


def spread(
    hours_and_loads: Sequence[tuple[float, float]], input_tokens: float, cached_tokens: float, output_tokens: float
) -> tuple[Span, ...]:
    """Returns a day's spans: its tokens are spread in proportion to the loads, whose unit does not matter."""
    total = sum(hours * load for hours, load in hours_and_loads) * 3600
    tokens = (input_tokens, cached_tokens, output_tokens)
    return tuple(Span(hours * 3600, *(n * load / total for n in tokens)) for hours, load in hours_and_loads)


def read_traffic(path: Path) -> Traffic:
    """Reads a table of a day from a JSON or TOML file. Raises TrafficError naming file and field."""
    try:
        values = _parse(path)
        fields = {"input_tokens", "cached_tokens", "output_tokens", "context_length", "requests", "spans", "prices"}
        _check_known(values, fields, "")
        tokens = [_number(values, f"{name}_tokens", "") for name in ("input", "cached", "output")]
        spans = spread(_hours(values.get("spans")), *tokens)
        prices = _prices(values["prices"]) if "prices" in values else None
        return Traffic(path.stem, spans, _requests(values, tokens[0], tokens[2]) / DAY_S, f"table {path.name}", prices)
    except TrafficError as error:
        raise TrafficError(f"{path}: {error}") from None


def _requests(values: Mapping[str, Any], input_tokens: float, output_tokens: float) -> float:
    if ("requests" in values) == ("context_length" in values):
        raise TrafficError("give one of requests and context_length")
    if "requests" in values:
        return _number(values, "requests", "")
    context = _number(values, "context_length", "")
    if not context > 0:
        raise TrafficError(f"context_length {context} must be above 0")
    return requests_of(input_tokens, output_tokens, context)


def _hours(spans: Any) -> list[tuple[float, float]]:
    """Returns hours and relative load of each span; an even day where nothing is said."""
    if spans is None:
        return [(24.0, 1.0)]
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise TrafficError(f"spans is {spans!r}, but must be a list of tables with hours and load")
    found = []
    for i, span in enumerate(spans):
        _check_known(span, {"hours", "load"}, f"spans[{i}].")
        hours, load = (_number(span, name, f"spans[{i}].") for name in ("hours", "load"))
        if not hours > 0 or load < 0:
            raise TrafficError(f"spans[{i}]: hours {hours} must be above 0, load {load} at least 0")
        found.append((hours, load))
    if not math.isclose(total := sum(hours for hours, _ in found), 24):
        raise TrafficError(f"spans have {total:g} hours together, but must have 24")
    if not any(load for _, load in found):
        raise TrafficError("spans: every load is 0")
    return found


def _prices(values: Any) -> Prices:
    if not isinstance(values, dict):
        raise TrafficError(f"prices is {values!r}, but must be a table with input, cached and output")
    _check_known(values, {"input", "cached", "output"}, "prices.")
    return Prices(**{name: _number(values, name, "prices.") for name in ("input", "cached", "output")})


def _check_known(values: Mapping[str, Any], fields: set[str], where: str) -> None:
    if unknown := sorted(values.keys() - fields):
        raise TrafficError(f"{where}{unknown[0]} is not a field; fields are {', '.join(sorted(fields))}")


def _number(values: Mapping[str, Any], name: str, where: str) -> float:
    if name not in values:
        raise TrafficError(f"{where}{name} is missing")
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise TrafficError(f"{where}{name} is {value!r}, but must be a number")
    return float(value)


def _parse(path: Path) -> dict[str, Any]:
    readers: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads}
    if path.suffix not in readers:
        raise TrafficError("the name must end in .toml, .json or .jsonl")
    try:
        values = readers[path.suffix](path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise TrafficError(f"cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise TrafficError(f"holds a {type(values).__name__}, not a table")
    return values
