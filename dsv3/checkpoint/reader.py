"""Reads planned arrays and puts them on their devices, few at a time, so that host memory stays bounded."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dsv3.checkpoint.boxes import Box, extents, full_box
from dsv3.checkpoint.errors import CheckpointError
from dsv3.checkpoint.fill import Files, aligned_empty, read_together
from dsv3.checkpoint.load_plan import Array, LoadPlan
from dsv3.model.params import Fp8Weight, Int4Weight
from pallas_kernels.float8 import E4M3

Advance = Callable[[int], None]

TOGETHER_BYTES = 8 << 30
"""Host memory that shares of an array take at most together, so that what several devices need is read once."""
_COPIES = 2  # rounds of shares in host memory: one is read while the one before is copied to its devices


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
    array, or those that need the same bytes of files (up to `TOGETHER_BYTES`), and the ones before, which are on their
    way to their devices. A CPU device adopts the memory instead of copying it. What `finish` makes of a parameter takes
    its place before the next one is read.

    Raises `CheckpointError` if a file cannot be read or is damaged, or if tensors that must be equal differ.
    """
    leaves = [[(a, sharding_of(a, shardings.get(path))) for a in arrays] for path, arrays in plan.leaves.items()]
    needed = [(array, box) for leaf in leaves for array, sharding in leaf for box in shares(array.shape, sharding)]
    total = plan.bytes_to_compare + sum(array.bytes_to_read(box) for array, box in needed)
    with Files(threads) as files, reporter(total, "loading", shown=progress) as advance:
        files.open(tensor.path for pair in plan.equal for tensor in pair)
        check_duplicates(files, plan, advance)
        files.open(path for array, box in needed for path in array.files(box))
        copies = _Copies()
        values = []
        for leaf in leaves:
            value = _leaf(files, leaf, advance, copies)
            if isinstance(value, Int4Weight):
                copies.wait()  # `finish` may give their memory to what it makes of them
            values.append(finish(value))
        copies.wait()
        return values


class _Copies:
    """Arrays on their way to devices; disks are read meanwhile."""

    def __init__(self) -> None:
        self._under_way: deque[list[jax.Array]] = deque()

    def add(self, arrays: list[jax.Array]) -> None:
        """Takes the copies of what was read together; waits for those before the last ones."""
        self._under_way.append(arrays)
        while len(self._under_way) >= _COPIES:
            jax.block_until_ready(self._under_way.popleft())

    def wait(self) -> None:
        """Waits for all, and forgets them."""
        while self._under_way:
            jax.block_until_ready(self._under_way.popleft())


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


def leaf_shapes(plan: LoadPlan, shardings: Mapping[str, Any]) -> list[Any]:
    """Returns the shapes, dtypes and shardings of what `read_leaves` would return; reads nothing."""

    def shape(array: Array, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding_of(array, sharding))

    leaves = plan.leaves.items()
    return [_parameter(arrays, [shape(array, shardings.get(path)) for array in arrays]) for path, arrays in leaves]


def _leaf(files: Files, leaf: Sequence[tuple[Array, Sharding | None]], advance: Advance, copies: _Copies) -> Any:
    values = [_read_array(files, array, sharding, advance, copies) for array, sharding in leaf]
    return _parameter([array for array, _ in leaf], values)


def _parameter(arrays: Sequence[Array], values: Sequence[Any]) -> Any:
    """Returns the parameter that the values of its arrays are: data alone, or with scales."""
    if len(values) == 1:
        return values[0]
    return (Fp8Weight if arrays[0].dtype == E4M3 else Int4Weight)(*values)


def _read_array(files: Files, array: Array, sharding: Sharding | None, advance: Advance, copies: _Copies) -> jax.Array:
    on_devices: list[jax.Array] = []
    needed = shares(array.shape, sharding)
    for boxes in read_together(array, list(needed), TOGETHER_BYTES):
        hosts = {box: aligned_empty(extents(box), array.dtype) for box in boxes}
        files.fill(array, hosts.items(), advance)
        sent = [jax.device_put(host, to) for box, host in hosts.items() for to in _places(needed[box], sharding)]
        del hosts  # before the next ones are allocated
        copies.add(sent)
        on_devices += sent
    if sharding is None:
        return on_devices[0]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, on_devices, dtype=array.dtype)


def _places(devices: Sequence[jax.Device], sharding: Sharding | None) -> Sequence[Sharding | None]:
    """Returns where a share goes: None is the default device."""
    if sharding is None:
        return [None]
    return [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
