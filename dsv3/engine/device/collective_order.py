"""The order in which a compiled program launches its collectives, for processes that compile for themselves to compare.

Processes that launch two collectives of one communicator in different orders wait for each other for ever, or exchange
what is not meant for each other. XLA may choose either order of two that do not depend on each other. That one program
has the same order on all of its devices is shown by `tools.plan.launch_order`.
"""

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

_log = logging.getLogger(__name__)
_KINDS = "(?:ragged-)?all-to-all|all-reduce|all-gather|reduce-scatter|collective-(?:permute|broadcast)|send|recv"
_COLLECTIVE = re.compile(rf" = (\S.*?) ((?:{_KINDS})(?:-start)?)\(")
_AMONG = re.compile(r"\b(?:replica_groups|source_target_pairs)=.*?(?=, \w+=|$)")
_OF = re.compile(r'\bop_name="([^"]*)"')
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) .*\{$")
_RUNS = re.compile(r"\b(?:calls|body|to_apply)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_KERNEL = "backend_config="  # behind it stands up to 100 kB of a kernel's program


def collectives(text: str) -> list[str]:
    """Returns the collectives in the text of a scheduled program, in order: kind, shape, devices and operation of each.

    Those of a loop's body, or of a branch, stand once. `text` is what `as_text()` of a compiled program returns.
    """
    computations, entry = _computations(text)
    return list(_walk(computations, entry))


def order_of(name: str, program: Callable[..., Any]) -> list[str] | None:
    """Returns the collectives of a compiled program in order; None, with a warning, where its text cannot be had."""
    try:
        return collectives(program.as_text())  # type: ignore[attr-defined]
    except Exception as error:
        _log.warning("the order of the collectives of %s is not compared among processes: %s", name, error)
        return None


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation that launch a collective or run another computation, and the first one."""
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
