"""Stores: what a place for values beyond the host's memory can do, and which kind an address names.

Pages are named by their content, so several engines may share one store.
"""

import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from dsv3.kv_cache.events.record import Watch
from dsv3.kv_cache.keys import Key

OBJECT_SCHEMES = ("s3", "gs", "memory")
_SETTINGS = {"endpoint": "endpoint", "region": "aws_region"}  # of an S3 address: tensorstore's names


class PageStore(Protocol):
    """Values by key, in batches. Any thread may call; OSError says that the place does not answer as it should."""

    damaged: int
    evictions: int

    @property
    def bytes_held(self) -> int:
        """Bytes that the place holds, as far as this process knows."""

    def count(self, keys: Sequence[Key]) -> int:
        """Returns how many of `keys` are there, from the first on."""

    def get(self, keys: Sequence[Key], out: np.ndarray) -> int:
        """Reads values into the rows of `out`, uint8 `[n, value_bytes]`.

        Returns how many there are, from the first on, that verify.
        """

    def put(self, keys: Sequence[Key], payloads: np.ndarray) -> int:
        """Writes the rows of `payloads`, uint8 `[n, value_bytes]`; returns how many were written."""

    def delete(self, keys: Sequence[Key]) -> None:
        """Drops values."""


def check_address(address: str) -> None:
    """Raises ValueError for an address that `open_store` cannot take."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme in OBJECT_SCHEMES:
        if parts.scheme != "memory" and not parts.netloc:
            raise ValueError(f"{address!r} names no bucket; write {parts.scheme}://BUCKET/PREFIX")
        _check_settings(address, parts)
    elif _directory(address) is None:
        known = ", ".join(f"{scheme}://" for scheme in ("file", *OBJECT_SCHEMES))
        raise ValueError(f"{address!r} is neither an absolute directory nor an address that starts with {known}")


def open_store(address: str, namespace: str, value_bytes: int, limit: int, watch: Watch | None = None) -> PageStore:
    """Opens a directory (an absolute path, or file://) or an object store (s3://, gs://).

    An S3 address may end with `?endpoint=URL&region=NAME`, for a server that is not Amazon's.

    Values have `value_bytes` bytes. Engines that can read each other's pages use the same `namespace`. A directory
    holds at most `limit` bytes; an object store is bounded by its own rules. Raises ValueError for another address,
    OSError where the store cannot be opened.
    """
    check_address(address)
    directory = _directory(address)
    if directory is not None:
        from dsv3.kv_cache.tiers.directory import Directory

        return Directory(directory / namespace, value_bytes, limit, watch)
    from dsv3.kv_cache.tiers.objects import Objects

    return Objects(_location(address, namespace), value_bytes, watch)


def _check_settings(address: str, parts: urllib.parse.SplitResult) -> None:
    """Raises ValueError for a query that is not an S3 server's endpoint and region."""
    settings = _settings(parts)
    unknown = sorted(settings.keys() - (_SETTINGS.keys() if parts.scheme == "s3" else ()))
    if unknown or (parts.query and not settings):
        raise ValueError(f"{address!r} may end with ?endpoint=URL&region=NAME after s3://, and no more")
    if "endpoint" in settings and not settings["endpoint"].startswith(("http://", "https://")):
        raise ValueError(f"{address!r} has endpoint {settings['endpoint']!r}; it must start with http:// or https://")


def _location(address: str, namespace: str) -> str | dict[str, str]:
    """Returns where `namespace` lies, as tensorstore opens it: an address, or a driver's fields."""
    parts = urllib.parse.urlsplit(address)
    if not parts.query:
        return f"{address.rstrip('/')}/{namespace}/"
    path = f"{urllib.parse.unquote(parts.path).strip('/')}/{namespace}/".lstrip("/")
    settings = {_SETTINGS[name]: value for name, value in _settings(parts).items()}
    return {"driver": "s3", "bucket": parts.netloc, "path": path, **settings}


def _settings(parts: urllib.parse.SplitResult) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(parts.query))


def _directory(address: str) -> Path | None:
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(urllib.parse.unquote(parts.path))
    return Path(address) if not parts.scheme and address.startswith("/") else None
