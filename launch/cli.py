"""Flags from the declarations of `dsv3.config.options`, and options read back from the flags."""

import json
import socket
from collections.abc import Callable
from typing import Any

from absl import flags as absl_flags

from dsv3.config.declaration import Option, options_of
from launch import flags

absl_flags.disclaim_key_flags()  # flags defined here belong to the calling module, and to its --help


def define(cls: type, values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines a flag for each option that a dataclass declares; `read` checks bounds."""
    for option in options_of(cls):
        _define(option, values)


def given(cls: type, values: absl_flags.FlagValues = absl_flags.FLAGS) -> dict[str, Any]:
    """Returns the flags' values by option name; None for a missing required option."""
    return {each.name: _value(each, values[each.name].value) for each in options_of(cls)}


def read[T](cls: type[T], values: absl_flags.FlagValues = absl_flags.FLAGS) -> T:
    """Returns the options from the flags; raises UsageError for invalid values."""
    return make(cls, given(cls, values))


def make[T](cls: type[T], options: dict[str, Any]) -> T:
    """Returns the options of these values; raises UsageError for invalid values."""
    try:
        return cls(**options)
    except ValueError as error:
        raise flags.UsageError(f"--{error}") from None


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket of --host and --port; raises UsageError where there can be none."""
    from dsv3.server.http.api_server import bind

    try:
        return bind(host, port)
    except OSError as error:
        where = f"{host} port {port}"
        raise flags.UsageError(f"cannot listen on {where}: {error.strerror or error}; choose another --port") from None


def _value(option: Option, value: Any) -> Any:
    if option.kind is dict and value is not None:
        return _json_object(option.name, value)
    return tuple(value) if option.kind is tuple else value


def _json_object(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise flags.UsageError(f"--{name}: {text!r} is not JSON") from None


def _define(option: Option, values: absl_flags.FlagValues) -> None:
    name, default, meaning = option.name, option.default, option.terms.help
    flags.flag_groups[name] = option.terms.group
    if option.choices:
        absl_flags.DEFINE_enum(name, default, option.choices, meaning, flag_values=values)
    elif option.kind is tuple:
        absl_flags.DEFINE_list(name, list(default), meaning, flag_values=values)
    else:
        kinds: dict[type, Callable[..., Any]] = {
            bool: absl_flags.DEFINE_bool,
            int: absl_flags.DEFINE_integer,
            float: absl_flags.DEFINE_float,
            str: absl_flags.DEFINE_string,
            dict: absl_flags.DEFINE_string,
        }
        kinds[option.kind](name, default, meaning, flag_values=values)
