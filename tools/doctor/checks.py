"""The table of checks: what the doctor runs, in this order."""

import dataclasses
import os
import sys
from pathlib import Path

from tools.doctor.install import count_gpus

_STACKS_S = 5.0  # seconds before its time limit at which a hanging check logs its stacks


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
    each: bool = False
    """Whether it stands for several: the command with `--list` prints their names, one per line, and each of them is
    a check of its own, whose command has that name as an argument more."""
    counted: bool = False
    """Whether the report counts the rows that passed in place of showing them."""


def table(model: Path, quick: bool) -> list[Check]:
    """Returns the checks of `model`, a directory; with `quick` those that take seconds."""
    on_cpu = not count_gpus() or os.environ.get("JAX_PLATFORMS") == "cpu"
    small = ("--quick",) if quick or on_cpu else ()
    checks = [
        _check(
            "install",
            "machine",
            "tools.doctor.install machine",
            "Fix what the row names: first the driver, then this package's extra cuda13 or cuda12.",
            180,
        ),
        _check(
            "install",
            "jax",
            "tools.doctor.install jax",
            "Install this package with the extra that suits the driver (cuda13 from r580 on, cuda12 from r525 on) in a "
            "new environment, and end other processes on the GPU.",
            180,
        ),
        _check(
            "fits",
            "model",
            "tools.doctor.fits",
            "Change the options that the row names, or serve a smaller model; launch.plan computes other deployments.",
            300,
            str(model),
        ),
        _check(
            "kernels",
            "operations",
            "pallas_kernels.checks",
            "Start the server with --check_kernels, which replaces the kernel by its reference, and send this report.",
            300 if on_cpu else 60 if quick else 180,  # a CPU may be one of few, and busy
            *small,
            each=True,
            counted=True,
        ),
    ]
    return checks if quick else [*checks, *_thorough(model, small)]


def _thorough(model: Path, small: tuple[str, ...]) -> list[Check]:
    """Returns the checks that `--quick` leaves out; on a CPU `small` asks for their small form."""
    start = _start_seconds(model)
    return [
        _check(
            "fast",
            "kernels",
            "tools.doctor.fast",
            "A kernel that is wrong here fails above, too. Where the roof fails or is far below the data sheet, "
            "read clocks and power in the log, and end other processes on the GPU.",
            240,
            each=True,
        ),
        _check(
            "fast",
            "copies",
            "tools.doctor.host_copies",
            "Weights and pages pass host memory. Run memory and PCIe tests of the machine, and send this report.",
            120,
        ),
        _check(
            "step",
            "models",
            "tools.doctor.step",
            "If a kernel failed above, that is the cause. If none did, send this report, and do not trust answers of "
            "this family.",
            300,
            *small,
            each=True,
        ),
        _check(
            "step",
            "stored",
            "tools.doctor.stored",
            "Servers work, but every start compiles again; send this report.",
            600,
        ),
        _check(
            "collectives",
            "kinds",
            "tools.doctor.collectives",
            "If only in_flight failed, serve with --noexpert_overlap; otherwise serve on one GPU. Run the doctor again "
            "with NCCL_DEBUG=INFO: its log then has NCCL's messages.",
            180,
            *small,
            each=True,
        ),
        _check(
            "collectives",
            "ways",
            "tools.doctor.exchange_paths",
            "Serving takes nccl alone: if another way failed, do nothing. If one is faster than nccl at the size of "
            "decode, send this report.",
            120,
            each=True,
        ),
        _check(
            "serve",
            "server",
            "tools.doctor.serve",
            "The first error in this check's log is the cause.",
            start + 400,  # its own waits are shorter: it ends the server itself
            str(model),
            str(start),
        ),
    ]


def _check(
    section: str,
    name: str,
    module: str,
    remedy: str,
    seconds: float,
    *arguments: str,
    each: bool = False,
    counted: bool = False,
) -> Check:
    """Returns a check that runs a module; its first arguments name it, and it logs its stacks if it hangs."""
    command = sys.executable, "-m", "tools.doctor.child", str(seconds - _STACKS_S), *module.split(), *arguments
    return Check(section, name, command, remedy, seconds, each, counted)


def _start_seconds(model: Path) -> float:
    """Returns the time for a start that compiles everything and reads the weights from a slow disk."""
    return 900 + sum(file.stat().st_size for file in model.glob("*.safetensors")) / 200e6
