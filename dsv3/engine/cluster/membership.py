"""What Slurm tells of an instance of several processes; imports no jax."""

import re
from collections.abc import Mapping
from typing import TypedDict


class Membership(TypedDict):
    """What an environment tells of `ClusterOptions`: None where it tells nothing."""

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    processes_per_node: int | None


def slurm_membership(environ: Mapping[str, str]) -> Membership:
    """Returns what Slurm tells a task of a job step with several tasks; nothing outside of one.

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
