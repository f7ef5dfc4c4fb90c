"""Declaration of options: a dataclass field with help text and bounds, and what derives from it. Imports no jax."""

import dataclasses
import difflib
import inspect
import numbers
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
    tuple: (tuple, "a tuple of texts"),
    dict: (Mapping, "a JSON object"),
}


GROUPS: dict[str, str] = {
    "": "what most users set",
    "model": "types of weights and cache, seed, compiled programs",
    "text": "reasoning, tool calls and markers in texts",
    "cache": "prefixes, host memory and stores of pages",
    "scheduling": "how much a step computes, how many may wait, drafts",
    "experts": "where experts lie and how tokens reach them",
    "http": "keys, TLS, processes, limits, batches, shutdown",
    "monitoring": "access log, profiles, figures per step",
    "fleet": "routers, and instances that pass pages to each other",
    "hosts": "one instance over several hosts",
}
"""The groups of `--help` in their order, with their topics; the first one is shown by default."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """Metadata of an option besides name, type and default.

    Values are at least `low`, above `above` and at most `high`. `agree`: all processes of an instance must have the
    same value. `programs`: compiled programs may depend on the value. `group`: the group of `--help`, of `GROUPS`.
    """

    help: str
    low: float | None = None
    above: float | None = None
    high: float | None = None
    agree: bool = True
    programs: bool = True
    group: str = ""

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"group {self.group!r} is not one of {', '.join(GROUPS)}")

    def allow(self, value: Any) -> bool:
        """Returns whether a value is within the bounds; nan is within none."""
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words."""
        if self.low is not None and self.high is not None:
            return f"from {self.low} to {self.high}"
        named = (("at least", self.low), ("above", self.above), ("at most", self.high))
        return " and ".join(f"{words} {bound}" for words, bound in named if bound is not None)


@dataclasses.dataclass(frozen=True)
class Option:
    """A declared option: `kind` is bool, int, float, str, tuple or dict, `choices` are the values of a `Literal`."""

    name: str
    annotation: Any
    kind: type
    choices: tuple[str, ...]
    optional: bool
    default: Any
    terms: Terms

    def problem(self, value: object) -> str | None:
        """Returns the error of a value; None if it is valid."""
        if value is None and self.optional:
            return None
        wanted, name = _KINDS[self.kind]
        if not isinstance(value, wanted) or (isinstance(value, bool) and self.kind is not bool):
            return f"is not {name}"
        if self.choices and value not in self.choices:
            return f"is not one of {', '.join(self.choices)}"
        return None if self.terms.allow(value) else f"is not {self.terms.bounds}"


def option(default: Any = dataclasses.MISSING, help: str = "", **terms: Any) -> Any:
    """Declares an option: a dataclass field with the `Terms` in its metadata. Without default it is required.

    `help` begins with a verb and names other options by their flag, "--dtype".
    """
    return dataclasses.field(default=default, metadata={"terms": Terms(help, **terms)})


def options_of(cls: type) -> tuple[Option, ...]:
    """Lists the options that a dataclass declares, in their order; `default` is None for a required one."""
    declared = (field for field in dataclasses.fields(cls) if "terms" in field.metadata)
    return tuple(_option(field) for field in declared)


def check(options: Any) -> None:
    """Checks type, choices and bounds of each option; raises ValueError with name, value and allowed values."""
    for each in options_of(type(options)):
        value = getattr(options, each.name)
        if problem := each.problem(value):
            raise ValueError(f"{each.name}: {value!r} {problem}")


def refuse_unknown(cls: type, names: Iterable[str], others: Iterable[str] = ()) -> None:
    """Raises TypeError for a name that is neither an option of `cls` nor among `others`; suggests the nearest one."""
    known = [*(each.name for each in options_of(cls)), *others]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise TypeError(f"{name} is not an option; {hint}")


def refuse_unknown_fields(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a field of an option in JSON that is not `known`."""
    for name in given:
        if name not in known:
            raise ValueError(f"{name}: there is no such field; there are {', '.join(known)}")


def options_text(cls: type) -> str:
    """Lists a dataclass's options for the docstring of a function that takes them."""
    lines = []
    for each in options_of(cls):
        start = f"      {each.name} ({each.default!r}): "
        text = each.terms.help.replace("--", "")
        lines += textwrap.wrap(text, 112, initial_indent=start, subsequent_indent=" " * 8)
    return "\n".join(lines)


def signature_with(method: Callable[..., Any], cls: type) -> inspect.Signature:
    """Returns the signature of a bound method whose `**options` are those that a dataclass declares."""
    _, *own = inspect.signature(method).parameters.values()
    named = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation)
        for each in options_of(cls)
    ]
    return inspect.Signature([*named, *options])


def _option(field: Any) -> Option:
    union = get_origin(field.type) in (Union, types.UnionType)
    *kinds, kind = (each for each in (get_args(field.type) if union else [field.type]) if each is not types.NoneType)
    if kinds:
        raise TypeError(f"{field.name}: {field.type} is not one type, with or without None")
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return Option(
        name=field.name,
        annotation=field.type,
        kind=str if choices else get_origin(kind) or kind,
        choices=choices,
        optional=union,
        default=None if field.default is dataclasses.MISSING else field.default,
        terms=field.metadata["terms"],
    )
