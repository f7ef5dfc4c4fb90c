"""Command lines of `launch`: absl flags with the conventions of other tools.

A command defines its flags with `absl.flags` at module level and ends with `flags.run(main)`. Flag names may have
dashes for underscores, flags may follow positional arguments, and a mistake ends with exit status 2 and a line that
says what to change. Each command has, besides its own flags:

- `--help`, which prints the module's docstring and the flags that most users set, `--help=GROUP`, `--help=WORD` and
  `--help=all`;
- `--version`;
- `--config FILE`, which reads flags from a file, unless the command has a flag of that name.
"""

import difflib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from absl import flags

import dsv3
from dsv3.config.declaration import GROUPS

flag_groups: dict[str, str] = {}
"""The group of `--help` that lists a flag, by the flag's name, for flags that `launch.cli` has defined."""

_CONFIG = "config"
_READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".toml": tomllib.loads,
    ".json": json.loads,
}
_GENERAL = {
    f"--{_CONFIG}=FILE": "Read flags from this YAML, TOML or JSON file, by their names; those of the command line win.",
    "--help=all|GROUP|WORD": "Explain all flags, those of a group, or those with this word in their names.",
    "--version": "Print the versions of dsv3, jax and Python.",
}


class UsageError(Exception):
    """The command line is wrong; the message says how. A `main` may raise it too."""


def run(main: Callable[..., int | None], positional: str = "", argv: Sequence[str] | None = None) -> NoReturn:
    """Parses the command line, calls `main(*positional_arguments)` and exits with what it returns (None means 0).

    `positional` names the positional arguments, separated by blanks ("INPUT OUTPUT"); their number must match.
    """
    module, values = sys.modules[main.__module__], flags.FLAGS
    program = _program(module)
    argv = list(sys.argv if argv is None else argv)
    own, config = own_flags(module, values), define_config(values)
    try:
        if (topic := find_flag(("help", "h"), argv[1:], values)) is not None:
            print(help_text(program, positional, module.__doc__ or "", own, topic, has_config=config is not None))
            sys.exit(0)
        if find_flag(("version",), argv[1:], values) is not None:
            print(version_text())
            sys.exit(0)
        sys.exit(main(*parse(argv, positional, values, config)))
    except UsageError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)


def define_config(values: flags.FlagValues) -> flags.Flag | None:
    """Defines `--config` and returns it; None where the command has a flag of that name for something else."""
    if _CONFIG in values:
        return None
    flags.DEFINE_string(_CONFIG, None, _GENERAL[f"--{_CONFIG}=FILE"], flag_values=values)
    return values[_CONFIG]


def parse(
    argv: Sequence[str], positional: str, values: flags.FlagValues, config: flags.Flag | None = None
) -> list[str]:
    """Sets `values` from `argv` (program name first), then from the file that `config` names; returns the positionals.

    Raises `UsageError` for an unknown flag, a value of the wrong kind or a wrong number of positional arguments.
    """
    values.set_gnu_getopt(True)
    try:
        arguments = values([argv[0], *normalize(argv[1:], values)])[1:]
    except flags.UnrecognizedFlagError as error:
        raise UsageError(f"unknown flag --{error.flagname}{_nearest(error.flagname, list(values))}") from None
    except flags.Error as error:
        raise UsageError(str(error)) from None
    if config is not None and config.value is not None:
        _set_from_file(Path(config.value), values)
    names = positional.split()
    if len(arguments) != len(names):
        wanted = f"expected {positional}" if names else "expected flags only"
        raise UsageError(f"{wanted}, got {len(arguments)} positional argument(s): {' '.join(arguments) or 'none'}")
    return arguments


def normalize(arguments: Sequence[str], values: flags.FlagValues) -> list[str]:
    """Returns `arguments` with underscores for dashes in flag names; values, positionals and what follows "--" stay."""
    result: list[str] = []
    is_value = False
    for i, argument in enumerate(arguments):
        if is_value or not _is_flag(argument):
            result.append(argument)
            is_value = False
            continue
        if argument == "--":
            return result + list(arguments[i:])
        name, equals, value = argument.partition("=")
        name = "--" + name.lstrip("-").replace("-", "_")
        result.append(name + equals + value)
        is_value = not equals and _takes_value(name[2:], values)
    return result


