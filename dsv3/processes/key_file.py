"""The secret that several processes share, in a file; imports no jax."""

import os
from pathlib import Path

from dsv3.files import read_secret

MIN_KEY_BYTES = 32
_HOW_TO_MAKE_A_KEY = "make one with: (umask 077; head -c 48 /dev/urandom | base64 > cluster.key)"


def read_key(path: str | os.PathLike[str], option: str = "cluster_key_file") -> bytes:
    """Returns the secret in a file without surrounding blanks.

    Raises ValueError for a file that cannot be read, that others may read, or that is too short; says how to make one,
    and names the `option` that gave the path.
    """
    try:
        key = read_secret(path).strip()
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; {_HOW_TO_MAKE_A_KEY}") from None
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(
            f"{option} {path}: {len(key)} bytes, at least {MIN_KEY_BYTES} are needed; {_HOW_TO_MAKE_A_KEY}"
        )
    return key


def key_path(text: str) -> str:
    """Makes a path absolute, so that a child process with another working directory finds the same file."""
    return str(Path(text).absolute())
