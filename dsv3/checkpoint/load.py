"""`load_params`: reads a checkpoint directory into a parameter tree."""

import dataclasses
import functools
import gc
import itertools
import logging
import math
import os
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dsv3.checkpoint.fill import Files, Filling, aligned_empty, read_together
from dsv3.checkpoint.hugging_face import in_deepseek_form, plan_hf
from dsv3.checkpoint.layout import leaf_path, leaves
from dsv3.checkpoint.load_plan import (
    Array,
    Box,
    Fp8Mode,
    LoadPlan,
    extents,
    sharding_of,
    shares,
    with_replicas,
    with_row_order,
)
from dsv3.checkpoint.quantize import (
    Int4Mode,
    converted,
    converted_shapes,
    is_int4,
    plain_products,
    quantized,
    quantized_shapes,
)
from dsv3.checkpoint.safetensors_file import CheckpointError, read_directory
from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp8Weight, Int4Weight, Params, declare
from pallas_kernels.float8 import E4M3

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


DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))

_log = logging.getLogger(__name__)


def load_params(
    directory: str | os.PathLike[str],
    cfg: ModelConfig,
    *,
    dtype: Any,
    fp8: Fp8Mode = "keep",
    int4: Int4Mode = "keep",
    shardings: Params | Sharding | None = None,
    phy2log: np.ndarray | None = None,
    tensor_parallel_size: int = 1,
    progress: bool = True,
    threads: int = 8,
    shapes: bool = False,
) -> Params:
    """Reads a checkpoint directory into parameters on their devices.

    `dtype` is float32, bfloat16, float16, or None for the embedding's dtype in the checkpoint. All parameters have it,
    with three exceptions. The router's bias is float32. The router's weights are float32, unless the checkpoint holds
    them in `dtype` (`ParamSpec.dtype_in`). FP8 products become `Fp8Weight`s under `fp8` "keep"; "dequantize" multiplies
    them out; "quantize" keeps them and rounds the other products to FP8 too. kv_b_proj (`k_up`, `v_up`) is always
    dequantized, because absorbed attention runs in bfloat16. INT4 experts become `Int4Weight`s under `int4` "keep",
    `Fp8Weight`s under "fp8", and of `dtype` under "dequantize".

    `shardings` is one `jax.sharding.Sharding` for all leaves, or a tree like the parameters' with a `Sharding` per leaf
    (or an `Fp8Weight` of two, for data and scales). Each process reads only what its devices hold. None means the
    default device.

    `phy2log` [L, Er] int (`sharding.experts.eplb.ExpertMap`) names the expert of each replica. The decoder's
    routed experts then come out as `[L, Er, ...]` instead of `[L, E, ...]`, and so do those of the MTP modules where
    the map has layers for them too.
    `tensor_parallel_size` puts fused rows in the order of `tensor_parallel.row_order`, of which each device of a rank
    takes an equal part.

    With `shapes` only headers are read, and each array's place has its shape, dtype and sharding
    (`jax.ShapeDtypeStruct`).

    Host memory holds the arrays that stay on the host, one array (one device's share of it), and where values are
    converted at most 24 MiB of scratch per thread.

    Raises `CheckpointError`, which names file and tensor, if the checkpoint is not what `cfg` describes. Raises
    ValueError for options that do not fit the model.
    """
    if int4 not in get_args(Int4Mode):
        raise ValueError(f"int4 {int4!r} is not one of {', '.join(get_args(Int4Mode))}")
    where = _by_path(cfg, shardings)
    with _collector_paused():
        plan = plan_directory(Path(directory), cfg, dtype, fp8)
        if phy2log is not None:
            plan = with_replicas(plan, cfg, phy2log, where)
        if tensor_parallel_size > 1:
            plan = with_row_order(plan, cfg, tensor_parallel_size)
    if plan.skipped_mtp_layers:
        _log.info("%s: MTP modules from layer %d on are not loaded", directory, plan.skipped_mtp_layers[0])
    convert = _conversions(plan, cfg, fp8, int4, where)
    if shapes:
        found = zip(plan.leaves, leaf_shapes(plan, where), strict=True)
        values = [convert[path].shapes(leaf) if path in convert else leaf for path, leaf in found]
    else:
        made = {path: conversion.values for path, conversion in convert.items()}
        values = read_leaves(plan, where, progress=progress, threads=threads, convert=made)
    return jax.tree.unflatten(jax.tree.structure(declare(cfg)), values)


class _Conversion(NamedTuple):
    """What a parameter becomes once it has been read: its values, or the shapes of them."""

    values: Callable[[Any], Any]
    shapes: Callable[[Any], Any]


def _conversions(
    plan: LoadPlan, cfg: ModelConfig, fp8: Fp8Mode, int4: Int4Mode, where: Mapping[str, Any]
) -> dict[str, _Conversion]:
    """Returns the conversions of the leaves that are served in another form than they are read in."""
    how: dict[str, Any] = {"mode": int4, "dtype": plan.leaves["embed"][0].dtype}
    experts = _Conversion(functools.partial(converted, **how), functools.partial(converted_shapes, **how))
    conversions = {path: experts for path, spec in leaves(cfg).items() if is_int4(cfg, spec)}
    ue8m0 = cfg.fp8 is not None and cfg.fp8.scale_fmt == "ue8m0"
    for path in plain_products(plan, cfg) if fp8 == "quantize" else ():
        how = {"ue8m0": ue8m0, "sharding": where.get(path)}
        conversions[path] = _Conversion(functools.partial(quantized, **how), functools.partial(quantized_shapes, **how))
    return conversions


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses the garbage collector while a load is planned.

    Planning makes millions of small objects and no cycles, and the collector would walk all of them again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_directory(directory: Path, cfg: ModelConfig, dtype: Any, fp8: Fp8Mode) -> LoadPlan:
    """Plans the load of a directory; `dtype` and `fp8` as in `load_params`.

    Raises `CheckpointError` if the directory does not hold `cfg`, ValueError for an unknown `dtype` or `fp8`.
    """
    dtype = None if dtype is None else np.dtype(dtype)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}")
    if fp8 not in get_args(Fp8Mode):
        raise ValueError(f"fp8 {fp8!r} is not one of {', '.join(get_args(Fp8Mode))}")
    return plan_hf(directory, in_deepseek_form(directory, read_directory(directory)), cfg, dtype, fp8)


def _by_path(cfg: ModelConfig, shardings: Params | Sharding | None) -> dict[str, Any]:
    if shardings is None:
        return {}
    if isinstance(shardings, Sharding):
        return dict.fromkeys(leaves(cfg), shardings)
    flat, _ = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=lambda x: isinstance(x, Fp8Weight))
    by_path = {leaf_path(keys): value for keys, value in flat}
    if differing := by_path.keys() ^ leaves(cfg).keys():
        raise ValueError(f"shardings belong to another model; they differ in {', '.join(sorted(differing))}")
    return by_path
