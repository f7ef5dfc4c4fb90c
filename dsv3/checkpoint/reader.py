"""Reads planned arrays and puts them on their devices, few at a time, so that host memory stays bounded."""

import dataclasses
import itertools
import logging
import math
import time
import types
from collections import deque
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
from dsv3.checkpoint.fill import Files, Filling, aligned_empty, read_together
from dsv3.checkpoint.load_plan import Array, LoadPlan
from dsv3.model.params import Fp8Weight, Int4Weight
from pallas_kernels.float8 import E4M3

_log = logging.getLogger(__name__)
Advance = Callable[[int], None]

TOGETHER_BYTES = 8 << 30
"""Host memory that shares of an array take at most together, so that what several devices need is read once."""
AHEAD_BYTES = 256 << 20
"""Host memory of arrays whose reads are under way beside those of an array that is waited for.

A disk must not wait between small arrays: a layer has a score of them, and a norm is 14 KB.
"""
_EVERY_S = 60.0
_COPIES = 2  # rounds of shares in host memory: one is read while the one before is copied to its devices


def read_leaves(
    plan: LoadPlan,
    shardings: Mapping[str, Any],
    *,
    progress: bool,
    threads: int = 8,
    convert: Mapping[str, Callable[[Any], Any]] = types.MappingProxyType({}),
) -> list[Any]:
    """Returns the parameters in the order of the plan: `jax.Array`s, or `Fp8Weight`s or `Int4Weight`s of them.

    `shardings` has a `Sharding`, or an `Fp8Weight` of two, by leaf path; a leaf without one goes to the default device.
    Only files that hold something for this process's devices are opened. Host memory holds one device's share of one
    array, or those that need the same bytes of files (up to `TOGETHER_BYTES`). It also holds the shares before, which
    are on their way to their devices, and up to `AHEAD_BYTES` of the next. A CPU device adopts the memory instead of
    copying it. What `convert` makes of a parameter, by its path, takes its place before the next one is asked for.

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
        read = _arrays(files, [pair for leaf in leaves for pair in leaf], advance, copies)
        for path, leaf in zip(plan.leaves, leaves, strict=True):
            value = _leaf([array for array, _ in leaf], list(itertools.islice(read, len(leaf))))
            if path in convert:
                copies.wait()  # they hold the memory of what is converted
                value = convert[path](value)
            values.append(value)
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
    """Shows a progress bar over `total` bytes, then a line with bytes, seconds and throughput, on standard error.

    Where there is no bar to see, the log has a line per minute; unless `shown`, the last line goes there, too.
    """
    console = Console(stderr=True, quiet=not shown)
    columns = (TextColumn(verb), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    has_bar = shown and console.is_terminal
    start = logged = time.perf_counter()
    done = 0

    def advance(n: int) -> None:
        nonlocal done, logged
        done += n
        bar.advance(task, n)
        now = time.perf_counter()
        if not has_bar and now - logged >= _EVERY_S:
            logged = now
            _log.info("%s: %s of %s, %s/s", verb, decimal(done), decimal(total), _rate(done, now - start))

    with Progress(*columns, console=console, transient=True, disable=not has_bar) as bar:
        task = bar.add_task(verb, total=total)
        yield advance
    seconds = time.perf_counter() - start
    text = f"{verb}: {decimal(total)} in {seconds:.1f} s, {_rate(total, seconds)}/s"
    if shown:
        console.print(text, highlight=False)
    else:
        _log.info("%s", text)


def _rate(nbytes: int, seconds: float) -> str:
    return decimal(int(nbytes / max(seconds, 1e-9)))


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
    return [_leaf(arrays, [shape(array, shardings.get(path)) for array in arrays]) for path, arrays in leaves]


def _leaf(arrays: Sequence[Array], values: Sequence[Any]) -> Any:
    """Returns the parameter that the values of its arrays are: data alone, or with scales."""
    if len(values) == 1:
        return values[0]
    return (Fp8Weight if arrays[0].dtype == E4M3 else Int4Weight)(*values)


@dataclasses.dataclass(frozen=True)
class _Shares:
    """Boxes of one array that are read together, the host memory that they go to, and the reads under way."""

    number: int
    hosts: dict[Box, np.ndarray]
    filling: Filling

    @property
    def nbytes(self) -> int:
        return sum(host.nbytes for host in self.hosts.values())


def _arrays(
    files: Files, arrays: Sequence[tuple[Array, Sharding | None]], advance: Advance, copies: _Copies
) -> Iterator[jax.Array]:
    """Yields the arrays on their devices, in order."""
    read = _read_ahead(files, arrays, advance)
    for number, several in itertools.groupby(read, lambda each: each.number):
        array, sharding = arrays[number]
        needed = shares(array.shape, sharding)
        on_devices: list[jax.Array] = []
        for each in several:
            sent = [
                jax.device_put(host, to) for box, host in each.hosts.items() for to in _places(needed[box], sharding)
            ]
            each.hosts.clear()  # before the next ones are allocated
            copies.add(sent)
            on_devices += sent
        if sharding is None:
            yield on_devices[0]
        else:
            yield jax.make_array_from_single_device_arrays(array.shape, sharding, on_devices, dtype=array.dtype)


def _read_ahead(files: Files, arrays: Sequence[tuple[Array, Sharding | None]], advance: Advance) -> Iterator[_Shares]:
    """Yields shares of arrays that have been read; up to `AHEAD_BYTES` are being read meanwhile."""
    under_way: deque[_Shares] = deque()
    for number, (array, sharding) in enumerate(arrays):
        for boxes in read_together(array, list(shares(array.shape, sharding)), TOGETHER_BYTES):
            nbytes = sum(math.prod(extents(box)) for box in boxes) * array.dtype.itemsize
            while under_way and sum(each.nbytes for each in under_way) + nbytes > AHEAD_BYTES:
                yield _finished(under_way)
            hosts = {box: aligned_empty(extents(box), array.dtype) for box in boxes}
            under_way.append(_Shares(number, hosts, files.start(array, hosts.items(), advance)))
    while under_way:
        yield _finished(under_way)


def _finished(under_way: deque[_Shares]) -> _Shares:
    first = under_way.popleft()
    first.filling.wait()
    return first


def _places(devices: Sequence[jax.Device], sharding: Sharding | None) -> Sequence[Sharding | None]:
    """Returns where a share goes: None is the default device."""
    if sharding is None:
        return [None]
    return [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
