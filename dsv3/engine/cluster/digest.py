"""Digests of what must be equal in all processes: the results of steps, and the order of collectives in programs.

Processes that launch two collectives of one communicator in different orders hang, or exchange wrong data. XLA may
schedule two independent collectives in either order, and each process compiles for itself. `tools.plan.launch_order`
shows that one program has the same order on all of its devices.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dsv3.config.options import LEADER
from dsv3.engine.device.programs import Programs

_log = logging.getLogger("dsv3.cluster")
_DIGEST_BYTES = 16
_COLLECTIVE_BYTES = 4
_KINDS = "(?:ragged-)?all-to-all|all-reduce|all-gather|reduce-scatter|collective-(?:permute|broadcast)|send|recv"
_COLLECTIVE = re.compile(rf" = (\S.*?) ((?:{_KINDS})(?:-start)?)\(")
_AMONG = re.compile(r"\b(?:replica_groups|source_target_pairs)=.*?(?=, \w+=|$)")
_OF = re.compile(r'\bop_name="([^"]*)"')
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
_RUNS = re.compile(r"\b(?:calls|body|to_apply)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_KERNEL = "backend_config="  # behind it stands up to 100 kB of a kernel's program


def chained(last: bytes, number: int, results: Iterable[np.ndarray]) -> bytes:
    """Returns the digest of all results so far: of those up to the digest `last`, and of step `number`."""
    total = hashlib.sha256(last + number.to_bytes(8, "little"))
    for array in results:
        total.update(np.ascontiguousarray(array))
    return total.digest()[:_DIGEST_BYTES]


class StepDigests:
    """Compares the leader's digests with the followers', in any order of arrival. Thread-safe."""

    def __init__(self, followers: Iterable[int]) -> None:
        self._followers = frozenset(followers)
        self._lock = threading.Lock()
        self._deadlines_from = 0.0
        self._mine: dict[int, tuple[bytes, float]] = {}  # by step: the leader's digest, and when it came
        self._theirs: dict[int, dict[int, bytes]] = {}  # by step and process

    def add(self, process_id: int, number: int, digest: bytes) -> int | None:
        """Adds a process's digest; returns a process that differs from the leader, None if none does so far."""
        with self._lock:
            if process_id == LEADER:
                self._mine[number] = digest, time.monotonic()
            else:
                self._theirs.setdefault(number, {})[process_id] = digest
            return self._compare(number)

    def overdue(self, before_s: float) -> tuple[int, int] | None:
        """Returns a late process and the oldest step that it has not reported, None if none is late.

        The leader has reported that step before `before_s`, a time on the monotonic clock.
        """
        with self._lock:
            for number, (_, since) in self._mine.items():
                missing = self._followers - self._theirs.get(number, {}).keys()
                if missing and max(since, self._deadlines_from) < before_s:
                    return min(missing), number
        return None

    def reset_deadlines(self) -> None:
        """Resets the report deadline of all followers."""
        self._deadlines_from = time.monotonic()

    def _compare(self, number: int) -> int | None:
        mine, theirs = self._mine.get(number), self._theirs.get(number, {})
        if mine is None:
            return None
        wrong = next((process for process, digest in theirs.items() if digest != mine[0]), None)
        if wrong is None and len(theirs) == len(self._followers):
            del self._mine[number]
            self._theirs.pop(number, None)  # absent without followers
        return wrong


Orders = Mapping[str, Sequence[str]]
"""By program: its collectives in the order of their launches."""


def collective_orders(programs: Programs) -> Orders:
    """Returns the order of each program whose text is available; all must be compiled."""
    started = time.monotonic()
    named = {"-".join(map(str, key)): programs.get(key) for key in programs.keys()}  # noqa: SIM118
    found = {name: collective_order(name, program) for name, program in named.items()}
    orders = {name: order for name, order in found.items() if order is not None}
    seconds, number = time.monotonic() - started, sum(map(len, orders.values()))
    _log.info("order of collectives: read %d in %d programs in %.2f s", number, len(orders), seconds)
    return orders


def order_digests(orders: Orders) -> dict[str, bytes]:
    """Returns by program what is sent to the leader: four bytes of each collective's digest, concatenated."""
    return {name: b"".join(map(_short, order)) for name, order in orders.items()}


def first_difference(mine: Orders, theirs: Mapping[str, bytes]) -> tuple[str, int] | None:
    """Returns the program, and the index, of the first collective that differs from those of another process.

    Programs that only one of the two can read are not compared. None where all others have one order.
    """
    for name in mine.keys() & theirs.keys():
        digests = [theirs[name][i : i + _COLLECTIVE_BYTES] for i in range(0, len(theirs[name]), _COLLECTIVE_BYTES)]
        own = list(map(_short, mine[name]))
        if own != digests:
            same = zip(own, digests, strict=False)
            return name, next((i for i, (a, b) in enumerate(same) if a != b), min(len(own), len(digests)))
    return None


def _short(collective: str) -> bytes:
    return hashlib.sha256(collective.encode()).digest()[:_COLLECTIVE_BYTES]


def collectives(text: str) -> list[str]:
    """Returns the collectives in the text of a scheduled program, in order: kind, shape, devices and operation of each.

    Those of a loop's body, or of a branch, appear once. `text` is what `as_text()` of a compiled program returns.
    """
    computations, entry = _computations(text)
    return list(_walk(computations, entry))


def collective_order(name: str, program: Callable[..., Any]) -> list[str] | None:
    """Returns the collectives of a compiled program in order; None, with a warning, where it has no text."""
    try:
        return collectives(program.as_text())  # type: ignore[attr-defined]
    except Exception as error:
        _log.warning("the order of collectives in %s is not compared among processes: %s", name, error)
        return None


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation that launch a collective or call a computation, and the entry's name."""
    computations, lines, entry = dict[str, list[str]](), list[str](), ""
    for line in text.splitlines():
        if line.startswith("  "):
            line = line.partition(_KERNEL)[0] if len(line) > 2**12 else line
            if _COLLECTIVE.search(line) or _RUNS.search(line) or _BRANCHES.search(line):
                lines.append(line)
        elif start := _COMPUTATION.match(line):
            computations[start[2]] = lines = []
            entry = start[2] if start[1] else entry
    if not entry:
        raise ValueError(f"not a scheduled program: {text[:100]!r}")
    return computations, entry


def _walk(computations: dict[str, list[str]], name: str) -> Iterator[str]:
    for line in computations[name]:
        if found := _COLLECTIVE.search(line):
            among, of = _AMONG.search(line), _OF.search(line)
            yield " ".join((found[2], found[1], among[0] if among else "", of[1] if of else "")).rstrip()
            continue
        branches = _BRANCHES.search(line)
        for called in (*_RUNS.findall(line), *(re.findall(r"[\w.-]+", branches[1]) if branches else ())):
            yield from _walk(computations, called)
