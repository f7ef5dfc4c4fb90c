"""Compiled programs that nobody has used for long. Imports no jax.

Each version of the code, of jax and of the model leaves programs of its own in the compilation cache's directory. To
use a file is to set its time. What an instance needs it has used before it removes anything, so a server that starts
again after months still has its programs.
"""

import contextlib
import time
from pathlib import Path

KEPT_S = 90 * 24 * 3600.0
_PATTERNS = ("programs-*/*", "instance-*/*/*", "instance-*/*", "programs-*", "instance-*")


def forget_unused(root: Path) -> None:
    """Removes programs in `root` that have not been used for `KEPT_S`, and the directories that have become empty."""
    for pattern in _PATTERNS:
        for path in root.glob(pattern):
            with contextlib.suppress(OSError):  # not empty, or gone, or another's
                if _age(path) > KEPT_S and path.suffix != ".key":
                    (path.rmdir if path.is_dir() else path.unlink)()


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime
