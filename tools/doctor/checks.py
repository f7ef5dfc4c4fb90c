"""The table of checks: what the doctor runs, in this order."""

import dataclasses
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Check:
    """A command that prints rows (`tools.doctor.rows`), and how the report shows them.

    Its exit status is 0 where all rows passed, 1 where some failed, 2 where nothing could be tried here, with one line
    on standard error that says why. Anything else is a crash, which costs this check alone.
    """

    section: str
    name: str
    command: tuple[str, ...]
    remedy: str
    """The sentence of what to try when it fails."""
    seconds: float = 60.0
    """The time limit."""
    quick: bool = True
    """Whether it belongs to `--quick`, too."""
    each: bool = False
    """Whether it stands for several: the command with `--list` prints their names, one per line, and each of them is
    a check of its own, whose command has that name as an argument more."""
    counted: bool = False
    """Whether the report counts the rows that passed in place of showing them."""


def table(model: Path, quick: bool) -> list[Check]:
    """Returns the checks of `model`, a directory; those of the quick form with `quick`."""
    directory = str(model)
    shorter = ("--quick",) if quick else ()
    checks = [
        Check(
            "install",
            "machine",
            _module("tools.doctor.install", "machine"),
            "Mend what the row names; the driver comes first, then the extra cuda13 or cuda12 of this package.",
        ),
        Check(
            "install",
            "jax",
            _module("tools.doctor.install", "jax"),
            "Install this package with the extra that suits the driver (cuda13 from r580 on, cuda12 from r525 on) in a "
            "new environment, and end other processes on the GPU.",
            seconds=180,
        ),
        Check(
            "fits",
            "memory",
            _module("tools.doctor.fits", directory),
            "Change the options that the row names, or take a smaller model; launch.plan computes other deployments.",
            seconds=300,
        ),
        Check(
            "kernels",
            "operations",
            _module("pallas_kernels.checks", *shorter),
            "Start the server with --check_kernels, which serves the operation by its reference, and send this report.",
            seconds=60 if quick else 180,
            each=True,
            counted=True,
        ),
        Check(
            "serve",
            "server",
            _module("tools.doctor.serve", directory),
            "Read the log of this check from its end; the first error in it is the cause.",
            seconds=_serve_seconds(model),
            quick=False,
        ),
    ]
    return [check for check in checks if check.quick or not quick]


def _module(*words: str) -> tuple[str, ...]:
    return sys.executable, "-m", *words


def _serve_seconds(model: Path) -> float:
    """Returns the time for a start that compiles everything and reads the weights from a slow disk, and for a load."""
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return 900 + size / 200e6
