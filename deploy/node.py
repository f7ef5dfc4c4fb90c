"""Runs `launch.serve` several times on this host, once per GPU, as the processes of one node of an instance.

  python -m deploy.node --num_nodes 18 --node_rank 3 --processes_per_node 8 -- \\
    --model /models/DeepSeek-V3 --coordinator HOST0:8476 --cluster_key_file cluster.key --enable_expert_parallel

What follows "--" are the flags of `launch.serve`; the number of processes and the place of each are added. Lines of
output begin with the number of their process. SIGTERM drains the instance. When a process fails, the others get
SIGTERM. What still runs is killed, --drain_timeout seconds after a signal and 30 s after the first end of a process.
The exit status is 0 where all processes ended with 0, otherwise 1.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from dsv3.processes.child import ChildProcess

_SERVE = (sys.executable, "-m", "launch.serve")
_POLL_S = 0.25
_END_S = 30.0
_READ_S = 5.0  # for the last lines of processes that have ended


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until all processes have ended; returns the exit status."""
    options = parse(argv)
    flags = flags_of(options.num_nodes, options.node_rank, options.processes_per_node, options.arguments)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: signals.append(received))
    first = options.node_rank * options.processes_per_node
    children: list[ChildProcess] = []
    readers = []
    try:
        for place, each in enumerate(flags):
            child, reader = _start([*_SERVE, *each], first + place)
            children.append(child)
            readers.append(reader)
        _watch(children, signals, options.drain_timeout)
    finally:
        statuses = [child.end() for child in children]
    for reader in readers:
        reader.join(_READ_S)
    print(f"exit statuses of processes {first} to {first + len(flags) - 1}: {statuses}", flush=True)
    return int(any(status != 0 for status in statuses))


def flags_of(num_nodes: int, node_rank: int, processes_per_node: int, arguments: Sequence[str]) -> list[list[str]]:
    """Returns the flags of each process of a node: those of all, and its place. A single process needs no place."""
    total, first = num_nodes * processes_per_node, node_rank * processes_per_node
    if total == 1:
        return [list(arguments)]
    shared = [*arguments, f"--num_processes={total}", f"--processes_per_node={processes_per_node}"]
    return [[*shared, f"--process_id={first + i}"] for i in range(processes_per_node)]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the process with status 2 where it is wrong."""
    parser = argparse.ArgumentParser("deploy.node", description=__doc__.partition("\n")[0])
    parser.add_argument("--num_nodes", type=int, default=1, help="Hosts of the instance.")
    parser.add_argument("--node_rank", type=int, default=0, help="This host's number; host 0 serves HTTP.")
    parser.add_argument("--processes_per_node", type=int, required=True, help="Processes on each host.")
    parser.add_argument(
        "--drain_timeout", type=float, default=240.0, help="After a signal, wait this many seconds for the processes."
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Flags of launch.serve, after --.")
    options = parser.parse_args(argv)
    if options.num_nodes < 1 or options.processes_per_node < 1:
        parser.error("--num_nodes and --processes_per_node must be at least 1")
    if not 0 <= options.node_rank < options.num_nodes:
        parser.error(f"--node_rank {options.node_rank} is not from 0 to {options.num_nodes - 1}")
    options.arguments = options.arguments[options.arguments[:1] == ["--"] :]
    return options


def _start(command: Sequence[str], process_id: int) -> tuple[ChildProcess, threading.Thread]:
    """Starts a process, which gets SIGTERM should this one die, and a thread that prints what it says."""
    output, end = os.pipe()
    try:
        child = ChildProcess(["setpriv", "--pdeathsig", "TERM", "--", *command], stdout=end, stderr=end)
    except OSError:
        os.close(output)
        raise
    finally:
        os.close(end)
    reader = threading.Thread(target=_print_lines, args=(output, process_id), daemon=True)
    reader.start()
    return child, reader


def _print_lines(output: int, process_id: int) -> None:
    with open(output, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            print(f"[{process_id}] {line}", end="", flush=True)


def _watch(children: Sequence[ChildProcess], signals: list[int], drain_timeout: float) -> None:
    """Waits for a signal or the first end, and then for all ends as long as they may take. Passes signals on."""
    while not signals and all(child.status is None for child in children):
        time.sleep(_POLL_S)
    deadline = time.monotonic() + (drain_timeout if signals else _END_S)
    if not signals and any(child.status for child in children):
        signals.append(signal.SIGTERM)  # after an end with status 0 the instance drains already
    sent = 0
    while any(child.status is None for child in children) and time.monotonic() < deadline:
        for _ in signals[sent:]:
            for child in children:
                child.signal(signal.SIGTERM)
            sent += 1
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
