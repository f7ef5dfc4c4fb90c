"""Several processes of `launch.serve` on this host, as those of one node of an instance.

Lines of output begin with the number of their process. SIGTERM drains the instance. When a process fails, the others
get SIGTERM. What still runs is killed, `drain_timeout` seconds after a signal and 30 s after the first end of a
process.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

from dsv3.processes.child import ChildProcess

DRAIN_S = 240.0
_SERVE = (sys.executable, "-m", "launch.serve")
_POLL_S = 0.25
_END_S = 30.0
_READ_S = 5.0  # for the last lines of processes that have ended


def places(arguments: Sequence[str], num_nodes: int, node_rank: int, processes_per_node: int) -> list[list[str]]:
    """Returns the flags of each process of a node: those of all, and its place. A single process needs no place."""
    total, first = num_nodes * processes_per_node, node_rank * processes_per_node
    if total == 1:
        return [list(arguments)]
    shared = [*arguments, f"--num_processes={total}", f"--processes_per_node={processes_per_node}"]
    return [[*shared, f"--process_id={first + i}"] for i in range(processes_per_node)]


def serve(flags: Sequence[Sequence[str]], first: int = 0, drain_timeout: float = DRAIN_S) -> int:
    """Starts a process for each list of flags, the first of which is number `first`, and waits until all have ended.

    Returns the exit status: 0 where all ended with 0, otherwise 1.
    """
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: signals.append(received))
    children: list[ChildProcess] = []
    readers = []
    try:
        for place, each in enumerate(flags):
            child, reader = _start([*_SERVE, *each], first + place)
            children.append(child)
            readers.append(reader)
        _watch(children, signals, drain_timeout)
    finally:
        statuses = [child.end() for child in children]
    for reader in readers:
        reader.join(_READ_S)
    print(f"exit statuses of processes {first} to {first + len(flags) - 1}: {statuses}", flush=True)
    return int(any(status != 0 for status in statuses))


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
