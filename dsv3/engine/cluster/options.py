"""Who takes part in an instance of several processes, where they meet, and the secret they share; imports no jax."""

import dataclasses
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

LEADER = 0
"""Process id of the one that owns the scheduler."""

MIN_KEY_BYTES = 32
_MAX_KEY_BYTES = 4096
_MAX_PROCESSES = 4096
_HOW_TO_MAKE_A_KEY = "make one with: (umask 077; head -c 48 /dev/urandom | base64 > cluster.key)"


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """One process's place in an instance.

    `coordinator` is "host:port", an address of process 0 that all others reach: jax's coordinator listens on that port,
    our control connection on the next one. `key_file` holds the secret of the instance, the same in every process.
    All processes must have come within `start_timeout_s` seconds. A peer that is silent for `silence_s` seconds counts
    as hanging; heartbeats come from a thread, so compiling or loading is not silence.

    Raises ValueError for values that cannot be.
    """

    coordinator: str
    num_processes: int
    process_id: int
    key_file: str
    start_timeout_s: float = 300.0
    silence_s: float = 10.0

    def __post_init__(self) -> None:
        if not 2 <= self.num_processes <= _MAX_PROCESSES:
            raise ValueError(f"num_processes: {self.num_processes} is not from 2 to {_MAX_PROCESSES}")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(f"process_id: {self.process_id} is not from 0 to {self.num_processes - 1}")
        split_address(self.coordinator)

    @property
    def is_leader(self) -> bool:
        return self.process_id == LEADER

    @property
    def control_address(self) -> tuple[str, int]:
        """Where the leader listens for followers."""
        host, port = split_address(self.coordinator)
        return host, port + 1


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" ("[::1]:port" for IPv6), where the next port exists too; ValueError otherwise."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65534:
        raise ValueError(f"coordinator: {text!r} is not HOST:PORT with a port from 1 to 65534")
    return host, int(port)


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file, surrounding blanks removed.

    Raises ValueError for a file that cannot be read, that others may read, or that is too short; says how to make one.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(_MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ValueError(f"cluster_key_file {path}: {error.strerror}; {_HOW_TO_MAKE_A_KEY}") from None
    if mode & stat.S_IRWXO:
        raise ValueError(f"cluster_key_file {path}: every user of this machine may open it; chmod o-rwx it")
    if not MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise ValueError(
            f"cluster_key_file {path}: {len(key)} bytes, not {MIN_KEY_BYTES} to {_MAX_KEY_BYTES}; {_HOW_TO_MAKE_A_KEY}"
        )
    return key


@dataclasses.dataclass(frozen=True)
class Membership:
    """What an environment tells of the instance: None where it tells nothing."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def slurm_membership(environ: Mapping[str, str]) -> Membership:
    """What Slurm tells a task of a job step with several tasks; nothing outside of one.

    The leader is on the first host of the step. The port comes from the job's number, in the range that jax's own
    detection uses, so that jobs do not meet. https://slurm.schedmd.com/srun.html, "Output environment variables".
    """
    try:
        job, nodes = int(environ["SLURM_JOB_ID"]), environ["SLURM_STEP_NODELIST"]
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
        process_id = int(environ["SLURM_PROCID"])
    except (KeyError, ValueError):
        return Membership()
    if tasks < 2:
        return Membership()
    return Membership(f"{first_host(nodes)}:{61440 + job % 4094}", tasks, process_id)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list such as "gpu[007-010,12],login": "gpu007"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST: {nodes!r} names no host")
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def key_path(text: str) -> str:
    """An absolute path, so that a child process with another working directory finds the same file."""
    return str(Path(text).absolute())
