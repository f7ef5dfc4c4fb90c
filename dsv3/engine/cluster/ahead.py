"""Has programs compiled for a gang with one node fewer, ahead of the day when it starts. Imports no jax.

Each process of a gang that serves starts this one beside it: `python -m dsv3.engine.cluster.ahead`, with an `Order` on
its standard input, whose end is its own end too. It plays the smaller gang on its own host: one process
(`dsv3.engine.cluster.rehearsal`) compiles, and keeps what it has compiled where the real one will look. The others are
there to be counted, since jax must know of all devices.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dsv3.config.options import ClusterOptions, EngineOptions
from dsv3.engine.stored import vouches
from dsv3.logs import configure_logging

_log = logging.getLogger("dsv3.cluster")
MOST_S = 6 * 3600.0
_MOST_PROCESSES = 8  # each of those played takes 150 MB
_LEAST_NICE = 19
_END_S = 5.0


class Order(msgspec.Struct, frozen=True):
    """Compile for a gang of `size` processes, of those that are `given`, as each of `places` among them.

    `load` is "module:function" of what loads the parts of the engine. `done` is written when all is there. `fallbacks`
    are the operations that do not take the device's kernels, each with its backend.
    """

    given: ClusterOptions
    size: int
    places: tuple[int, ...]
    model_dir: str
    engine: EngineOptions
    load: str
    done: str
    fallbacks: dict[str, str] = {}


_order = msgspec.json.Decoder(Order)


def places(process_id: int, size: int, processes_per_node: int = 1) -> tuple[int, ...]:
    """Returns the places that a process may have in a gang of `size` after another node has gone.

    Those behind the one that has gone move up. The leader's node stays, and no other takes its place.
    """
    first = processes_per_node  # of the second node
    if process_id < first:
        return (process_id,)
    return tuple(place for place in (process_id, process_id - first) if first <= place < size)


def marker(directory: Path, key: bytes, what: str) -> str:
    """Returns the file in `directory` that says that all programs of `what` are there, signed with `key`."""
    return str(directory / f"ahead-{hmac.digest(key, what.encode(), hashlib.sha256).hex()[:16]}")


def begin(order: Order) -> None:
    """Starts a process that carries the order out in time that nobody else wants, unless that has been done.

    It ends when this process does.
    """
    if not order.places or order.size > _MOST_PROCESSES or vouches(Path(order.done)):
        return
    try:
        process = _start("ahead")
    except OSError as error:
        _log.warning("programs for %d processes are not compiled ahead: %s", order.size, error)
        return
    give_way(process.pid)
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()
    threading.Thread(target=process.wait, name="ahead", daemon=True).start()  # and holds its standard input open


def give_way(pid: int) -> None:
    """Gives a process, which has one thread yet, only the time that no other process wants.

    Where memory runs out it goes first.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _LEAST_NICE)
        if hasattr(os, "SCHED_IDLE"):  # Linux; elsewhere the niceness is all there is
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
            Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def end_with_input(descriptor: int, end: Callable[[], None]) -> None:
    """Calls `end`, on a thread, as soon as nobody holds the other end of a pipe any more."""

    def wait() -> None:
        while os.read(descriptor, 4096):
            pass
        end()

    threading.Thread(target=wait, name="input", daemon=True).start()


def main() -> int:
    """Carries out the order; returns 0 when all programs are there."""
    configure_logging()
    line = _line(sys.stdin.fileno())
    if not line:  # who has started this has gone already
        return 1
    order = _order.decode(line)
    end_with_input(sys.stdin.fileno(), lambda: os._exit(1))
    deadline = time.monotonic() + MOST_S
    for place in order.places:
        if not _compiled(order, place, deadline):
            _log.warning("programs for %d processes could not all be compiled ahead", order.size)
            return 1
    Path(order.done).touch()
    _log.info("programs for a gang of %d are compiled ahead", order.size)
    return 0


def _compiled(order: Order, place: int, deadline: float) -> bool:
    """Plays the gang until the process at `place` has compiled everything; returns whether it has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        coordinator = f"127.0.0.1:{listener.getsockname()[1]}"
    text = msgspec.json.encode(order).decode()
    with contextlib.ExitStack() as stack:
        played = [
            stack.enter_context(_playing("rehearsal", text, coordinator, str(i), str(int(i == place))))
            for i in range(order.size)
        ]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return played[place].wait(max(0.0, deadline - time.monotonic())) == 0
    return False


@contextlib.contextmanager
def _playing(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process, which ends with the block."""
    process = _start(*arguments)
    try:
        yield process
    finally:
        process.kill()
        process.wait(_END_S)


def _start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"dsv3.engine.cluster.{name}", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def _line(descriptor: int) -> bytes:
    """Returns what comes up to the first end of a line, or up to the end."""
    text = b""
    while not text.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        text += byte
    return text


if __name__ == "__main__":
    sys.exit(main())
