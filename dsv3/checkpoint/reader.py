"""Reads planned arrays and puts them on their devices, one at a time, so that host memory stays bounded."""

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

from dsv3.checkpoint.boxes import Box, extents, full_box
from dsv3.checkpoint.errors import CheckpointError
from dsv3.checkpoint.fill import Files, aligned_empty
from dsv3.checkpoint.load_plan import Array, LoadPlan
from dsv3.model.params import Fp8Weight, Int4Weight
from pallas_kernels.float8 import E4M3

Advance = Callable[[int], None]


def read_leaves(
    plan: LoadPlan,
    shardings: Mapping[str, Any],
    *,
    progress: bool,
    threads: int = 8,
    finish: Callable[[Any], Any] = lambda leaf: leaf,
) -> list[Any]:
    """Returns the parameters in the order of the plan: `jax.Array`s, or `Fp8Weight`s or `Int4Weight`s of them.

    `shardings` has a `Sharding`, or an `Fp8Weight` of two, by leaf path; a leaf without one goes to the default device.
    Only files that hold something for this process's devices are opened. Host memory holds one device's share of one
    array at a time (and all of a matrix that devices split by columns): it is allocated once, read in place, moved to
    its device and dropped. A CPU device adopts the memory instead of copying it. What `finish` makes of a parameter
    takes its place before the next one is read.

    Raises `CheckpointError` if a file cannot be read or is damaged, or if tensors that must be equal differ.
    """
    leaves = [[(a, sharding_of(a, shardings.get(path))) for a in arrays] for path, arrays in plan.leaves.items()]
    needed = [(array, box) for leaf in leaves for array, sharding in leaf for box in reads(array.shape, sharding)]
    total = plan.bytes_to_compare + sum(array.bytes_to_read(box) for array, box in needed)
    with Files(threads) as files, reporter(total, "loading", shown=progress) as advance:
        files.open(tensor.path for pair in plan.equal for tensor in pair)
        check_duplicates(files, plan, advance)
        files.open(path for array, box in needed for path in array.files(box))
        return [finish(_leaf(files, leaf, advance)) for leaf in leaves]


def check_duplicates(files: Files, plan: LoadPlan, advance: Advance) -> None:
    """Raises `CheckpointError` if a tensor that must repeat another (an MTP module's embedding or head) differs."""
    for a, b in plan.equal:
        if not files.same_bytes(a, b, advance):
            raise CheckpointError(f"{a.path}: tensor {a.name}: differs from {b.name}, which it must repeat")


@contextmanager
def reporter(total: int, verb: str, *, shown: bool) -> Iterator[Advance]:
    """Shows a progress bar over `total` bytes, then a line with bytes, seconds and throughput, on standard error."""
    console = Console(stderr=True, quiet=not shown)
    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda n: bar.advance(task, n)
    seconds = time.perf_counter() - start
    rate = decimal(int(total / max(seconds, 1e-9)))
    console.print(f"{verb}: {decimal(total)} in {seconds:.1f} s, {rate}/s", highlight=False)


def sharding_of(array: Array, shardings: Any) -> Sharding | None:
    """Returns the sharding of one array of a leaf; an `Fp8Weight` of shardings has one for data and one for scales."""
    if isinstance(shardings, Fp8Weight):
        return shardings.scale if array.positive else shardings.data
    return shardings


def shares(shape: tuple[int, ...], sharding: Sharding | None) -> dict[Box, list[jax.Device]]:
    """Returns the boxes of an array that this process needs, each with the devices that hold it.

    Without a sharding the one box is the whole array, and its list is empty: it goes to the default device.
    """
    if sharding is None:
        return {full_box(shape): []}
    found: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), shape, strict=True))
        found.setdefault(box, []).append(device)
    return found


def reads(shape: tuple[int, ...], sharding: Sharding | None) -> list[Box]:
    """Returns the boxes of an array that are read for this process.

    These are `shares`, but one for all where devices split a matrix by columns (the embedding): each of them would read
    all of its rows.
    """
    boxes = list(shares(shape, sharding))
    if len(shape) != 2 or len({(box[0].start, box[0].stop) for box in boxes}) > 1:
        return boxes
    return [(boxes[0][0], slice(min(box[1].start for box in boxes), max(box[1].stop for box in boxes)))]


def _leaf(files: Files, leaf: Sequence[tuple[Array, Sharding | None]], advance: Advance) -> Any:
    values = [_read_array(files, array, sharding, advance) for array, sharding in leaf]
    if len(values) == 1:
        return values[0]
    return (Fp8Weight if leaf[0][0].dtype == E4M3 else Int4Weight)(*values)


def _read_array(files: Files, array: Array, sharding: Sharding | None, advance: Advance) -> jax.Array:
    def read(box: Box) -> np.ndarray:
        host = aligned_empty(extents(box), array.dtype)
        files.fill(array, box, host, advance)
        return host

    if sharding is None:
        return jax.block_until_ready(jax.device_put(read(full_box(array.shape))))
    found, (first, *others) = shares(array.shape, sharding), reads(array.shape, sharding)
    together = read(first) if len(found) > 1 + len(others) else None

    def share(box: Box) -> np.ndarray:
        if together is None:
            return read(box)
        host = aligned_empty(extents(box), array.dtype)
        host[...] = together[:, box[1].start - first[1].start : box[1].stop - first[1].start]
        return host

    on_devices = []
    for box, devices in found.items():
        host = share(box)
        single = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        on_devices += jax.block_until_ready([jax.device_put(host, one) for one in single])
        del host  # before the next share is allocated
    return jax.make_array_from_single_device_arrays(array.shape, sharding, on_devices, dtype=array.dtype)
