"""Reads files of model directories (regular files of bounded size) and files with secrets (checked permissions).

Replaces files whole.
"""

import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

# The largest JSON file that a server reads, DeepSeek-V3's tensor index, has 9 MB.
MAX_JSON_BYTES = 100_000_000
MAX_SECRET_BYTES = 4096
MIN_KEY_BYTES = 32
HOW_TO_MAKE_A_KEY = "make one with: (umask 077; head -c 48 /dev/urandom | base64 > cluster.key)"
IS_POINTER = "this file is a git-lfs pointer: run git lfs pull in its directory"


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a regular file, or a link to one, for reading; raises OSError for any other kind of file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_json(path: str | os.PathLike[str]) -> Any:
    """Returns the value of a JSON file; raises OSError, and ValueError if it is malformed or above `MAX_JSON_BYTES`."""
    with open_regular(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
    return parse_json(text)


def is_pointer(start: bytes) -> bool:
    """Returns whether a file begins like a git-lfs pointer, which a clone without git-lfs has for large files."""
    return start.startswith(b"version https://git-lfs.github.com/spec/")


def parse_json(text: bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Returns the value of a JSON text; raises ValueError for any malformed text."""
    if is_pointer(text):
        raise ValueError(IS_POINTER)
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_secret(path: str | os.PathLike[str], max_bytes: int = MAX_SECRET_BYTES) -> bytes:
    """Returns the content of a file that no other user may read or change.

    Raises OSError if it cannot be read, ValueError if its permissions are too open or it has more than `max_bytes`.
    """
    with open(path, "rb") as file:  # may be a pipe: a shell's <(command)
        status = os.fstat(file.fileno())
        secret = file.read(max_bytes + 1)
    if is_exposed(status.st_mode, is_own=status.st_uid == os.geteuid()):
        raise ValueError(f"{path}: other users may open it; run chmod go-rwx on it")
    if len(secret) > max_bytes:
        raise ValueError(f"{path}: it has more than {max_bytes} bytes, the limit of a file with keys")
    return secret


def read_key(path: str | os.PathLike[str], option: str = "cluster_key_file") -> bytes:
    """Returns the secret in a file without surrounding whitespace.

    Raises ValueError if the file cannot be read, is readable by others, or is shorter than `MIN_KEY_BYTES`. The text
    names the `option` that gave the path and a command that makes a key.
    """
    try:
        key = read_secret(path).strip()
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; {HOW_TO_MAKE_A_KEY}") from None
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(
            f"{option} {path}: {len(key)} bytes, at least {MIN_KEY_BYTES} are required; {HOW_TO_MAKE_A_KEY}"
        )
    return key


def read_api_key(path: str | os.PathLike[str], option: str) -> str:
    """Returns the API key in a file; raises ValueError, which names `option` and contains no part of the key."""
    try:
        key = read_secret(path).decode("latin-1").strip()  # an error of decoding would show a byte of the key
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {error}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{option}: expected one key, of printable ASCII without blanks")
    return key


def is_exposed(mode: int, *, is_own: bool) -> bool:
    """Returns whether a readable file's mode lets other users read or change it.

    A file of another owner may be readable by its group: so Kubernetes gives a secret to a process that is not root
    (`fsGroup`).
    """
    allowed = stat.S_IRWXU if is_own else stat.S_IRWXU | stat.S_IRGRP
    return bool(stat.S_IMODE(mode) & 0o777 & ~allowed)


def replace_file(path: Path, content: bytes, *, mode: int = 0o666, synced: bool = False) -> None:
    """Writes a file under a temporary name, and renames it: a reader finds the old content or the new one, whole.

    The file gets `mode`, less the process's umask. Unless it is `synced`, it may be incomplete after a loss of power.
    Raises OSError, and leaves no temporary file.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.touch(mode)
        part.write_bytes(content)
        if synced:
            sync(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def sync(path: str | os.PathLike[str]) -> None:
    """Flushes a file's bytes, or a directory's entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
