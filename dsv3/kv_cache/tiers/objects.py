"""Values as objects of a bucket, through tensorstore's key-value drivers: s3, gcs, memory.

An object is a header and its payload. A bucket has rules of its own for what is old; nothing is evicted here.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from dsv3.kv_cache.events.record import Watch
from dsv3.kv_cache.keys import Key
from dsv3.kv_cache.tiers.value import HEADER_BYTES, header_of, read_header

_DEADLINE_S = 30.0  # of a batch


class Objects:
    """Values of `value_bytes` bytes under `address`, a URL or the fields of a tensorstore driver.

    `watch` hears what this process writes and removes. Raises OSError where the address cannot be opened, or does not
    answer a batch within 30 s.
    """

    def __init__(self, address: str | dict[str, str], value_bytes: int, watch: Watch | None = None) -> None:
        self._value_bytes, self._watch = value_bytes, watch
        self.evictions = self.damaged = self.bytes_held = 0
        self._objects: Any = _answers([ts.KvStore.open(address)])[0]

    def count(self, keys: Sequence[Key]) -> int:
        """Returns how many of `keys` are there, from the first on; asks for one byte of each."""
        answers = _answers(self._objects.read(_name(key), byte_range=slice(0, 1)) for key in keys)
        return sum(1 for _ in itertools.takewhile(lambda answer: answer.state == "value", answers))

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        """Reads values into the rows of `out`; returns how many there are, from the first on, that verify."""
        answers = _answers(self._objects.read(_name(key)) for key in keys)
        fits = [self._take(key, answer, row) for key, answer, row in zip(keys, answers, out, strict=True)]
        return sum(1 for _ in itertools.takewhile(bool, fits))

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        """Writes values; returns how many."""
        values = (header_of(key, row).pack() + row.tobytes() for key, row in zip(keys, payloads, strict=True))
        written = len(_answers(self._objects.write(_name(key), value) for key, value in zip(keys, values, strict=True)))
        self.bytes_held += written * (HEADER_BYTES + self._value_bytes)
        if self._watch is not None:
            self._watch.stored(list(keys))
        return written

    def delete(self, keys: Sequence[Key]) -> None:
        """Removes values."""
        if self._watch is not None:
            self._watch.removed(list(keys))
        _answers(self._objects.write(_name(key), None) for key in keys)

    def _take(self, key: Key, answer: Any, out: np.ndarray) -> bool:
        """Copies an object's payload to `out`; False where there is none that verifies; a damaged one is removed."""
        if answer.state != "value":
            return False
        header, payload = read_header(answer.value[:HEADER_BYTES]), answer.value[HEADER_BYTES:]
        if header is None or len(payload) != out.size:
            return self._drop(key)
        out[:] = np.frombuffer(payload, np.uint8)
        return header.covers(key, out) or self._drop(key)

    def _drop(self, key: Key) -> bool:
        self.damaged += 1
        self.delete([key])
        return False


def _name(key: Key) -> str:
    return f"{key.hex()}.kv"


def _answers(futures: Iterable[Any]) -> list[Any]:
    """Waits for all of a batch; raises OSError where one fails or the batch takes too long."""
    deadline = time.time() + _DEADLINE_S
    try:
        return [future.result(deadline=deadline) for future in list(futures)]
    except TimeoutError:
        raise OSError(f"the object store has not answered within {_DEADLINE_S:.0f} s") from None
    except (ValueError, RuntimeError) as error:
        raise OSError(f"the object store has failed: {error}") from None
