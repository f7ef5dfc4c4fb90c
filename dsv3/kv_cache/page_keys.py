"""Page keys are block hashes (vLLM's word), and page headers with checksums; imports no jax.

Equal prefixes have equal keys in every process. The block hash of a page is sha256 over the key of the page before it
and its own token ids. The chain starts at a root that covers everything else the content depends on
(`dsv3.config.identity`). Weaker hashes let a crafted prompt read another tenant's pages (GHSA-rm76 in vLLM).

A page's payload, its bytes in all layers, is the same on the device, in every tier and on the wire. Outside of a device
a header precedes it, with the key and checksums. A payload that does not verify is a miss.
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
"""Bytes; payloads begin at a multiple of it, for direct reads and shared memory."""

_MAGIC = b"dsv3page"
_VERSION = 1
_FIELDS = struct.Struct("<8sQ32sQQ16s")
_HEADER_CHECKSUM = struct.Struct("<Q")


def root_key(fingerprint: str, salt: str) -> Key:
    """Returns the start of a chain; fields are length-prefixed, so that no two different pairs give the same bytes."""
    digest = hashlib.sha256()
    for field in (fingerprint, salt):
        raw = field.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def root_for_weights(root: Key, weights: str) -> Key:
    """Returns the root in place of `root` under other weights than those of the start; "" are these."""
    return hashlib.sha256(b"weights" + root + weights.encode()).digest() if weights else root


def extend_keys(root: Key, keys: list[Key], tokens: np.ndarray, page_size: int) -> None:
    """Computes the block hashes of `tokens` ([n] int32) and appends to `keys` until it covers every full page."""
    keys += next_keys(keys[-1] if keys else root, tokens[len(keys) * page_size :], page_size)


def next_keys(key: Key, tokens: np.ndarray, page_size: int) -> list[Key]:
    """Returns the block hashes of every full page of `tokens` ([n] int32) behind the page, or the root, of `key`."""
    raw = np.ascontiguousarray(tokens[: len(tokens) // page_size * page_size], "<i4").tobytes()
    size, keys = 4 * page_size, []
    for start in range(0, len(raw), size):
        key = hashlib.sha256(key + raw[start : start + size]).digest()
        keys.append(key)
    return keys


_WINDOW = b"window"


def window_keys(key: Key, parts: int) -> list[Key]:
    """Returns the keys of the `parts` in which tiers and instances have the window page of a page's key."""
    digests = (hashlib.sha256(_WINDOW + key + i.to_bytes(2, "little")).digest() for i in range(parts))
    return [_WINDOW + digest[: KEY_BYTES - len(_WINDOW)] for digest in digests]


def is_window_key(key: Key) -> bool:
    """Returns whether a key is that of a part of a window page."""
    return key.startswith(_WINDOW)


class Header(NamedTuple):
    """The header of a payload of `length` bytes. `order` numbers writes, where their order matters."""

    key: Key
    length: int
    checksum: bytes
    order: int = 0

    def pack(self) -> bytes:
        """Returns the header's `HEADER_BYTES` bytes."""
        fields = _FIELDS.pack(_MAGIC, _VERSION, self.key, self.length, self.order, self.checksum)
        return (fields + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))).ljust(HEADER_BYTES, b"\0")

    def covers(self, key: Key, payload: np.ndarray) -> bool:
        """Returns whether `payload` (uint8 `[n]`) is the one of `key` that this header was written for."""
        return self.key == key and self.length == payload.size and self.checksum == checksum(payload)


def make_header(key: Key, payload: np.ndarray, order: int = 0) -> Header:
    """Returns the header of a payload, uint8 `[n]`."""
    return Header(key, payload.size, checksum(payload), order)


def read_header(raw: bytes) -> Header | None:
    """Parses a header; None where it is damaged or of another version."""
    if len(raw) < HEADER_BYTES:
        return None
    fields = raw[: _FIELDS.size]
    (header_checksum,) = _HEADER_CHECKSUM.unpack_from(raw, _FIELDS.size)
    magic, version, key, length, order, digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION or header_checksum != xxhash.xxh3_64_intdigest(fields):
        return None
    return Header(key, length, digest, order)


def checksum(payload: np.ndarray) -> bytes:
    """Returns the 16-byte XXH3 checksum of a payload; a cryptographic digest would be slower than a fast disk."""
    return xxhash.xxh3_128_digest(payload)


def aligned(size: int) -> int:
    """Returns `size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT
