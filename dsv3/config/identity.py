"""Names what a page's content depends on beside its tokens and its salt; imports no jax."""

import dataclasses
import hashlib
import json
from typing import Any

LAYOUT_VERSION = 2
"""Counts changes of what the bytes of a page mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheIdentity:
    """All that two engines must have in common to read each other's pages.

    `weights` and `tokenizer` are digests of their files, `model` the configuration as it is served (layers, rotation,
    MTP module), `cache_dtype` how latents are stored, `compute_dtype`, `fp8` and `int4` how they are computed. The
    cache's groups, and so the bytes of a page, follow from `model`, `cache_dtype` and `page_size`.
    """

    weights: str
    tokenizer: str
    model: str
    cache_dtype: str
    compute_dtype: str
    fp8: str
    int4: str = "keep"
    page_size: int
    layout_version: int = LAYOUT_VERSION

    @property
    def text(self) -> str:
        """All fields as JSON."""
        return _text(self)


def fingerprint(identity: str) -> str:
    """Returns the sha256, in hex, of a `CacheIdentity.text`."""
    return hashlib.sha256(identity.encode()).hexdigest()


def model_identity(cfg: Any) -> str:
    """Returns the digest of a model's configuration (a dataclass)."""
    return fingerprint(_text(cfg))


def _text(record: Any) -> str:
    return json.dumps(dataclasses.asdict(record), sort_keys=True, separators=(",", ":"))
