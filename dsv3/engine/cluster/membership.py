"""What Slurm tells of an instance of several processes, and the secret that they share; imports no jax."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from dsv3.files import read_secret

MIN_KEY_BYTES = 32
_HOW_TO_MAKE_A_KEY = "make one with: (umask 077; head -c 48 /dev/urandom | base64 > cluster.key)"


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Returns the secret in a file without surrounding blanks.

    Raises ValueError for a file that cannot be read, that others may read, or that is too short; says how to make one.
    """
    try:
        key = read_secret(path).strip()
    except OSError as error:
        raise ValueError(f"cluster_key_file {path}: {error.strerror}; {_HOW_TO_MAKE_A_KEY}") from None
    except ValueError as error:
        raise ValueError(f"cluster_key_file {error}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(
            f"cluster_key_file {path}: {len(key)} bytes, at least {MIN_KEY_BYTES} are needed; {_HOW_TO_MAKE_A_KEY}"
        )
    return key


class Membership(TypedDict):
    """What an environment tells of `ClusterOptions`: None where it tells nothing."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None


def slurm_membership(environ: Mapping[str, str]) -> Membership:
    """Returns what Slurm tells a task of a job step with several tasks; nothing outside of one.

    The leader is on the first host of the step. The port comes from the job's number, in the range that jax's own
    detection uses, so that jobs do not meet. https://slurm.schedmd.com/srun.html, "Output environment variables".
    """
    nothing = Membership(coordinator=None, num_processes=None, process_id=None)
    try:
        job, nodes = int(environ["SLURM_JOB_ID"]), environ["SLURM_STEP_NODELIST"]
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
        process_id = int(environ["SLURM_PROCID"])
    except (KeyError, ValueError):
        return nothing
    if tasks < 2:
        return nothing
    coordinator = f"{first_host(nodes)}:{61440 + job % 4094}"
    return Membership(coordinator=coordinator, num_processes=tasks, process_id=process_id)


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm list such as "gpu[007-010,12],login": "gpu007"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST: {nodes!r} names no host")
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def key_path(text: str) -> str:
    """Makes a path absolute, so that a child process with another working directory finds the same file."""
    return str(Path(text).absolute())
