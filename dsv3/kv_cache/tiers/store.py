"""Stores: what a place for values beyond the host's memory can do, and which kind an address names.

Pages are named by their content, so several engines may share one store.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dsv3.config.store_address import check_address, directory_of, location_of
from dsv3.kv_cache.events.record import Watch
from dsv3.kv_cache.keys import Key


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


def open_store(address: str, namespace: str, value_bytes: int, limit: int, watch: Watch | None = None) -> PageStore:
    """Opens a directory (an absolute path, or file://) or an object store (s3://, gs://).

    An S3 address may end with `?endpoint=URL&region=NAME`, for a server that is not Amazon's.

    Values have `value_bytes` bytes. Engines that can read each other's pages use the same `namespace`. A directory
    holds at most `limit` bytes; an object store is bounded by its own rules. Raises ValueError for another address,
    OSError where the store cannot be opened.
    """
    check_address(address)
    directory = directory_of(address)
    if directory is not None:
        from dsv3.kv_cache.tiers.directory import Directory

        return Directory(directory / namespace, value_bytes, limit, watch)
    from dsv3.kv_cache.tiers.objects import Objects

    return Objects(location_of(address, namespace), value_bytes, watch)
