"""Names pages by their content: equal prefixes have equal keys in every process; imports no jax.

The key of a page is sha256 over the key of the page before it and its own tokens. The chain starts at a root that
covers everything else the content depends on (`dsv3.config.identity`). Weaker hashes let a crafted prompt read
another tenant's pages (GHSA-rm76 in vLLM).
"""

import hashlib

import numpy as np

Key = bytes
KEY_BYTES = 32


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
