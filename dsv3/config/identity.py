"""The identity of a cache: what pages depend on besides tokens and salt. Imports no jax."""

import dataclasses
import hashlib
import json
from typing import Any

LAYOUT_VERSION = 2
"""Version of the page format."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheIdentity:
    """Everything that two engines must have in common to read each other's pages.

    `weights` and `tokenizer` are digests of their files, `model` that of the served configuration (layers, rotation,
    MTP module). `cache_dtype` is the storage of latents; `compute_dtype`, `fp8`, `int4` and `fp4` determine their
    values. The cache's groups, and so the bytes of a page, follow from `model`, `cache_dtype` and `page_size`.
    """

    weights: str
    tokenizer: str
    model: str
    cache_dtype: str
    compute_dtype: str
    fp8: str
    int4: str = "keep"
    fp4: str = "fp8"
    page_size: int
    layout_version: int = LAYOUT_VERSION

    @property
    def text(self) -> str:
        return _text(self)


def fingerprint(identity: str) -> str:
    """Returns the sha256, in hex, of a `CacheIdentity.text`."""
    return hashlib.sha256(identity.encode()).hexdigest()


def model_identity(cfg: Any) -> str:
    """Returns the digest of a model's configuration (a dataclass)."""
    return fingerprint(_text(cfg))


def _text(record: Any) -> str:
    return json.dumps(dataclasses.asdict(record), sort_keys=True, separators=(",", ":"))
