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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dsv3.checkpoint.fp4 import Fp4Mode, StoredFp4, convert_fp4, convert_fp4_shapes
from dsv3.checkpoint.hugging_face import plan_hf, to_deepseek_names
from dsv3.checkpoint.layout import leaf_path, leaves
from dsv3.checkpoint.load_plan import (
    Box,
    Fp8Mode,
    LoadPlan,
    PlannedArray,
    device_shards,
    extents,
    sharding_of,
    with_replicas,
    with_row_order,
)
from dsv3.checkpoint.quantize import (
    FP4,
    INT4,
    Int4Mode,
    convert_int4,
    convert_int4_shapes,
    packed_form,
    plain_products,
    quantize_stack,
    quantize_stack_shapes,
)
from dsv3.checkpoint.reader import CheckpointReader, PendingReads, aligned_empty, group_reads
from dsv3.checkpoint.safetensors_file import CheckpointError, raise_findings, read_directory, tensors_in_memory
from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp8Weight, Int4Weight, Params, declare
from pallas_kernels.float8 import BLOCK, E4M3

Advance = Callable[[int], None]

TOGETHER_BYTES = 8 << 30
"""Bound on host memory of shards that are read together, so that blocks of several devices are read once."""
AHEAD_BYTES = 256 << 20
"""Bound on host memory of arrays that are read ahead.

The disk must not idle between small arrays: a layer has about 20, and a norm is 14 KB.
"""
_EVERY_S = 60.0
_COPIES = 2  # rounds of shards in host memory: one is read while the previous one is copied to devices


def read_leaves(
    plan: LoadPlan,
    shardings: Mapping[str, Any],
    *,
    progress: bool,
    threads: int = 8,
    convert: Mapping[str, Callable[[Any], Any]] = types.MappingProxyType({}),
    before: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[str, Any]]:
    """Yields path and parameter in the order of the plan: `jax.Array`s, or `Fp8Weight`s or `Int4Weight`s of them.

    `shardings` has a `Sharding`, or an `Fp8Weight` of two, by leaf path; a leaf without one goes to the default device.
    Only files with data for this process's devices are opened. Host memory holds one shard of one array, or several
    that need the same blocks (up to `TOGETHER_BYTES`), the shards before while they are copied to devices, and up to
    `AHEAD_BYTES` of the next. A CPU device adopts the memory instead of copying it. `convert` has functions by leaf
    path, each of which is applied before the next leaf is read. `before` is called with a leaf's path before the
    devices get it.

    Raises `CheckpointError` if a file cannot be read or is damaged, or if tensors that must be equal differ.
    """
    leaves = [[(a, sharding_of(a, shardings.get(path))) for a in arrays] for path, arrays in plan.leaves.items()]
    needed = [
        (array, box) for leaf in leaves for array, sharding in leaf for box in device_shards(array.shape, sharding)
    ]
    total = plan.bytes_to_compare + sum(array.bytes_to_read(box) for array, box in needed)
    with CheckpointReader(threads, plan.arrays) as reader, reporter(total, "loading", shown=progress) as advance:
        reader.open(tensor.path for pair in plan.equal for tensor in pair)
        check_duplicates(reader, plan, advance)
        reader.open(path for array, box in needed for path in array.files(box))
        copies: deque[list[jax.Array]] = deque()
        read = _arrays(reader, [pair for leaf in leaves for pair in leaf], advance, copies)
        for path, leaf in zip(plan.leaves, leaves, strict=True):
            before(path)
            value = _leaf([array for array, _ in leaf], list(itertools.islice(read, len(leaf))))
            if path in convert:
                _wait_for_copies(copies)  # pending ones hold the memory of the leaf
                value = convert[path](value)
            yield path, value
        _wait_for_copies(copies)


def _wait_for_copies(copies: deque[list[jax.Array]], most: int = 0) -> None:
    """Waits until at most so many rounds of copies to devices are in flight."""
    while len(copies) > most:
        jax.block_until_ready(copies.popleft())


