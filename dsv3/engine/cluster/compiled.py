"""Compiled programs of one process of an instance, kept for its next start.

jax's own cache does not serve several processes: only process 0 writes it, and on a CPU each process has keys of its
own. It also needs every program traced again. Here a start with the same code, versions, options and limits finds its
executables, and neither traces nor compiles. jax's cache is off meanwhile: an executable that came out of it is not
whole when it is serialised once more (XLA:CPU, jax 0.12.0.1: "Function ... not found" when it runs).

`jax.experimental.serialize_executable` unpickles what it loads, so a file is read only if its MAC shows that a process
with the instance's key wrote it.
"""

import hashlib
import hmac
import logging
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from dsv3.engine.cluster.fingerprint import Fields
from dsv3.engine.compilation import default_cache_directory

_log = logging.getLogger("dsv3.cluster")
_MAC_BYTES = 32


class ProgramStore:
    """The programs of one process: `load` and `save` by name.

    `base` is the compilation cache's directory (None: the user's). `fields` are what programs depend on.
    """

    def __init__(self, base: str | None, key: bytes, fields: Fields, process_id: int, devices: Sequence[Any]) -> None:
        self._key = hmac.digest(key, b"compiled programs", hashlib.sha256)
        self._devices = devices
        self._hits = self._misses = 0
        root = Path(base or jax.config.jax_compilation_cache_dir or default_cache_directory())
        self._directory = root / f"instance-{_digest(fields)}" / f"process-{process_id}"
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def __str__(self) -> str:
        return f"{self._hits} of {self._hits + self._misses} programs from the last start"

    def load(self, name: str) -> Callable[..., Any] | None:
        """Returns the program, None if there is none that this process can use."""
        try:
            content = (self._directory / name).read_bytes()
            mac, body = content[:_MAC_BYTES], content[_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._mac(name, body)):
                raise ValueError("its MAC is wrong")
            executable, arguments, results = pickle.loads(body)
            program = serialize_executable.deserialize_and_load(
                executable, arguments, results, execution_devices=self._devices
            )
        except FileNotFoundError:
            self._misses += 1
            return None
        except Exception as error:
            self._misses += 1
            _log.warning("the stored program %s is not used: %s", name, error)
            return None
        self._hits += 1
        return program

    def save(self, name: str, program: Any) -> None:
        """Keeps a program; one that cannot be kept is compiled again next time."""
        part = self._directory / f".{name}.{os.getpid()}"
        try:
            body = pickle.dumps(serialize_executable.serialize(program))
            part.write_bytes(self._mac(name, body) + body)
            part.replace(self._directory / name)
        except Exception as error:
            _log.warning("the program %s is not kept for the next start: %s", name, error)

    def _mac(self, name: str, body: bytes) -> bytes:
        return hmac.digest(self._key, f"{self._directory}/{name}\0".encode() + body, hashlib.sha256)


def _digest(fields: Fields) -> str:
    text = "\n".join(f"{name}={value}" for name, value in sorted(fields.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
