"""Command lines of `launch`: absl flags that read the way their users type them.

A command defines its flags with `absl.flags` at module level and ends with `flags.run(main)`. Dashes may stand for
underscores in flag names, flags may follow positional arguments, `--help` prints the module's docstring and its own
flags, and a mistake ends with exit status 2 and one line that says what to change.
"""

import difflib
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import flags


class UsageError(Exception):
    """The command line is wrong; the message says how. A `main` may raise it too."""


def run(main: Callable[..., int | None], positional: str = "", argv: Sequence[str] | None = None) -> NoReturn:
    """Parses the command line, calls `main(*positional_arguments)` and exits with what it returns (None means 0).

    `positional` names the positional arguments, separated by blanks ("INPUT OUTPUT"); their number must match.
    """
    module = sys.modules[main.__module__]
    program = _program(module)
    argv = list(sys.argv if argv is None else argv)
    try:
        if wants_help(argv[1:], flags.FLAGS):
            print(help_text(program, positional, module.__doc__ or "", own_flags(module, flags.FLAGS)))
            sys.exit(0)
        sys.exit(main(*parse(argv, positional, flags.FLAGS)))
    except UsageError as error:
        sys.exit(_usage_exit(program, error))


def parse(argv: Sequence[str], positional: str, values: flags.FlagValues) -> list[str]:
    """Sets `values` from `argv` (program name first) and returns the positional arguments.

    Raises `UsageError` for an unknown flag, a value of the wrong kind or a wrong number of positional arguments.
    """
    values.set_gnu_getopt(True)
    try:
        arguments = values([argv[0], *normalise(argv[1:], values)])[1:]
    except flags.UnrecognizedFlagError as error:
        raise UsageError(f"unknown flag --{error.flagname}{_nearest(error.flagname, list(values))}") from None
    except flags.Error as error:
        raise UsageError(str(error)) from None
    names = positional.split()
    if len(arguments) != len(names):
        wanted = f"expected {positional}" if names else "expected flags only"
        raise UsageError(f"{wanted}, got {len(arguments)} positional argument(s): {' '.join(arguments) or 'none'}")
    return arguments


def normalise(arguments: Sequence[str], values: flags.FlagValues) -> list[str]:
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


def wants_help(arguments: Sequence[str], values: flags.FlagValues) -> bool:
    """Returns whether `--help` or `-h` stands in the place of a flag."""
    normal = normalise(arguments, values)
    end = normal.index("--") if "--" in normal else len(normal)
    taken = {i + 1 for i, a in enumerate(normal[:end]) if a.startswith("--") and _takes_value(a[2:], values)}
    return any(a in ("--help", "--h") and i not in taken for i, a in enumerate(normal[:end]))


def own_flags(module: object, values: flags.FlagValues) -> list[flags.Flag]:
    """Lists the flags that `module` defines or adopts (`flags.adopt_module_key_flags`), in order of definition."""
    adopted = {flag.name: flag for flag in values.get_key_flags_for_module(module)}
    return [flag for flag in adopted.values() if flag.help]


def help_text(program: str, positional: str, doc: str, own: Sequence[flags.Flag]) -> str:
    """Returns what `--help` prints: usage, the command's docstring, each flag with its meaning and default."""
    width = min(100, shutil.get_terminal_size().columns)
    usage = " ".join(filter(None, [f"usage: {program}", positional, "[flags]"]))
    lines = [usage, "", textwrap.dedent(doc).strip(), "", "flags (dashes may stand for underscores):"]
    for flag in own:
        shown = str(flag.default_as_str).strip("'")
        default = "" if flag.default in (None, "", []) else f" (default {shown})"
        lines.append(f"  {_spelling(flag)}")
        meaning = str(flag.help).removeprefix(f"<{'|'.join(_choices(flag))}>: ")
        lines += textwrap.wrap(meaning + default, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def _spelling(flag: flags.Flag) -> str:
    if flag.boolean:
        return f"--[no]{flag.name}"
    return f"--{flag.name}={'|'.join(_choices(flag)) or flag.flag_type().upper()}"


def _choices(flag: flags.Flag) -> Sequence[str]:
    return getattr(flag.parser, "enum_values", ())


def _is_flag(argument: str) -> bool:
    """Returns whether an argument is a flag; a negative number is none."""
    return len(argument) > 1 and argument[0] == "-" and not argument[1].isdigit() and argument[1] != "."


def _takes_value(name: str, values: flags.FlagValues) -> bool:
    return name in values and not values[name].boolean


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean --{close[0]}?" if close else "; --help lists the flags"


def _program(module: object) -> str:
    """Returns `python -m launch.serve` when started so, else the name of the script."""
    spec = getattr(module, "__spec__", None)
    return f"python -m {spec.name}" if spec is not None else sys.argv[0]


def _usage_exit(program: str, error: UsageError) -> int:
    print(f"{program}: {error}", file=sys.stderr)
    return 2