def check_duplicates(reader: CheckpointReader, plan: LoadPlan, advance: Advance) -> None:
    """Raises `CheckpointError` if a tensor that must repeat another (an MTP module's embedding or head) differs."""
    for a, b in plan.equal:
        if not reader.same_bytes(a, b, advance):
            raise CheckpointError(f"{a.path}: tensor {a.name}: differs from {b.name}, which it must repeat")


@contextmanager
def reporter(total: int, verb: str, *, shown: bool) -> Iterator[Advance]:
    """Shows a progress bar over `total` bytes, then a line with bytes, seconds and throughput, on standard error.

    Without a terminal it logs a line per minute instead. Unless `shown`, the last line is logged too.
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


def _leaf(arrays: Sequence[PlannedArray], values: Sequence[Any]) -> Any:
    """Returns a parameter from the values of its arrays: data alone, or with scales."""
    if len(values) == 1:
        return values[0]
    return _PAIRS[arrays[0].dtype](*values)


_PAIRS: dict[np.dtype, Callable[..., Any]] = {E4M3: Fp8Weight, INT4.data: Int4Weight, FP4.data: StoredFp4}


def _arrays(
    reader: CheckpointReader,
    arrays: Sequence[tuple[PlannedArray, Sharding | None]],
    advance: Advance,
    copies: deque[list[jax.Array]],
) -> Iterator[jax.Array]:
    """Yields the arrays on their devices, in order."""
    rounds = _read_ahead(reader, arrays, advance)
    for number, several in itertools.groupby(rounds, lambda each: each[0]):
        array, sharding = arrays[number]
        devices = device_shards(array.shape, sharding)
        on_devices: list[jax.Array] = []
        for _, hosts in several:
            sent = [
                jax.device_put(host, to) for box, host in hosts.items() for to in _shardings_of(devices[box], sharding)
            ]
            hosts.clear()  # before the next ones are allocated
            copies.append(sent)
            _wait_for_copies(copies, _COPIES - 1)
            on_devices += sent
        if sharding is None:
            yield on_devices[0]
        else:
            yield jax.make_array_from_single_device_arrays(array.shape, sharding, on_devices, dtype=array.dtype)


def _read_ahead(
    reader: CheckpointReader, arrays: Sequence[tuple[PlannedArray, Sharding | None]], advance: Advance
) -> Iterator[tuple[int, dict[Box, np.ndarray]]]:
    """Yields an array's number and shards of it in host memory, once they are read; reads `AHEAD_BYTES` ahead."""
    in_flight: deque[tuple[int, dict[Box, np.ndarray], PendingReads]] = deque()

    def finished() -> tuple[int, dict[Box, np.ndarray]]:
        number, hosts, reads = in_flight.popleft()
        reads.wait()
        return number, hosts

    for number, (array, sharding) in enumerate(arrays):
        for boxes in group_reads(array, list(device_shards(array.shape, sharding)), TOGETHER_BYTES):
            nbytes = sum(math.prod(extents(box)) for box in boxes) * array.dtype.itemsize
            while in_flight and nbytes + _host_bytes(in_flight) > AHEAD_BYTES:
                yield finished()
            hosts = {box: aligned_empty(extents(box), array.dtype) for box in boxes}
            in_flight.append((number, hosts, reader.start_read(array, hosts.items(), advance)))
    while in_flight:
        yield finished()


def _host_bytes(rounds: Iterable[tuple[int, dict[Box, np.ndarray], PendingReads]]) -> int:
    return sum(host.nbytes for _, hosts, _ in rounds for host in hosts.values())