def find_flag(names: Sequence[str], arguments: Sequence[str], values: flags.FlagValues) -> str | None:
    """Returns the value of the flag "--NAME=VALUE" for any of `names`: "" without a value, None without the flag."""
    normal = normalize(arguments, values)
    end = normal.index("--") if "--" in normal else len(normal)
    taken = {i + 1 for i, a in enumerate(normal[:end]) if a.startswith("--") and _takes_value(a[2:], values)}
    for i, argument in enumerate(normal[:end]):
        name, _, value = argument.partition("=")
        if i not in taken and name.startswith("--") and name[2:] in names:
            return value
    return None


def own_flags(module: object, values: flags.FlagValues) -> list[flags.Flag]:
    """Lists the flags that `module` defines or adopts (`flags.adopt_module_key_flags`), in order of definition."""
    adopted = {flag.name: flag for flag in values.get_key_flags_for_module(module)}
    return [flag for flag in adopted.values() if flag.help]


def help_text(
    program: str,
    positional: str,
    doc: str,
    own: Sequence[flags.Flag],
    topic: str = "",
    *,
    has_config: bool = True,
) -> str:
    """Returns what `--help` prints: usage, the command's docstring, flags with their meanings and defaults.

    `topic` is "" for common flags and the names of all others, "all", a group, or a word of flags' names. Raises
    UsageError for other topics.
    """
    groups = {group: [flag for flag in own if flag_groups.get(flag.name, "") == group] for group in GROUPS}
    groups = {group: members for group, members in groups.items() if members}
    if topic and topic != "all":
        return "\n".join(_flag_lines(_select_flags(topic, own, groups)))
    usage = " ".join(filter(None, [f"usage: {program}", positional, "[flags]"]))
    lines = [usage, "", textwrap.dedent(doc).strip(), "", "flags (dashes may stand for underscores):"]
    lines += _flag_lines(groups.pop("", []))
    if topic == "all":
        for group, members in groups.items():
            lines += ["", f"{group}: {GROUPS[group]}", *_flag_lines(members)]
    elif groups:
        lines += ["", "more flags, which --help=GROUP and --help=all explain:"]
        for group, members in groups.items():
            lines.append(f"  {group}: {GROUPS[group]}")
            lines += _wrap(" ".join(f"--{flag.name}" for flag in members))
    lines += ["", "of every command:"]
    for spelled, meaning in list(_GENERAL.items())[not has_config :]:
        lines += [f"  {spelled}", *_wrap(meaning)]
    return "\n".join(lines)


def check_outputs(json_path: str | None, plot_path: str | None, plot_suffixes: Sequence[str]) -> None:
    """Raises UsageError for --json and --plot in missing directories, other formats, and plots without matplotlib."""
    for name, path in (("json", json_path), ("plot", plot_path)):
        if path and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"--{name} {path}: its directory does not exist")
    if plot_path and Path(plot_path).suffix not in plot_suffixes:
        raise UsageError(f"--plot {plot_path}: the file's name must end in {' or '.join(plot_suffixes)}")
    if plot_path and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: install the 'plots' extra")


def write_json(path: str | None, values: Any) -> None:
    """Writes values to the file of --json, if it is given."""
    if path:
        Path(path).write_text(json.dumps(values, indent=1) + "\n")


def version_text() -> str:
    """Returns what `--version` prints; imports no jax."""
    return f"dsv3 {dsv3.__version__}, jax {importlib.metadata.version('jax')}, Python {platform.python_version()}"


