"""Names pages by their content, and proves a page's bytes by its name; imports no jax.

Equal prefixes have equal keys in every process. The key of a page is sha256 over the key of the page before it and its
own tokens. The chain starts at a root that covers everything else the content depends on (`dsv3.config.identity`).
Weaker hashes let a crafted prompt read another tenant's pages (GHSA-rm76 in vLLM).

A page's value, its bytes in all layers, is the same on the device, in every tier and on the wire. Outside of a device a
header stands before it, which says whose value it is. What does not verify is a miss, never an answer.
"""

import hashlib
import struct
from typing import NamedTuple

import numpy as np
import xxhash

Key = bytes
KEY_BYTES = 32
HEADER_BYTES = 128

ALIGNMENT = 4096
"""Bytes; direct reads and shared memory want payloads to begin at a multiple of it."""

_MAGIC = b"dsv3page"
_VERSION = 1
_FIELDS = struct.Struct("<8sQ32sQQ16s")
_PROOF = struct.Struct("<Q")


def root_key(fingerprint: str, salt: str) -> Key:
    """Returns the start of a chain; fields are length-prefixed, so that no two different pairs give the same bytes."""
    digest = hashlib.sha256()
    for field in (fingerprint, salt):
        raw = field.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def extend_keys(root: Key, keys: list[Key], tokens: np.ndarray, page_size: int) -> None:
    """Appends to `keys` until it covers every full page of `tokens` ([n] int32)."""
    keys += keys_behind(keys[-1] if keys else root, tokens[len(keys) * page_size :], page_size)


def keys_behind(key: Key, tokens: np.ndarray, page_size: int) -> list[Key]:
    """Returns the keys of every full page of `tokens` ([n] int32) that follow the page, or the root, of `key`."""
    raw = np.ascontiguousarray(tokens[: len(tokens) // page_size * page_size], "<i4").tobytes()
    size, keys = 4 * page_size, []
    for start in range(0, len(raw), size):
        key = hashlib.sha256(key + raw[start : start + size]).digest()
        keys.append(key)
    return keys


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
