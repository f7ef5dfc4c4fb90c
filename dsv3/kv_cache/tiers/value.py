"""A page outside of a device: the bytes of 64 tokens in all layers, and the header that proves which tokens they are.

The same bytes lie on the device, in every tier and on the wire. What does not verify is a miss, never an answer.
"""

import struct
from typing import NamedTuple

import numpy as np
import xxhash

from dsv3.kv_cache.keys import Key

HEADER_BYTES = 128
ALIGNMENT = 4096
"""Bytes; direct reads and shared memory want payloads to begin at a multiple of it."""

_MAGIC = b"dsv3page"
_VERSION = 1
_FIELDS = struct.Struct("<8sQ32sQQ16s")
_PROOF = struct.Struct("<Q")


class Header(NamedTuple):
    """What stands before a payload of `length` bytes. `order` is the number of the write, where somebody counts."""

    key: Key
    length: int
    checksum: bytes
    order: int = 0

    def pack(self) -> bytes:
        """Returns the header's `HEADER_BYTES` bytes."""
        fields = _FIELDS.pack(_MAGIC, _VERSION, self.key, self.length, self.order, self.checksum)
        return (fields + _PROOF.pack(xxhash.xxh3_64_intdigest(fields))).ljust(HEADER_BYTES, b"\0")

    def covers(self, key: Key, payload: np.ndarray) -> bool:
        """Returns whether `payload` (uint8 `[n]`) is the value of `key` that this header was written for."""
        return self.key == key and self.length == payload.size and self.checksum == checksum(payload)


def header_of(key: Key, payload: np.ndarray, order: int = 0) -> Header:
    """Returns the header of a payload, uint8 `[n]`."""
    return Header(key, payload.size, checksum(payload), order)


def read_header(raw: bytes) -> Header | None:
    """Returns the header that `raw` holds; None where it is none, damaged or of another version."""
    if len(raw) < HEADER_BYTES:
        return None
    fields = raw[: _FIELDS.size]
    (proof,) = _PROOF.unpack_from(raw, _FIELDS.size)
    magic, version, key, length, order, digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION or proof != xxhash.xxh3_64_intdigest(fields):
        return None
    return Header(key, length, digest, order)


def checksum(payload: np.ndarray) -> bytes:
    """Returns 16 bytes that damage changes: XXH3, since a cryptographic digest is slower than a fast disk."""
    return xxhash.xxh3_128_digest(payload)


def aligned(size: int) -> int:
    """Returns `size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
