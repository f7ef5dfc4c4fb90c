"""Reads planned arrays and places them on devices, one at a time, so that host memory stays bounded."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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


@dataclasses.dataclass(frozen=True)
class Target:
    """An array to be placed: the boxes that this process needs of it, each with the devices that shall hold it.

    Without a sharding it goes to the default device.
    """

    array: Array
    sharding: Sharding | None
    shares: Mapping[Box, Sequence[jax.Device]]

    @property
    def files(self) -> Iterator[Path]:
        """Files that hold the shares, many times over."""
        for box in self.shares:
            for source, _ in self.array.meeting(box):
                yield source.tensor.path
                if source.scale is not None:
                    yield source.scale.tensor.path


def read_leaves(plan: Plan, shardings: Mapping[str, Any], *, progress: bool, threads: int = 8) -> list[Any]:
    """Parameters in the order of the plan: `jax.Array`s, or `Fp8Weight`s of them.

    Only files that hold something for this process's devices are opened. One array of one device's share is in host
    memory at a time: it is allocated once, read in place, moved to its device and dropped (on a CPU the device adopts
    the memory instead).
    """
    leaves = [[target(array, shardings.get(path)) for array in arrays] for path, arrays in plan.leaves.items()]
    targets = [one for leaf in leaves for one in leaf]
    total = sum(2 * a.nbytes for a, _ in plan.equal)
    total += sum(one.array.bytes_to_read(box) for one in targets for box in one.shares)
    with Files(threads) as files, reporter(total, "loading", shown=progress) as advance:
        files.open(tensor.path for pair in plan.equal for tensor in pair)
        check_duplicates(files, plan, advance)
        files.open(path for one in targets for path in one.files)
        return [_leaf(files, leaf, advance) for leaf in leaves]


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


def target(array: Array, shardings: Any) -> Target:
    """Where an array of a leaf goes; an `Fp8Weight` of shardings gives the leaf's arrays, data and scale, one each."""
    if isinstance(shardings, Fp8Weight):
        shardings = shardings.scale if array.positive else shardings.data
    if shardings is None:
        return Target(array, None, {full_box(array.shape): ()})
    return Target(array, shardings, _shares(array.shape, shardings))


def _shares(shape: tuple[int, ...], sharding: Sharding) -> dict[Box, list[jax.Device]]:
    shares: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), shape, strict=True))
        shares.setdefault(box, []).append(device)
    return shares


def _leaf(files: Files, targets: Sequence[Target], advance: Advance) -> Any:
    placed = [_place(files, one, advance) for one in targets]
    return Fp8Weight(*placed) if len(placed) == 2 else placed[0]


def _place(files: Files, one: Target, advance: Advance) -> jax.Array:
    array, sharding = one.array, one.sharding

    def read(box: Box) -> np.ndarray:
        host = aligned_empty(extents(box), array.dtype)
        files.fill(array, box, host, advance)
        return host

    if sharding is None:
        return jax.block_until_ready(jax.device_put(read(full_box(array.shape))))
    singles = []
    for box, devices in one.shares.items():
        host = read(box)
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        singles += jax.block_until_ready([jax.device_put(host, place) for place in places])
        del host  # before the next share is allocated
    return jax.make_array_from_single_device_arrays(array.shape, sharding, singles, dtype=array.dtype)