def _shardings_of(devices: Sequence[jax.Device], sharding: Sharding | None) -> Sequence[Sharding | None]:
    """Returns the shardings of copies of one shard: None is the default device."""
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
    fp4: Fp4Mode = "fp8",
    shardings: Params | Sharding | None = None,
    phy2log: np.ndarray | None = None,
    tensor_parallel_size: int = 1,
    progress: bool = True,
    threads: int = 8,
    shapes: bool = False,
) -> Params:
    """Reads a checkpoint directory into parameters on their devices.

    `dtype` is float32, bfloat16, float16, or None for the embedding's dtype in the checkpoint. All parameters have it,
    with three exceptions. The router's bias is float32. The router's weights are float32, unless the checkpoint stores
    them in `dtype` (`ParamSpec.dtype_in`). FP8 products become `Fp8Weight`s under `fp8` "keep"; "dequantize" multiplies
    them out; "quantize" keeps them and quantizes the other products too. kv_b_proj (`k_up`, `v_up`) is always
    dequantized, because absorbed attention runs in bfloat16, and so is the first of DeepSeek-V4's output projections.
    INT4 experts become `Int4Weight`s under `int4` "keep", `Fp8Weight`s under "fp8", and of `dtype` under "dequantize".
    FP4 experts become `Fp8Weight`s of the same values under `fp4` "fp8", `Fp4Weight`s under "keep", and of `dtype`
    under `fp8` "dequantize".

    `shardings` is one `jax.sharding.Sharding` for all leaves, or a tree like the parameters' with a `Sharding` per leaf
    (or an `Fp8Weight` of two, for data and scales). Each process reads only the shards of its devices. None means the
    default device.

    `phy2log` [L, Er] int (`sharding.experts.eplb.ExpertMap`) is the expert of each replica. The decoder's routed
    experts are then `[L, Er, ...]` instead of `[L, E, ...]`, and so are those of the MTP modules if the map has layers
    for them. `tensor_parallel_size` reorders fused rows by `tensor_parallel.row_order`, so that each device of a rank
    has an equal part.

    With `shapes` only headers are read, and the leaves are `jax.ShapeDtypeStruct`s with shardings.

    Host memory holds the arrays that stay on the host, one array (one device's shard of it), and at most 24 MiB of
    scratch per thread if values are converted.

    Raises `CheckpointError`, with file and tensor, if the checkpoint does not match `cfg`. Raises ValueError for
    options that do not fit the model.
    """
    if int4 not in get_args(Int4Mode):
        raise ValueError(f"int4 {int4!r} is not one of {', '.join(get_args(Int4Mode))}")
    if fp4 not in get_args(Fp4Mode):
        raise ValueError(f"fp4 {fp4!r} is not one of {', '.join(get_args(Fp4Mode))}")
    where = _by_path(cfg, shardings)
    quantized = plain_products if fp8 == "quantize" else lambda *_: ()
    plan = _plan(Path(directory), cfg, dtype, fp8, where, phy2log, tensor_parallel_size)
    planned = PlannedParams(plan, cfg, (fp8, int4, fp4), where, tuple(quantized(plan, cfg)))
    values = planned.shapes() if shapes else dict(planned.read(progress=progress, threads=threads))
    return jax.tree.unflatten(jax.tree.structure(declare(cfg)), list(values.values()))


