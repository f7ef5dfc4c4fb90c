"""`python -m launch.serve` with command lines that end by themselves: runs are forks of a process that imports it.

Run as a script it is that process. It reads a list of arguments per line, and answers with status, output and errors.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def _process() -> subprocess.Popen[str]:
    """It ends when its input does, with the process of the tests."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "tests.launch.preloaded"], cwd=ROOT, text=True, **pipes)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command with these arguments says, and its exit status."""
    process = _process()
    process.stdin.write(json.dumps(arguments) + "\n")
    process.stdin.flush()
    return subprocess.CompletedProcess(arguments, *json.loads(process.stdout.readline()))


def _ended(arguments: list[str]) -> tuple[int, str, str]:
    from launch import flags, serve

    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        if not (pid := os.fork()):
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            try:
                flags.run(serve.main, argv=["serve", *arguments])
            except SystemExit as end:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status, *(file.seek(0) or file.read() for file in (output, errors))


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(_ended(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
