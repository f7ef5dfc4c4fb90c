"""Commands of `launch` with command lines that end by themselves: runs are forks of a process that imports the command.

Run as a script with the name of a command it is that process. It reads a list of arguments per line, and answers with
status, output and errors.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
POSITIONAL = {"plan": "DEPLOYMENT"}  # as the command itself says it to `flags.run`
LATER = {"plan": ("tools.plan.report", "tools.plan.uncompiled_report", "training.pipeline.simulator")}
"""What a command imports once its arguments are right: jax, which takes a second each time."""


@functools.cache
def _process(command: str) -> subprocess.Popen[str]:
    """It ends when its input does, with the process of the tests."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "tests.launch.preloaded", command], cwd=ROOT, text=True, **pipes)


def run(*arguments: str, command: str = "serve") -> subprocess.CompletedProcess[str]:
    """What the command with these arguments says, and its exit status."""
    process = _process(command)
    process.stdin.write(json.dumps(arguments) + "\n")
    process.stdin.flush()
    return subprocess.CompletedProcess(arguments, *json.loads(process.stdout.readline()))


def _ended(command: str, arguments: list[str]) -> tuple[int, str, str]:
    from launch import flags

    main = importlib.import_module(f"launch.{command}").main
    for module in LATER.get(command, ()):
        importlib.import_module(module)
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        if not (pid := os.fork()):
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            try:
                flags.run(main, POSITIONAL.get(command, ""), [command, *arguments])
            except SystemExit as end:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status, *(file.seek(0) or file.read() for file in (output, errors))


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(_ended(sys.argv[1], json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