def _set_from_file(path: Path, values: flags.FlagValues) -> None:
    """Sets the flags of a file that are not on the command line."""
    known = [name for name in values if name != _CONFIG]
    for name, value in _read_file(path).items():
        if name not in known:
            raise UsageError(f"{path}: {name} is not a flag{_nearest(name, known)}")
        flag = values[name]
        if flag.present or value is None:
            continue
        try:
            flag.parse(_as_text(flag, value))
        except (flags.Error, ValueError) as error:
            raise UsageError(f"{path}: {name}: {error}") from None
        flag.using_default_value = False


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix not in _READERS:
        raise UsageError(f"--{_CONFIG} {path}: the file's name must end in {', '.join(_READERS)}")
    try:
        found = _READERS[path.suffix](path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--{_CONFIG} {path}: cannot be read: {error}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"--{_CONFIG} {path}: must map names of flags to values, as in 'port: 8001'")
    named = {name.replace("-", "_"): value for name, value in found.items()}
    if len(named) < len(found):
        raise UsageError(f"--{_CONFIG} {path}: names a flag twice, with dashes and with underscores")
    return named


def _as_text(flag: flags.Flag, value: Any) -> str:
    """Returns a file's value as a command line has it; raises ValueError for a value of the wrong type."""
    is_list, is_text = isinstance(flag.parser, flags.ListParser), flag.flag_type() == "string"
    if isinstance(value, str) and not flag.boolean:
        return value
    if isinstance(value, bool) and flag.boolean:
        return str(value).lower()
    if isinstance(value, list) and is_list and all(isinstance(each, str) and "," not in each for each in value):
        return ",".join(value)
    if isinstance(value, dict) and is_text:
        return json.dumps(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and flag.flag_type() in ("int", "float"):
        return str(value)
    wanted = "true or false" if flag.boolean else "a list of texts" if is_list else f"of type {flag.flag_type()}"
    raise ValueError(f"{value!r} is not {wanted}" + ", for which it needs quotes" * is_text)


def _select_flags(topic: str, own: Sequence[flags.Flag], groups: dict[str, list[flags.Flag]]) -> list[flags.Flag]:
    word = topic.strip("-").replace("-", "_")
    found = groups.get(topic) or [flag for flag in own if word in flag.name]
    if not found:
        named = f"the groups are {', '.join(filter(None, groups))}; " if len(groups) > 1 else ""
        raise UsageError(f"--help={topic}: no flag has this in its name; {named}--help=all explains all flags")
    return found


def _flag_lines(own: Sequence[flags.Flag]) -> list[str]:
    lines = []
    for flag in own:
        shown = str(flag.default_as_str).strip("'")
        default = "" if flag.default in (None, "", []) else f" (default {shown})"
        meaning = str(flag.help).removeprefix(f"<{'|'.join(_choices(flag))}>: ")
        lines += [f"  {_signature(flag)}", *_wrap(meaning + default)]
    return lines


def _wrap(text: str) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    indent = " " * 8
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _signature(flag: flags.Flag) -> str:
    if flag.boolean:
        return f"--[no]{flag.name}"
    kind = "A,B,..." if isinstance(flag.parser, flags.ListParser) else flag.flag_type().upper()
    return f"--{flag.name}={'|'.join(_choices(flag)) or kind}"


def _choices(flag: flags.Flag) -> Sequence[str]:
    return getattr(flag.parser, "enum_values", ())


def _is_flag(argument: str) -> bool:
    """Returns whether an argument is a flag, not a negative number."""
    return len(argument) > 1 and argument[0] == "-" and not argument[1].isdigit() and argument[1] != "."


def _takes_value(name: str, values: flags.FlagValues) -> bool:
    return name in values and not values[name].boolean


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean --{close[0]}?" if close else "; --help=all lists the flags"


def _program(module: object) -> str:
    """Returns the command: `dsv3 serve`, `python -m launch.serve`, or else the name of the script."""
    spec = getattr(module, "__spec__", None)
    if spec is None:
        return sys.argv[0]
    started = [Path(each).name for each in sys.orig_argv[1:2]]
    package, _, command = spec.name.rpartition(".")
    return f"dsv3 {command}" if started == ["dsv3"] and package == "launch" else f"python -m {spec.name}"