def plan_params(
    source: Path | Mapping[str, Any],
    cfg: ModelConfig,
    served: Mapping[str, Any],
    *,
    dtype: Any,
    fp8: Fp8Mode,
    int4: Int4Mode,
    fp4: Fp4Mode,
    phy2log: np.ndarray | None = None,
    tensor_parallel_size: int = 1,
) -> "PlannedParams":
    """Plans to read a directory, or arrays by the names of its tensors, in place of the parameters `served`.

    `served` has `jax.ShapeDtypeStruct`s with shardings by leaf path, or an `Fp8Weight` (or the like) of two. Each leaf
    keeps its type: values are converted as they are read, and a plain product is quantized where an FP8 one is served.
    The other arguments are those of `load_params`, at which the parameters were loaded. Raises `CheckpointError` where
    the tensors are not those of the model, or a leaf cannot have the form that is served; it names all of them.
    """
    where = {path: _shardings_like(leaf) for path, leaf in served.items()}
    plan = _plan(source, cfg, dtype, fp8, where, phy2log, tensor_parallel_size)
    leaves = {path: _in_type_of(served[path], leaf) for path, leaf in plan.leaves.items()}
    plan = dataclasses.replace(plan, leaves=leaves)
    quantized = tuple(path for path in plain_products(plan, cfg) if isinstance(served[path], Fp8Weight))
    planned = PlannedParams(plan, cfg, (fp8, int4, fp4), where, quantized)
    found = {path: form_of(leaf) for path, leaf in planned.shapes().items()}
    wrong = [
        f"{path} is {found[path]}, but {form_of(leaf)} is served"
        for path, leaf in served.items()
        if form_of(leaf) != found[path]
    ]
    raise_findings(plan.directory, {"parameters in another form": wrong})
    return planned


def form_of(leaf: Any) -> str:
    """Returns dtypes and shapes of a leaf's arrays, as text."""
    return " and ".join(f"{np.dtype(x.dtype).name}{list(x.shape)}" for x in jax.tree.leaves(leaf))


def _shardings_like(leaf: Any) -> Any:
    """Returns the sharding of a leaf's array; of two, an `Fp8Weight` of both, as `read_leaves` takes it."""
    arrays = jax.tree.leaves(leaf)
    return arrays[0].sharding if len(arrays) == 1 else Fp8Weight(*(x.sharding for x in arrays))


def _in_type_of(served: Any, leaf: tuple[PlannedArray, ...]) -> tuple[PlannedArray, ...]:
    """Returns a planned leaf with the dtype that is served, where both are one plain array of a like dtype."""
    if len(leaf) > 1 or not hasattr(served, "dtype"):
        return leaf
    like = jnp.issubdtype(served.dtype, jnp.integer) == jnp.issubdtype(leaf[0].dtype, jnp.integer)
    return (dataclasses.replace(leaf[0], dtype=np.dtype(served.dtype)),) if like else leaf


@dataclasses.dataclass(frozen=True)
class PlannedParams:
    """Parameters to read: the plan, the modes in which `load_params` serves quantized weights, shardings by leaf path.

    Plain products in `quantized` become FP8.
    """

    plan: LoadPlan
    cfg: ModelConfig
    modes: tuple[Fp8Mode, Int4Mode, Fp4Mode]
    shardings: Mapping[str, Any]
    quantized: tuple[str, ...]

    def shapes(self) -> dict[str, Any]:
        """Returns the shapes, with shardings, of what `read` yields; reads nothing."""
        convert, found = self._conversions(shapes=True), {}
        for path, arrays in self.plan.leaves.items():
            where = [sharding_of(array, self.shardings.get(path)) for array in arrays]
            pairs = zip(arrays, where, strict=True)
            leaf = _leaf(arrays, [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to) for a, to in pairs])
            found[path] = convert[path](leaf) if path in convert else leaf
        return found

    def read(
        self, *, progress: bool, threads: int, before: Callable[[str], None] = lambda _: None
    ) -> Iterator[tuple[str, Any]]:
        """Yields path and value of each leaf, as `read_leaves`."""
        convert = self._conversions(shapes=False)
        return read_leaves(
            self.plan, self.shardings, progress=progress, threads=threads, convert=convert, before=before
        )

    def _conversions(self, *, shapes: bool) -> dict[str, Callable[[Any], Any]]:
        """Returns the conversions, by path, of leaves that are served in another format than stored; those of `shapes`.

        Raises ValueError where experts are too narrow to stay FP4.
        """
        fp8, int4, fp4 = self.modes
        from_int4, from_fp4, to_fp8 = (
            (convert_int4_shapes, convert_fp4_shapes, quantize_stack_shapes)
            if shapes
            else (convert_int4, convert_fp4, quantize_stack)
        )
        dtype = self.plan.leaves["embed"][0].dtype
        conversions: dict[str, Callable[[Any], Any]] = {}
        for path, spec in leaves(self.cfg).items():
            form = packed_form(self.cfg, spec)
            if form is INT4:
                conversions[path] = functools.partial(from_int4, mode=int4, dtype=dtype)
            elif form is FP4:
                to = dtype if fp8 == "dequantize" else fp4
                if to == "keep" and spec.shape[-1] % BLOCK:
                    raise ValueError(
                        f"fp4 'keep' needs experts whose inputs have multiples of {BLOCK} values, but {path} has "
                        f"{spec.shape[-1]}; choose 'fp8'"
                    )
                conversions[path] = functools.partial(from_fp4, array=self.plan.leaves[path][0], to=to)
        ue8m0 = self.cfg.fp8 is not None and self.cfg.fp8.scale_fmt == "ue8m0"
        for path in self.quantized:
            conversions[path] = functools.partial(to_fp8, ue8m0=ue8m0, sharding=self.shardings.get(path))
        return conversions


