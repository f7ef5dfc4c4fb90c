"""Reads files of other people's making: bounded, and never from a pipe or a device, which may block for ever."""

import errno
import json
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO

# DeepSeek-V3's index of tensors, the largest JSON file of a model directory that is read here, has 9 MB.
MAX_JSON_BYTES = 100_000_000


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
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


def parse_json(text: bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Returns the value of a JSON text; raises ValueError however malformed it is."""
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
