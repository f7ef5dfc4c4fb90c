"""Serves one instance from the hosts of a Ray cluster: one actor per host, with a process per GPU.

  ray job submit --working-dir . -- python -m deploy.ray_cluster --num_hosts 2 --gpus_per_host 8 -- \\
    --model /models/DeepSeek-V3 --enable_expert_parallel --host 0.0.0.0

An actor runs `deploy.node`, which starts the processes. What follows "--" are the flags of `launch.serve`; place, key
and number of the processes are added. Compiled programs of the last start are found again only by the key that wrote
them: give --cluster_key_file, a file of every host, to have them. The first process that ends, and the first actor that
is lost, end the instance: the job then fails, for Ray or a person to start it anew. SIGTERM drains all processes.
"""

import argparse
import base64
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_POLL_S = 1.0
_ANSWER_S = 60.0  # an actor that says nothing for so long is lost
_END_S = 30.0  # processes that were asked to end do so within their --shutdown_timeout and this


class Host:
    """An actor: the processes of `launch.serve` on one host."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """Returns this host's address with a port that is free, as the next one is."""
        for _ in range(100):
            with socket.socket() as first, socket.socket() as second:
                first.bind(("", 0))
                port = first.getsockname()[1]
                try:
                    second.bind(("", port + 1))
                except OSError:
                    continue
                return f"{ray.util.get_node_ip_address()}:{port}"
        raise OSError("no two ports in a row are free")

    def start(self, node: list[str], arguments: list[str], key: str | None) -> None:
        """Starts `deploy.node` with its own flags and those of the server.

        A cluster's `key` lies in this actor's memory alone.
        """
        command = [sys.executable, "-m", "deploy.node", *node, "--", *arguments]
        if key is not None:
            command += ["--cluster_key_file", _in_memory(key)]
        # The process ends in order when this one dies; Ray kills actors of a job that is stopped.
        self._process = subprocess.Popen(["setpriv", "--pdeathsig", "TERM", "--", *command])

    def poll(self) -> int | None:
        """Returns the exit status of `deploy.node`; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def terminate(self) -> None:
        """Sends SIGTERM, which drains the instance."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a process ends or a signal comes; returns the exit status: 0 after a signal, 1 after a failure."""
    options = _parse(argv)
    ray.init(log_to_driver=True)
    bundle = {"CPU": options.cpus_per_host} | ({"GPU": options.gpus_per_host} if options.gpus_per_host else {})
    group = placement_group([bundle] * options.num_hosts, strategy=options.strategy)
    try:
        ray.get(group.ready(), timeout=options.placement_timeout)
        hosts = [_actor(group, i, options) for i in range(options.num_hosts)]
        _start(hosts, options)
        return _watch(hosts, options.drain_timeout)
    except ray.exceptions.GetTimeoutError:
        print(f"{options.num_hosts} hosts of {bundle} did not come in {options.placement_timeout:g} s", flush=True)
        return 1
    finally:
        remove_placement_group(group)
        ray.shutdown()


def _in_memory(text: str) -> str:
    """Returns the path of a file that only this user can read, and that exists as long as this process."""
    descriptor = os.memfd_create("dsv3-cluster-key")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def needs_key(num_processes: int, arguments: Sequence[str]) -> bool:
    """Returns whether the processes need a key and their flags bring none."""
    given = any(each.replace("-", "_").startswith("__cluster_key_file") for each in arguments)
    return num_processes > 1 and not given


def node_flags(node_rank: int, options: argparse.Namespace) -> list[str]:
    """Returns the flags of `deploy.node` on one host."""
    return [
        f"--num_nodes={options.num_hosts}",
        f"--node_rank={node_rank}",
        f"--processes_per_node={options.processes_per_host}",
        f"--drain_timeout={options.drain_timeout}",
    ]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("deploy.ray_cluster", description=__doc__.partition("\n")[0])
    parser.add_argument("--num_hosts", type=int, required=True, help="Serve from this many hosts.")
    parser.add_argument("--gpus_per_host", type=int, default=0, help="Reserve this many GPUs per host.")
    parser.add_argument("--cpus_per_host", type=int, default=1, help="Reserve this many CPUs per host.")
    parser.add_argument(
        "--processes_per_host",
        type=int,
        help="Start this many processes on each host; default: one per GPU, on a single host one.",
    )
    parser.add_argument(
        "--strategy",
        default="STRICT_SPREAD",
        choices=("STRICT_SPREAD", "PACK"),
        help="PACK lets several actors share a host, to try it on one machine.",
    )
    parser.add_argument("--placement_timeout", type=float, default=600.0, help="Wait this many seconds for the hosts.")
    parser.add_argument(
        "--drain_timeout", type=float, default=240.0, help="After a signal, wait this many seconds for the processes."
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Flags of launch.serve, after --.")
    options = parser.parse_args(argv)
    if options.processes_per_host is None:
        options.processes_per_host = max(1, options.gpus_per_host) if options.num_hosts > 1 else 1
    options.arguments = options.arguments[options.arguments[:1] == ["--"] :]
    return options


def _actor(
    group: "ray.util.placement_group.PlacementGroup", index: int, options: argparse.Namespace
) -> "ray.ObjectRef":
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    reserved = {"num_cpus": options.cpus_per_host, "num_gpus": options.gpus_per_host}
    return ray.remote(Host).options(scheduling_strategy=place, max_restarts=0, **reserved).remote()


def _start(hosts: list, options: argparse.Namespace) -> None:
    arguments, total = options.arguments, len(hosts) * options.processes_per_host
    coordinator = ray.get(hosts[0].address.remote(), timeout=_ANSWER_S)
    key = base64.b64encode(secrets.token_bytes(48)).decode() if needs_key(total, arguments) else None
    if total > 1:
        arguments = [*arguments, "--coordinator", coordinator]
    ray.get(
        [host.start.remote(node_flags(i, options), arguments, key) for i, host in enumerate(hosts)], timeout=_ANSWER_S
    )
    where = coordinator.rpartition(":")[0]
    print(f"{total} processes have started on {len(hosts)} hosts; process 0 is at {where}", flush=True)


def _watch(hosts: list, drain_timeout: float) -> int:
    """Waits for the first process that ends, or for a signal, and then for the others."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: signals.append(received))
    try:
        while not signals and not any(status is not None for status in _poll(hosts)):
            time.sleep(_POLL_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        print(f"a host is lost: {error}", flush=True)
    return _end(hosts, drain_timeout if signals else _END_S, failed=not signals)


def _end(hosts: list, patience_s: float, failed: bool) -> int:
    for host in hosts:
        host.terminate.remote()
    deadline, statuses = time.monotonic() + patience_s, [None] * len(hosts)
    while None in statuses and time.monotonic() < deadline:
        statuses = [_status(host) for host in hosts]
        time.sleep(_POLL_S / 4)
    print(f"exit statuses by host: {statuses}", flush=True)
    return 1 if failed or any(statuses) or None in statuses else 0


def _poll(hosts: list) -> list[int | None]:
    return ray.get([host.poll.remote() for host in hosts], timeout=_ANSWER_S)


def _status(host) -> int | None:
    try:
        return ray.get(host.poll.remote(), timeout=_ANSWER_S)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return 1


if __name__ == "__main__":
    sys.exit(main())
