"""Reads model directories, bounded and never from a pipe or a device, and secrets that nobody else may read."""

import errno
import json
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from typing import Any

# DeepSeek-V3's index of tensors, the largest JSON file of a model directory that is read here, has 9 MB.
MAX_JSON_BYTES = 100_000_000
MAX_SECRET_BYTES = 4096
IS_POINTER = "a git-lfs pointer in the place of the file: run git lfs pull there"


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a regular file, or a link to one, to be read; raises OSError for whatever else has the name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_json(path: str | os.PathLike[str]) -> Any:
    """Returns what a JSON file holds; raises OSError, and ValueError for what is no JSON or too much of it."""
    with open_regular(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
    return parse_json(text)


def is_pointer(start: bytes) -> bool:
    """Returns whether a file begins as a pointer of git-lfs does, which a clone without git-lfs has for large files."""
    return start.startswith(b"version https://git-lfs.github.com/spec/")


def parse_json(text: bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Returns the value of a JSON text; raises ValueError however malformed it is."""
    if is_pointer(text):
        raise ValueError(IS_POINTER)
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_secret(path: str | os.PathLike[str], max_bytes: int = MAX_SECRET_BYTES) -> bytes:
    """Returns the content of a file that nobody else may read or change.

    Raises OSError for one that cannot be read, ValueError for one that others may open or that is too long.
    """
    with open(path, "rb") as file:  # a pipe is fine: shells make them of a command's output
        status = os.fstat(file.fileno())
        secret = file.read(max_bytes + 1)
    if is_exposed(status.st_mode, is_own=status.st_uid == os.geteuid()):
        raise ValueError(f"{path}: others than its owner may open it; chmod go-rwx it")
    if len(secret) > max_bytes:
        raise ValueError(f"{path}: more than {max_bytes} bytes")
    return secret


def is_exposed(mode: int, *, is_own: bool) -> bool:
    """Returns whether others may read or change a file that we can read.

    Its group may read a file of somebody else, and no more: that is how Kubernetes gives a secret to a process that is
    not root (`fsGroup`).
    """
    allowed = stat.S_IRWXU if is_own else stat.S_IRWXU | stat.S_IRGRP
    return bool(stat.S_IMODE(mode) & 0o777 & ~allowed)


def sync(path: str | os.PathLike[str]) -> None:
    """Returns when a file's bytes, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
