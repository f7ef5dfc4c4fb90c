"""Checks this machine and writes a report to send: installation, memory, kernels, whole steps, collectives, a server.

  python -m launch.doctor                                    with the bundled model
  python -m launch.doctor --model /models/DeepSeek-V2-Lite   with a Hugging Face model directory
  python -m launch.doctor --quick                            only installation, memory, and two shapes of each kernel

Each check is a process with a time limit: one that crashes or hangs costs its own rows. The report is written after
each check; it names no user, host or folder of yours. Exit status 0: everything passed, 1: something failed, 2: nothing
could be tried. docs/doctor.md explains the sections.
"""

import datetime
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from absl import flags as absl_flags
from rich.console import Console

from dsv3.config.server_options import ServiceOptions
from launch import flags
from launch.catalog import model_dir
from tools.doctor.checks import table
from tools.doctor.run import Report, examine

_MODEL = absl_flags.DEFINE_string(
    "model", None, "Check with this Hugging Face model directory; default: the bundled model."
)
_OUTPUT = absl_flags.DEFINE_string(
    "output", None, "Write the report to this folder; default: doctor-DATE-TIME in the current one."
)
_QUICK = absl_flags.DEFINE_boolean("quick", False, "Check only installation, memory, and two shapes of each kernel.")


def main() -> int:
    """Runs the checks; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores one
            signal.signal(number, _interrupt)
    model = model_dir(ServiceOptions(model=_MODEL.value))
    output = Path(_OUTPUT.value or f"doctor-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    try:
        report = Report(output, model, quick=_QUICK.value)
    except OSError as error:
        raise flags.UsageError(f"--output {output}: cannot be written: {error.strerror or error}") from None
    with Console(stderr=True).status("") as status:
        return examine(table(model, _QUICK.value), report, _say, status.update)


def _say(line: str) -> None:
    try:
        print(line.encode("ascii", "backslashreplace").decode(), flush=True)
    except OSError:  # its reader is gone, as `head` is; the report is not
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    flags.run(main)
