"""Gives a process a machine with an NVIDIA driver, which jax does not reach: put this directory in front on PYTHONPATH.

Python imports this before anything else. The file in which the kernel's module says its version is there to be read.
"""

import io
import os

_FILE = "/proc/driver/nvidia/version"
_TEXT = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n"


def _open(file, *arguments, _real=io.open, **more):
    if isinstance(file, str | os.PathLike) and os.fspath(file) == _FILE:
        return io.StringIO(_TEXT)
    return _real(file, *arguments, **more)


io.open = _open
