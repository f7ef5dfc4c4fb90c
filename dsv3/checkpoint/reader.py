"""Reads planned arrays and places them on devices, one at a time, so that host memory stays bounded."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dsv3.checkpoint.errors import CheckpointError
from dsv3.checkpoint.fill import Array, Files, aligned_empty, extents
from dsv3.checkpoint.layout import Box, full_box
from dsv3.checkpoint.plan import Plan
from dsv3.model.params import Fp8Weight

Advance = Callable[[int], None]


def read_leaves(plan: Plan, shardings: Mapping[str, Any], *, progress: bool, threads: int = 8) -> list[Any]:
    """Parameters in the order of the plan: `jax.Array`s, or `Fp8Weight`s of them.

    One array of one device's share is in host memory at a time: it is allocated once, read in place, moved to its
    device and dropped (on a CPU the device adopts the memory instead).
    """
    with Files(threads) as files, reporter(_total(plan, shardings), "loading", shown=progress) as advance:
        files.open(plan.files)
        check_duplicates(files, plan, advance)
        return [_leaf(files, arrays, shardings.get(path), advance) for path, arrays in plan.leaves.items()]


def check_duplicates(files: Files, plan: Plan, advance: Advance) -> None:
    """`CheckpointError` if a tensor that must repeat another (an MTP module's embedding or head) differs from it."""
    for a, b in plan.equal:
        if not files.same_bytes(a, b, advance):
            raise CheckpointError(f"{a.path}: tensor {a.name}: differs from {b.name}, which it must repeat")


@contextmanager
def reporter(total: int, verb: str, *, shown: bool) -> Iterator[Advance]:
    """A progress bar over `total` bytes, then one line with bytes, seconds and throughput, on standard error."""
    console = Console(stderr=True, quiet=not shown)
    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda n: bar.advance(task, n)
    seconds = time.perf_counter() - start
    rate = decimal(int(total / max(seconds, 1e-9)))
    console.print(f"{verb}: {decimal(total)} in {seconds:.1f} s, {rate}/s", highlight=False)


def _total(plan: Plan, shardings: Mapping[str, Any]) -> int:
    total = sum(2 * a.nbytes for a, _ in plan.equal)
    for path, arrays in plan.leaves.items():
        for array in arrays:
            sharding = _sharding(shardings.get(path), array)
            boxes = [full_box(array.shape)] if sharding is None else list(_shares(array, sharding))
            total += sum(map(array.bytes_to_read, boxes))
    return total


def _leaf(files: Files, arrays: Sequence[Array], shardings: Any, advance: Advance) -> Any:
    placed = [_place(files, array, _sharding(shardings, array), advance) for array in arrays]
    return Fp8Weight(*placed) if len(placed) == 2 else placed[0]


def _sharding(shardings: Any, array: Array) -> Sharding | None:
    """Sharding of one array of a leaf; an `Fp8Weight` of shardings gives data and scale one each."""
    if isinstance(shardings, Fp8Weight):
        return shardings.scale if array.positive else shardings.data
    return shardings


def _shares(array: Array, sharding: Sharding) -> dict[Box, list[jax.Device]]:
    """Boxes of the array that this process needs, with the devices that hold each."""
    shares: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        box = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), array.shape, strict=True))
        shares.setdefault(box, []).append(device)
    return shares


def _place(files: Files, array: Array, sharding: Sharding | None, advance: Advance) -> jax.Array:
    def read(box: Box) -> np.ndarray:
        host = aligned_empty(extents(box), array.dtype)
        files.fill(array, box, host, advance)
        return host

    if sharding is None:
        return jax.block_until_ready(jax.device_put(read(full_box(array.shape))))
    singles = []
    for box, devices in _shares(array, sharding).items():
        host = read(box)
        targets = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        singles += jax.block_until_ready([jax.device_put(host, target) for target in targets])
        del host  # before the next share is allocated
    return jax.make_array_from_single_device_arrays(array.shape, sharding, singles)
