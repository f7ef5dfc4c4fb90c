"""Flags that make a command one process of several, and what Slurm tells in their place."""

from collections.abc import Mapping

from absl import flags as absl_flags

from dsv3.engine.cluster.options import ClusterOptions, key_path, read_key, slurm_membership
from launch import flags

_COORDINATOR = absl_flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of process 0 as the others reach it, for several processes; the next port is used too. Slurm tells it.",
)
_NUM_PROCESSES = absl_flags.DEFINE_integer(
    "num_processes", None, "How many processes serve together, one on each host. Slurm tells it.", 1
)
_PROCESS_ID = absl_flags.DEFINE_integer(
    "process_id", None, "Which of them this is, from 0; process 0 serves HTTP. Slurm tells it.", 0
)
_KEY_FILE = absl_flags.DEFINE_string(
    "cluster_key_file", None, "File with the secret that the processes share, of at least 32 bytes."
)
_START_TIMEOUT = absl_flags.DEFINE_float(
    "cluster_start_timeout", 300.0, "Seconds within which all processes must have come.", 1.0
)


def cluster_options(environ: Mapping[str, str]) -> ClusterOptions | None:
    """This process's place among several, from flags and what is missing from `environ`; None for a single process.

    Raises UsageError for settings that are missing or wrong, and for a key file that cannot be used.
    """
    given = slurm_membership(environ)
    coordinator = _COORDINATOR.value or given.coordinator
    num_processes = given.num_processes if _NUM_PROCESSES.value is None else _NUM_PROCESSES.value
    process_id = given.process_id if _PROCESS_ID.value is None else _PROCESS_ID.value
    if num_processes == 1 or (coordinator, num_processes, process_id) == (None, None, None):
        return None
    if coordinator is None or num_processes is None or process_id is None:
        raise flags.UsageError("several processes need --coordinator, --num_processes and --process_id")
    if _KEY_FILE.value is None:
        raise flags.UsageError(
            "several processes need --cluster_key_file, the same file everywhere; make one with: "
            "(umask 077; head -c 48 /dev/urandom | base64 > cluster.key)"
        )
    try:
        read_key(_KEY_FILE.value)
        return ClusterOptions(
            coordinator, num_processes, process_id, key_path(_KEY_FILE.value), start_timeout_s=_START_TIMEOUT.value
        )
    except ValueError as error:
        raise flags.UsageError(f"--{error}") from None
