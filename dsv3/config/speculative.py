"""Options of speculative decoding: `--speculative_config`, in vLLM's format; imports no jax.

{"method": "mtp", "num_speculative_tokens": 2}
{"method": "dspark", "num_speculative_tokens": 5}
{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
{"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 1]]}
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal, get_args

from dsv3.config.declaration import refuse_unknown_fields

Method = Literal["mtp", "ngram", "dspark"]
MAX_DRAFTS: dict[Method, int] = {"mtp": 3, "ngram": 3, "dspark": 7}
"""The most drafts of a row. Kernels of attention to latents support three beside the last token, steps seven."""

_DEFAULT: dict[Method, int] = {"mtp": 1, "ngram": 1, "dspark": 5}  # 5: the block of every published checkpoint
_MAX_LOOKUP = 8
_FIELDS = (
    "method",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "synthetic_acceptance_rates",
)


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """The method that proposes drafts, and their number.

    `drafts_by_size` has (first, last, drafts): the drafts per request in a decode step of `first` to `last` requests
    per rank; steps of other sizes have none. `lookup_min` and `lookup_max` bound the length of the text that the method
    "ngram" looks up. `synthetic_rates`, for benchmarks with random weights, are the fractions of rows in which all
    drafts up to each position are accepted at random; empty if drafts are verified.
    """

    method: Method
    drafts_by_size: tuple[tuple[int, int, int], ...]
    lookup_min: int = 1
    lookup_max: int = 3
    synthetic_rates: tuple[float, ...] = ()

    @property
    def most_drafts(self) -> int:
        return max(drafts for _, _, drafts in self.drafts_by_size)

    @property
    def synthetic_chances(self) -> tuple[float, ...]:
        """`synthetic_rates` as the probability of each draft, given that the previous ones are accepted."""
        before = (1.0, *self.synthetic_rates)
        return tuple(
            rate / earlier if earlier else 0.0 for earlier, rate in zip(before, self.synthetic_rates, strict=False)
        )

    def drafts(self, size: int) -> int:
        """Returns how many drafts each request gets in a decode step of `size` requests per rank."""
        return next((drafts for first, last, drafts in self.drafts_by_size if first <= size <= last), 0)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "SpeculativeConfig | None":
        """Reads vLLM's fields; None if no step would have drafts.

        Raises ValueError with the field, its value and the allowed ones.
        """
        refuse_unknown_fields(given, _FIELDS)
        method: Any = given.get("method")
        if method not in get_args(Method):
            raise ValueError(f"method: {method!r} is not one of {', '.join(get_args(Method))}")
        low, high = (given.get(name, default) for name, default in (("prompt_lookup_min", 1), ("prompt_lookup_max", 3)))
        _check_int("prompt_lookup_min", low, 1, _MAX_LOOKUP)
        _check_int("prompt_lookup_max", high, low, _MAX_LOOKUP)
        config = cls(method, _drafts_by_size(given, method), low, high)
        if (rates := given.get("synthetic_acceptance_rates")) is not None:
            rates = acceptance_by_place("synthetic_acceptance_rates", rates, config.most_drafts)
            config = dataclasses.replace(config, synthetic_rates=rates)
        return config if config.most_drafts else None


def acceptance_by_place(name: str, rates: Any, drafts: int) -> tuple[float, ...]:
    """Returns the fraction of rows in which all drafts up to each of `drafts` positions are accepted, as in vLLM.

    `rates` are these fractions. A single number is each draft's probability given that the previous ones are accepted:
    0.8 is 0.8, 0.64, 0.512. Raises ValueError with `name` for anything else, and for increasing fractions.
    """
    values = rates if isinstance(rates, list | tuple) else [rates]
    if not all(isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1 for rate in values):
        raise ValueError(f"{name}: {rates!r} is neither a number from 0 to 1 nor a list of such")
    if values is not rates:
        return tuple(float(rates) ** place for place in range(1, drafts + 1))
    if len(values) != drafts or any(later > earlier for earlier, later in itertools.pairwise(values)):
        raise ValueError(f"{name}: {list(values)} are not {drafts} shares, one per draft, that never rise")
    return tuple(map(float, values))


def _drafts_by_size(given: Mapping[str, Any], method: Method) -> tuple[tuple[int, int, int], ...]:
    by_size = given.get("num_speculative_tokens_per_batch_size")
    if by_size is None:
        drafts = given.get("num_speculative_tokens", _DEFAULT[method])
        _check_int("num_speculative_tokens", drafts, 0, MAX_DRAFTS[method])
        return ((1, 2**31 - 1, drafts),)
    if "num_speculative_tokens" in given:
        raise ValueError("num_speculative_tokens: num_speculative_tokens_per_batch_size says it already; give one")
    name, last_before, ranges = "num_speculative_tokens_per_batch_size", 0, []
    if not isinstance(by_size, list | tuple) or not by_size:
        raise ValueError(f"{name}: {by_size!r} is not a list of [first, last, drafts]")
    for entry in by_size:
        if not isinstance(entry, list | tuple) or len(entry) != 3:
            raise ValueError(f"{name}: {entry!r} is not [first, last, drafts]")
        first, last, drafts = entry
        _check_int(f"{name}: the first size of {list(entry)}", first, last_before + 1, 2**31 - 1)
        _check_int(f"{name}: the last size of {list(entry)}", last, first, 2**31 - 1)
        _check_int(f"{name}: the drafts of {list(entry)}", drafts, 0, MAX_DRAFTS[method])
        ranges.append((first, last, drafts))
        last_before = last
    return tuple(ranges)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}: {value!r} is not an integer from {low} to {high}")