def _plan(
    source: Path | Mapping[str, Any],
    cfg: ModelConfig,
    dtype: Any,
    fp8: Fp8Mode,
    where: Mapping[str, Any],
    phy2log: np.ndarray | None,
    tensor_parallel_size: int,
) -> LoadPlan:
    """Plans the load of replicas of experts, and of rows in the order of tensor parallelism."""
    with _collector_paused():
        plan = plan_directory(source, cfg, dtype, fp8)
        if phy2log is not None:
            plan = with_replicas(plan, cfg, phy2log, where)
        if tensor_parallel_size > 1:
            plan = with_row_order(plan, cfg, tensor_parallel_size)
    if plan.skipped_mtp_layers:
        _log.info("%s: layers that make drafts, from %d on, are not loaded", plan.directory, plan.skipped_mtp_layers[0])
    return plan


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses the garbage collector while a load is planned.

    Planning makes millions of small objects without cycles, and the collector would traverse them again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def plan_directory(source: Path | Mapping[str, Any], cfg: ModelConfig, dtype: Any, fp8: Fp8Mode) -> LoadPlan:
    """Plans the load of a directory, or of arrays by the names of its tensors; `dtype` and `fp8` as in `load_params`.

    Raises `CheckpointError` if the tensors do not match `cfg`, ValueError for an unknown `dtype` or `fp8`.
    """
    dtype = None if dtype is None else np.dtype(dtype)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype {dtype} is not one of {', '.join(map(str, DTYPES))}")
    if fp8 not in get_args(Fp8Mode):
        raise ValueError(f"fp8 {fp8!r} is not one of {', '.join(get_args(Fp8Mode))}")
    arrays: dict[Path, Any] = {}
    if isinstance(source, Path):
        directory, tensors = source, read_directory(source)
    else:
        directory, tensors = Path("the mapping of tensors"), tensors_in_memory(source)
        arrays = {tensors[name].path: array for name, array in source.items()}
    if cfg.compressed is None:  # only DeepSeek-V4 has these names
        tensors = to_deepseek_names(directory, tensors)
    return dataclasses.replace(plan_hf(directory, tensors, cfg, dtype, fp8), arrays=arrays)


def _by_path(cfg: ModelConfig, shardings: Params | Sharding | None) -> dict[str, Any]:
    if shardings is None:
        return {}
    if isinstance(shardings, Sharding):
        return dict.fromkeys(leaves(cfg), shardings)
    flat, _ = jax.tree_util.tree_flatten_with_path(shardings, is_leaf=lambda x: isinstance(x, Fp8Weight))
    by_path = {leaf_path(keys): value for keys, value in flat}
    if differing := by_path.keys() ^ leaves(cfg).keys():
        raise ValueError(
            f"shardings do not match the model's parameters; they differ in {', '.join(sorted(differing))}"
        )
    return by_path
