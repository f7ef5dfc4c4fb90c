"""What the files in deploy/ start, read out of them: every command line, by the file and the process that it is for."""

import dataclasses
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import yaml
from absl import flags as absl_flags

from deploy import node
from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.config.server_options import ServerOptions
from launch import cli, flags
from launch.cluster import slurm_membership
from launch.node import places

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
SERVE = ["-m", "launch.serve"]
ENV = {"POD_IP": "10.0.0.7", "LWS_LEADER_ADDRESS": "decode-0.decode.default", "LWS_WORKER_INDEX": "0"}


@dataclasses.dataclass(frozen=True)
class Started:
    """One process: its name, what its flags say, and the grace that its manager gives it to end."""

    name: str
    server: ServerOptions
    engine: EngineOptions
    cluster: ClusterOptions | None
    nodes: int
    gpus_per_node: int
    ends_within: float


def parsed(arguments: list[str]) -> tuple[ServerOptions, EngineOptions, dict[str, Any]]:
    """Reads flags as `launch.serve` does; raises UsageError for those that it refuses."""
    values = absl_flags.FlagValues()
    for options in (ServerOptions, EngineOptions, ClusterOptions):
        cli.define(options, values)
    flags.parse(["serve", *arguments], "", values)
    return cli.read(ServerOptions, values), cli.read(EngineOptions, values), cli.given(ClusterOptions, values)


def documents(path: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((DEPLOY / path).read_text()) if each]


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((DEPLOY / "kubernetes").rglob("*.yaml")):
        for document in documents(str(path.relative_to(DEPLOY))):
            yield f"{path.stem}: {document['kind']}", document


def slurm(script: pathlib.Path, folder: pathlib.Path, tasks_per_node: int | None = None) -> Started:
    """Runs a batch script with a `srun` that writes down its arguments, and reads these.

    `tasks_per_node` is what `sbatch --ntasks-per-node` says in the place of the script.
    """
    (folder / "srun").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$FOLDER/arguments"\n')
    (folder / "srun").chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FOLDER": str(folder), "MODEL": "/model dir"}
    subprocess.run(["bash", "-u", str(script)], env=environ, check=True, timeout=60)
    arguments = (folder / "arguments").read_text().split("\0")[:-1]
    start = arguments.index("launch.serve")
    assert arguments[start - 1] == "-m" and "--kill-on-bad-exit=1" in arguments[:start]
    server, engine, given = parsed(arguments[start + 1 :])
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE))
    nodes, tasks = int(directives["nodes"]), tasks_per_node or int(directives["ntasks-per-node"])
    told = slurm_membership(
        {
            "SLURM_JOB_ID": "4711",
            "SLURM_STEP_NODELIST": f"gpu[001-{nodes:03}]",
            "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
            "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{nodes})",
            "SLURM_PROCID": "0",
        }
    )
    place = {name: value for name, value in told.items() if value is not None}
    signal, _, before_s = directives["signal"].partition("@")
    assert signal == "TERM" and server.model == "/model dir"
    cluster = ClusterOptions(**(given | place)) if place else None
    return Started(script.stem, server, engine, cluster, nodes, int(directives["gpus-per-node"]), float(before_s))


def pods(document: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields the pod templates of a manifest, by role, with the number of hosts of an instance."""
    if document["kind"] == "LeaderWorkerSet":
        template = document["spec"]["leaderWorkerTemplate"]
        yield "leader", template["size"], template["leaderTemplate"]
        yield "follower", template["size"], template["workerTemplate"]
    elif document["kind"] == "Deployment":
        yield "leader", 1, document["spec"]["template"]


def expanded(text: str, known: dict[str, str]) -> str:
    """Replaces `$(NAME)` as Kubernetes does; KeyError for a name that the container does not have."""
    return re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], text)


def kubernetes() -> Iterator[tuple[Started, dict[str, Any]]]:
    """Yields the first process of every pod of an instance that the manifests start, and its pod's template."""
    for _, document in manifests():
        for role, nodes, pod in pods(document):
            if pod["spec"]["containers"][0]["command"] == ["python", "-m", "launch.router"]:
                continue  # test_router.py
            rank = 0 if role == "leader" else nodes - 1
            name = f"{document['metadata']['name']} {role}"
            yield started_in(pod, name, nodes, rank)[0], pod


def started_in(pod: dict[str, Any], name: str, nodes: int, rank: int) -> list[Started]:
    """Returns the processes of a pod, which is number `rank` of its instance."""
    [container] = pod["spec"]["containers"]
    own = {each["name"] for each in container.get("env", [])} | {key for key in ENV if key.startswith("LWS")}
    known = {key: value for key, value in ENV.items() if key in own}
    known |= {"LWS_GROUP_SIZE": str(nodes), "LWS_WORKER_INDEX": str(rank)}
    texts = [expanded(text, known) for text in container["args"]]
    if container["command"] == ["python", "-m", "deploy.node"]:
        options = node.parse(texts)
        assert (options.num_nodes, options.node_rank) == (nodes, rank)
        lines = places(options.arguments, nodes, rank, options.processes_per_node)
    else:
        assert container["command"] == ["python", *SERVE]
        lines = [texts]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    grace = float(pod["spec"]["terminationGracePeriodSeconds"])
    found = []
    for line in lines:
        server, engine, given = parsed(line)
        cluster = ClusterOptions(**given) if given["num_processes"] is not None else None
        found.append(Started(name, server, engine, cluster, nodes, gpus, grace))
    return found
