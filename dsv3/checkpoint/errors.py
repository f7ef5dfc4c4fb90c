"""The one error of this package, and the message that shows many findings at once."""

import os
from collections.abc import Mapping, Sequence

SHOWN = 4


class CheckpointError(ValueError):
    """A checkpoint directory does not hold the configured model; the message names the file and the tensor."""


def raise_findings(where: str | os.PathLike[str], findings: Mapping[str, Sequence[str]]) -> None:
    """Raises one `CheckpointError` that counts the findings of each kind and shows the first few, if there are any."""
    lines = [f"  {kind} ({len(items)}): {_shorten(items)}" for kind, items in findings.items() if items]
    if lines:
        raise CheckpointError("\n".join([f"{os.fspath(where)} does not hold the configured model:", *lines]))


def _shorten(items: Sequence[str]) -> str:
    shown = "; ".join(items[:SHOWN])
    return shown if len(items) <= SHOWN else f"{shown}; and {len(items) - SHOWN} more"
