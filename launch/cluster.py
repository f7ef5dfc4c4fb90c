"""Cluster options of a command: from its flags, or else from Slurm's environment."""

import os
import re
from collections.abc import Mapping
from typing import TypedDict

from absl import flags as absl_flags

from dsv3.config.options import ClusterOptions
from dsv3.files import HOW_TO_MAKE_A_KEY, read_key
from launch import cli, flags


class Membership(TypedDict):
    """Values of `ClusterOptions` from an environment; None for missing ones."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    processes_per_node: int | None


def slurm_membership(environ: Mapping[str, str]) -> Membership:
    """Returns the membership from Slurm's environment, all None outside of a job step with several tasks.

    The leader is on the first host of the step. The port follows from the job's number, in the range of jax's own
    detection, so that jobs do not collide. https://slurm.schedmd.com/srun.html, "Output environment variables".
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
    """Returns the tasks of each node of a step from a Slurm list: 8 for "8(x18)".

    Raises ValueError if nodes have different counts.
    """
    match = re.fullmatch(r"(\d+)(?:\(x\d+\))?", counts)
    if match is None:
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE: {counts!r}: every node must run equally many tasks; start them with srun "
            "--ntasks-per-node"
        )
    return int(match[1])


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm list: "gpu007" for "gpu[007-010,12],login"."""
    match = re.match(r"([^,\[]+)(?:\[([^,\]-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST: {nodes!r} names no host")
    prefix, number, suffix = match.groups(default="")
    return prefix + number + suffix


def cluster_options(environ: Mapping[str, str]) -> ClusterOptions | None:
    """Returns the options of a process of a cluster, None for a single process; `environ` replaces missing flags.

    Raises UsageError for missing and invalid settings, and for an unusable key file.
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
