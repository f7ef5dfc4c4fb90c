"""The account of one device's memory: the server sizes its cache by it, and `launch.plan` says by it what fits."""

import dataclasses
import hashlib
import logging
import math
import os
from pathlib import Path
from typing import Any

import jax

from dsv3.config.options import EngineOptions
from dsv3.engine.fingerprint import Fields

GB = 1e9
_log = logging.getLogger(__name__)
_OF_THE_POOL = ("limit num_pages", "limit max_model_len")
_MOST_UTILIZATION = 0.95  # that is advised
# What jax holds before an engine is made differs from start to start. To the byte, it would change the number of pages,
# and with that the programs: none of the last start would be found again.
_HELD_BEFORE = 2**26


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: what the card has, what jax's pool may take of it, and what this process holds already."""

    total: int
    pool: int
    in_use: int = 0


@dataclasses.dataclass(frozen=True)
class MemoryAccount:
    """Where the memory of one device goes, in bytes.

    Of `total` the engine takes `pool`. In it lie `weights`, `state` (of the decode slots, sampler included), `working`
    memory of the largest program, and whole pages of `page` bytes and `page_size` tokens each in the rest.
    `in_use` is what the process held before.
    """

    total: int
    pool: int
    weights: int
    state: int
    working: int
    page: int
    page_size: int
    in_use: int = 0

    @property
    def pages(self) -> int:
        """How many pages fit."""
        return max(0, self.pool - self.in_use - self.weights - self.state - self.working) // self.page

    @property
    def cache(self) -> int:
        """Bytes of these pages."""
        return self.pages * self.page

    @property
    def tokens(self) -> int:
        """Tokens that fit these pages."""
        return self.pages * self.page_size

    def __str__(self) -> str:
        parts = {"weights": self.weights, "state": self.state, "working memory": self.working}
        parts |= {"held before": self.in_use} if self.in_use else {}
        said = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items())
        return (
            f"{self.total / GB:.1f} GB in all, {self.pool / GB:.2f} of them for this engine: {said}, "
            f"cache {self.cache / GB:.2f} GB ({self.tokens:,} tokens)"
        )


def account(
    memory: DeviceMemory,
    utilization: float,
    *,
    weights: int,
    state: int,
    working: int,
    page: int,
    page_size: int,
) -> MemoryAccount:
    """Returns the account of a device of which `utilization` may be used, at most jax's pool.

    What is in use already counts in steps of 64 MiB.
    """
    pool = min(int(memory.total * utilization), memory.pool)
    in_use = -(-memory.in_use // _HELD_BEFORE) * _HELD_BEFORE
    return MemoryAccount(memory.total, pool, weights, state, working, page, page_size, in_use)


def check_fits(found: MemoryAccount, options: EngineOptions, *, devices: int, spreads: bool) -> None:
    """Raises ValueError where not a page fits, with what takes the memory and what to change.

    The model lies on `devices`; `spreads` says whether it has routed experts that can be spread over more.
    """
    if found.pages:
        return
    changes = []
    most = int(found.total * _MOST_UTILIZATION)
    fixed = found.in_use + found.weights + found.state
    if fixed + found.page < found.pool:
        changes.append("lower max_num_batched_tokens or max_num_seqs, which working memory grows with")
    if most > found.pool and fixed + found.working + found.page < most:
        changes.append(f"raise gpu_memory_utilization (now {options.gpu_memory_utilization:g})")
    if spreads and not options.spreads_experts:
        least = max(2, math.ceil(devices * found.weights / max(1, found.pool - found.working)))
        changes.append(
            f"spread the routed experts over at least {least} devices (data_parallel_size {least} and "
            "enable_expert_parallel)"
        )
    elif spreads:
        changes.append(f"use more than {devices} devices")
    changes.append("use devices with more memory")
    raise ValueError(f"the model does not fit: {found}; {', or '.join(changes)}")


class KeptWorking:
    """What is known of working memory from an earlier start with these `fields`, in the compilation cache at `root`."""

    def __init__(self, root: Path, fields: Fields) -> None:
        text = "\n".join(f"{name}={value}" for name, value in sorted(fields.items()) if name not in _OF_THE_POOL)
        self._path = root / f"programs-{hashlib.sha256(text.encode()).hexdigest()[:16]}.working"

    def read(self) -> int | None:
        """Returns the bytes, None where nothing is known."""
        try:
            found = int(self._path.read_text("ascii"))
            os.utime(self._path)
        except (OSError, ValueError):
            return None
        return found

    def keep(self, working: int) -> None:
        """Keeps the bytes for the next start, where that can be."""
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(str(working), "ascii")
            part.replace(self._path)
        except OSError as error:
            _log.warning("working memory is not kept for the next start: %s", error)


@dataclasses.dataclass(frozen=True)
class Accounted:
    """The account by which an engine's pool was sized; `staging` is what its working memory has for pages under way."""

    account: MemoryAccount
    staging: int
    kept: KeptWorking

    def compare(self, taken: int) -> None:
        """Logs what all programs take beside what is set aside for them; the next start sets aside no less."""
        follower_handler = self.account.working - self.staging
        if taken <= follower_handler:
            _log.info("working memory: all programs take %.2f GB of %.2f", taken / GB, follower_handler / GB)
            return
        self.kept.keep(taken)
        text = "working memory: programs take %.2f GB, but %.2f are set aside for them; the next start sets aside more"
        _log.warning(text, taken / GB, follower_handler / GB)


def local_bytes(tree: Any) -> int:
    """Returns the bytes that one device holds of a tree of arrays, or `ShapeDtypeStruct`s with shardings."""
    shapes = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree))
    return sum(math.prod(shape) * itemsize for shape, itemsize in shapes)
