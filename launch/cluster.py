"""A command's place among several processes: from its flags, or else from Slurm's environment."""

import os
import re
from collections.abc import Mapping
from typing import TypedDict

from absl import flags as absl_flags

from dsv3.config.options import ClusterOptions
from dsv3.files import HOW_TO_MAKE_A_KEY, read_key
from launch import cli, flags


class Membership(TypedDict):
    """Values of `ClusterOptions` from an environment; None where it has none."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    processes_per_node: int | None


def slurm_membership(environ: Mapping[str, str]) -> Membership:
    """Returns what Slurm's environment says of a job step with several tasks; nothing outside of one.

    The leader is on the first host of the step. The port comes from the job's number, in the range that jax's own
    detection uses, so that jobs do not meet. https://slurm.schedmd.com/srun.html, "Output environment variables".
    """
    nothing = Membership(coordinator=None, num_processes=None, process_id=None, processes_per_node=None)
    try:
        job, nodes = int(environ["SLURM_JOB_ID"]), environ["SLURM_STEP_NODELIST"]
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
        process_id = int(environ["SLURM_PROCID"])
    except (KeyError, ValueError):
        return nothing
    if tasks < 2:
        return nothing
    coordinator = f"{first_host(nodes)}:{61440 + job % 4094}"
    per_node = _equal_count(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return Membership(coordinator=coordinator, num_processes=tasks, process_id=process_id, processes_per_node=per_node)


def _equal_count(counts: str) -> int:
    """Returns the tasks of each node of a step, of a Slurm list such as "8(x18)": 8.

    Raises ValueError where nodes have different counts.
    """
    match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", counts)
    if match is None:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE: {counts!r}: every node must have equally many tasks; start them with srun "
            "--ntasks-per-node"
        )
    return int(match[1])


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm list such as "gpu[007-010,12],login": "gpu007"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST: {nodes!r} names no host")
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def cluster_options(environ: Mapping[str, str]) -> ClusterOptions | None:
    """Returns this process's place among several, None for a single process; `environ` fills in for missing flags.

    Raises UsageError for settings that are missing or wrong, and for a key file that cannot be used.
    """
    given = cli.given(ClusterOptions)
    try:
        found = slurm_membership(environ)
    except ValueError as error:
        raise flags.UsageError(str(error)) from None
    values = absl_flags.FLAGS
    place = {name: value if values[name].using_default_value else given[name] for name, value in found.items()}
    per_node = place.pop("processes_per_node")
    per_node = 1 if per_node is None else per_node
    if per_node == 1 and (place["num_processes"] == 1 or set(place.values()) == {None}):
        return None
    if None in place.values():
        raise flags.UsageError("several processes need --coordinator, --num_processes and --process_id")
    if given["cluster_key_file"] is None:
        raise flags.UsageError(
            f"several processes need --cluster_key_file, the same file everywhere; {HOW_TO_MAKE_A_KEY}"
        )
    try:
        read_key(given["cluster_key_file"])
    except ValueError as error:
        raise flags.UsageError(f"--{error}") from None
    place |= {"processes_per_node": per_node, "cluster_key_file": os.path.abspath(given["cluster_key_file"])}
    return cli.make(ClusterOptions, given | place)
