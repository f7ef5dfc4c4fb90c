"""Reads the secret that the processes of an instance share; imports no jax."""

import os
from pathlib import Path

from dsv3.files import read_secret

MIN_KEY_BYTES = 32
_HOW_TO_MAKE_A_KEY = "make one with: (umask 077; head -c 48 /dev/urandom | base64 > cluster.key)"


def read_key(path: str | os.PathLike[str], option: str = "cluster_key_file") -> bytes:
    """Returns the secret in a file without surrounding whitespace.

    Raises ValueError if the file cannot be read, is readable by others, or is shorter than `MIN_KEY_BYTES`. The text
    names the `option` that gave the path and a command that makes a key.
    """
    try:
        key = read_secret(path).strip()
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; {_HOW_TO_MAKE_A_KEY}") from None
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(
            f"{option} {path}: {len(key)} bytes, at least {MIN_KEY_BYTES} are required; {_HOW_TO_MAKE_A_KEY}"
        )
    return key


def key_path(text: str) -> str:
    """Returns an absolute path, which child processes with another working directory can open."""
    return str(Path(text).absolute())
