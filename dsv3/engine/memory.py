"""The memory account of one device: the engine sizes its cache by it, and `launch.plan` checks by it what fits."""

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
from dsv3.files import replace_file

GB = 1e9
_log = logging.getLogger(__name__)
_POOL_FIELDS = ("limit num_pages", "limit max_model_len")
OUTSIDE = 0.03
"""Fraction of a device's memory that CUDA, NCCL's buffers and the kernels' code take outside of jax's pool."""
_MAX_UTILIZATION = 0.95  # the most that errors recommend
# What jax uses before an engine is made differs from start to start. To the byte, it would change the number of pages,
# and with that the programs: none of the last start would be found again.
_IN_USE_STEP = 2**26


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: the card's total, the most that jax's pool may take, and what this process uses already."""

    total: int
    pool: int
    in_use: int = 0


@dataclasses.dataclass(frozen=True)
class MemoryAccount:
    """Where the memory of one device goes, in bytes.

    The engine takes `pool` of `total`. It holds `weights`, `state` (decode state, sampler's included), `working` memory
    of the largest program, and in the rest whole pages of `page` bytes and `page_size` tokens. `in_use` is what the
    process used before.
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
        """Pages that fit."""
        return max(0, self.pool - self.in_use - self.weights - self.state - self.working) // self.page

    @property
    def cache(self) -> int:
        """Bytes of these pages."""
        return self.pages * self.page

    @property
    def tokens(self) -> int:
        """Tokens of these pages."""
        return self.pages * self.page_size

    def __str__(self) -> str:
        parts = {"weights": self.weights, "state": self.state, "working memory": self.working}
        parts |= {"in use before": self.in_use} if self.in_use else {}
        sizes = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items())
        return (
            f"{self.total / GB:.1f} GB in all, {self.pool / GB:.2f} of them for this engine: {sizes}, "
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

    Memory that is in use already counts in steps of 64 MiB.
    """
    pool = min(int(memory.total * utilization), memory.pool)
    in_use = -(-memory.in_use // _IN_USE_STEP) * _IN_USE_STEP
    return MemoryAccount(memory.total, pool, weights, state, working, page, page_size, in_use)


def check_fits(found: MemoryAccount, options: EngineOptions, *, devices: int, spreads: bool) -> None:
    """Raises ValueError where not one page fits; the message says what takes the memory and what to change.

    The model lies on `devices`; `spreads` says whether it has routed experts that more devices could share.
    """
    if found.pages:
        return
    changes = []
    most = int(found.total * _MAX_UTILIZATION)
    fixed = found.in_use + found.weights + found.state
    if fixed + found.page < found.pool:
        changes.append("lower max_num_batched_tokens or max_num_seqs, which determine working memory")
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


def check_beside(memory: DeviceMemory, taken: int, utilization: float) -> None:
    """Raises ValueError where `taken` bytes of a library have no place beside jax's pool; the message says what has.

    jax's pool exists by then; `OUTSIDE` of the device is for CUDA, NCCL and the kernels' code.
    """
    missing = memory.pool + taken - int(memory.total * (1 - OUTSIDE))
    if taken and missing > 0:
        fits = math.floor(100 * (utilization - missing / memory.total)) / 100
        raise ValueError(
            f"gpu_memory_utilization: {utilization:g} leaves {(memory.total - memory.pool) / GB:.1f} GB beside jax's "
            f"pool, where NCCL EP needs {taken / GB:.1f} GB for buffers: set it to {fits:g}"
        )


class WorkingMemoryFile:
    """Working memory measured by an earlier start with the same `fields`, in the compilation cache at `root`."""

    def __init__(self, root: Path, fields: Fields) -> None:
        text = "\n".join(f"{name}={value}" for name, value in sorted(fields.items()) if name not in _POOL_FIELDS)
        self._path = root / f"programs-{hashlib.sha256(text.encode()).hexdigest()[:16]}.working"

    def read(self) -> int | None:
        """Returns the bytes, None where there is no measurement."""
        try:
            found = int(self._path.read_text("ascii"))
            os.utime(self._path)
        except (OSError, ValueError):
            return None
        return found

    def write(self, working: int) -> None:
        """Writes the bytes for the next start; logs a warning where it cannot."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, b"%d" % working)
        except OSError as error:
            _log.warning("the size of working memory is not stored for the next start: %s", error)


@dataclasses.dataclass(frozen=True)
class PoolSizing:
    """The account that sized an engine's page pool; `staging` is the working memory of pages in transit."""

    account: MemoryAccount
    staging: int
    kept: WorkingMemoryFile

    def compare(self, taken: int) -> None:
        """Logs what all programs take and what is reserved for them; the next start reserves no less."""
        reserved = self.account.working - self.staging
        if taken <= reserved:
            _log.info("working memory: programs take %.2f GB of %.2f reserved", taken / GB, reserved / GB)
            return
        self.kept.write(taken)
        text = "working memory: programs take %.2f GB, but %.2f are reserved for them; the next start reserves more"
        _log.warning(text, taken / GB, reserved / GB)


def local_bytes(tree: Any) -> int:
    """Returns the bytes that one device holds of a tree of arrays, or of `ShapeDtypeStruct`s with shardings."""
    shapes = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree))
    return sum(math.prod(shape) * itemsize for shape, itemsize in shapes)
