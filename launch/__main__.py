"""The console command `dsv3`: `dsv3 serve` is `python -m launch.serve`."""

import ast
import difflib
import runpy
import sys
from pathlib import Path

COMMANDS = ("serve", "batch", "router", "plan", "simulate", "convert", "train", "doctor", "tune")
_USAGE = """usage: dsv3 COMMAND [arguments]

{commands}

dsv3 COMMAND --help explains a command, dsv3 --version prints versions.
"""


def main() -> None:
    """Runs the command of the first argument in this process, as `python -m` would."""
    command, *_ = [*sys.argv[1:], "--help"]
    if command in COMMANDS:
        del sys.argv[1]
        runpy.run_module(f"launch.{command}", run_name="__main__", alter_sys=True)
    elif command in ("--help", "-h", "help"):
        print(_usage(), end="")
    elif command == "--version":
        from launch.flags import version_text

        print(version_text())
    else:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"dsv3: {command} is not a command; {hint}", file=sys.stderr)
        sys.exit(2)


def _usage() -> str:
    """Returns each command with the first line of its docstring, read without importing it."""
    sources = {name: (Path(__file__).parent / f"{name}.py").read_text("utf-8") for name in COMMANDS}
    firsts = {name: (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0] for name, source in sources.items()}
    return _USAGE.format(commands="\n".join(f"  {name:10} {first}" for name, first in firsts.items()))


if __name__ == "__main__":
    main()
