"""Cluster options of a command: from its flags, or else from Slurm's environment; or those of one host's processes."""

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.files import HOW_TO_MAKE_A_KEY, read_key
from dsv3.processes.gpus import visible_gpus
from launch import cli, flags

_ATTEMPTS = 20


def slurm_membership(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns values of `ClusterOptions` from Slurm's environment, all None outside of a job step with several tasks.

    The leader is on the first host of the step. The port follows from the job's number, in the range of jax's own
    detection, so that jobs do not collide. https://slurm.schedmd.com/srun.html, "Output environment variables".
    """
    nothing: dict[str, Any] = dict.fromkeys(("coordinator", "num_processes", "process_id", "processes_per_node"))
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
    return dict(coordinator=coordinator, num_processes=tasks, process_id=process_id, processes_per_node=per_node)


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


def processes_needed(engine: EngineOptions, cluster: ClusterOptions | None) -> int:
    """Returns how many processes to start in the place of this one: for NCCL EP one per GPU of this host, otherwise 1.

    Raises UsageError where the ranks are not as many as the GPUs that CUDA shows this process.
    """
    gpus = 1 if cluster is not None or engine.expert_transport != "nccl_ep" else visible_gpus()
    if gpus < 2:
        return 1
    ranks, shards = engine.data_parallel_size or gpus, engine.tensor_parallel_size
    if ranks != gpus or shards > 1:
        raise flags.UsageError(
            f"--expert_transport nccl_ep needs a process per GPU, and a process has whole ranks: --data_parallel_size "
            f"{ranks} and --tensor_parallel_size {shards} do not fit the {gpus} GPUs of this host; change them, or "
            "CUDA_VISIBLE_DEVICES"
        )
    return gpus


def one_host_flags(count: int, directory: Path) -> list[str]:
    """Returns the flags of all processes of an instance on this host; its key, unless there is one, is in `directory`.

    The coordinator's port and the next are free now.
    """
    found = [f"--coordinator=127.0.0.1:{_free_ports()}", f"--data_parallel_size={count}"]
    if absl_flags.FLAGS["cluster_key_file"].value is None:
        key = directory / "cluster.key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        found.append(f"--cluster_key_file={key}")
    return found


def _free_ports() -> int:
    """Returns a port of this host that is free, as is the next one."""
    for _ in range(_ATTEMPTS):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port
    raise flags.UsageError(f"none of {_ATTEMPTS} pairs of ports is free on 127.0.0.1: give --coordinator")


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
