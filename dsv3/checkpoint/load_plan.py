"""The plan of a load: arrays made of slices of tensors, computed from headers before any weight is read."""

import dataclasses
import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Sharding

from dsv3.checkpoint import layout
from dsv3.checkpoint.layout import Box, TensorSlice, extents, full_box, intersection, shift_box, stated_shape_name
from dsv3.checkpoint.safetensors_file import Tensor
from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp8Weight
from dsv3.model.tensor_parallel import check_shards, row_order
from pallas_kernels.float8 import BLOCK, E4M3

Fp8Mode = Literal["keep", "dequantize", "quantize"]
"""How products are served: FP8 if the checkpoint has FP8, in the model's dtype, or always in FP8."""


@dataclasses.dataclass(frozen=True)
class PlannedArray:
    """One array to read: a stack, or the scales of one. Its slices tile it, or the part that this process needs.

    If there are several slices, each lies in one index of the first axis; they are ordered by that index, then by begin
    and end on the second axis. `tensors` are those of the checkpoint, by name. `positive` marks an array of scales,
    which must be finite and above zero. With `below` values must be whole numbers from 0 to `below - 1`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    slices: tuple[TensorSlice, ...]
    tensors: Mapping[str, Tensor] = dataclasses.field(repr=False)
    positive: bool = False
    below: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_to_read(self, box: Box) -> int:
        """Returns the bytes in files that fill a box, not counting scales that are multiplied in."""
        found = self.slices_in(box)
        return sum(
            self.tensors[tensor_slice.name].dtype.itemsize * math.prod(extents(part)) for tensor_slice, part in found
        )

    def files(self, box: Box) -> Iterator[Path]:
        """Yields the files that fill a box, with repetitions."""
        for tensor_slice, _ in self.slices_in(box):
            yield self.tensors[tensor_slice.name].path
            if tensor_slice.scale is not None:
                yield self.tensors[tensor_slice.scale].path
            if (stated := self.stated_shape(tensor_slice)) is not None:
                yield stated.path

    def stated_shape(self, tensor_slice: TensorSlice) -> Tensor | None:
        """Returns the tensor that states the shape of a packed matrix, if there is one."""
        return self.tensors.get(stated_shape_name(tensor_slice.name)) if tensor_slice.packed else None

    def slices_in(self, box: Box) -> Iterator[tuple[TensorSlice, Box]]:
        """Yields the slices that intersect a box, each with the part of the box that it fills, in array coordinates."""
        for tensor_slice in self._near(box):
            if (part := intersection(tensor_slice.target, box)) is not None:
                yield tensor_slice, part

    def _near(self, box: Box) -> Iterator[TensorSlice]:
        """Yields the slices that intersect the box on the first two axes, by bisection among thousands."""
        if len(self.slices) == 1:
            yield self.slices[0]
            return
        begins, ends = self._order
        for i in range(box[0].start, box[0].stop):
            yield from self.slices[bisect_right(ends, (i, box[1].start)) : bisect_left(begins, (i, box[1].stop))]

    @functools.cached_property
    def _order(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Each slice's (index of the first axis, begin on the second axis), and the same with its end."""
        boxes = [tensor_slice.target for tensor_slice in self.slices]
        return [(b[0].start, b[1].start) for b in boxes], [(b[0].start, b[1].stop) for b in boxes]


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """The arrays to read from a checkpoint directory.

    `leaves` has one array per leaf path, or data and scales. `equal` lists pairs of tensors that must hold the same
    bytes. `skipped_mtp_layers` are the layer numbers of MTP modules that are not loaded. `arrays` in memory stand for
    files of these paths.
    """

    directory: Path
    leaves: dict[str, tuple[PlannedArray, ...]]
    equal: tuple[tuple[Tensor, Tensor], ...] = ()
    skipped_mtp_layers: tuple[int, ...] = ()
    arrays: Mapping[Path, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def files(self) -> list[Path]:
        arrays = (path for leaf in self.leaves.values() for a in leaf for path in a.files(full_box(a.shape)))
        pairs = (tensor.path for pair in self.equal for tensor in pair)
        return list(dict.fromkeys((*arrays, *pairs)))

    @property
    def bytes_to_compare(self) -> int:
        """Bytes to read for the comparison of the `equal` tensors."""
        return sum(a.nbytes + b.nbytes for a, b in self.equal)


def sharding_of(array: PlannedArray, shardings: Any) -> Sharding | None:
    """Returns the sharding of one array of a leaf; an `Fp8Weight` of shardings has one for data and one for scales."""
    if isinstance(shardings, Fp8Weight):
        return shardings.scale if array.positive else shardings.data
    return shardings


def device_shards(shape: tuple[int, ...], sharding: Sharding | None) -> dict[Box, list[jax.Device]]:
    """Returns the shards of an array on this process's devices: boxes, each with the devices that hold it.

    Without a sharding the only box is the whole array, with an empty list: it goes to the default device.
    """
    if sharding is None:
        return {full_box(shape): []}
    found: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), shape, strict=True))
        found.setdefault(box, []).append(device)
    return found


def with_replicas(plan: LoadPlan, cfg: ModelConfig, phy2log: np.ndarray, shardings: Mapping[str, Any]) -> LoadPlan:
    """Returns the plan with replicas of the routed experts: `phy2log` [L, Er] is the expert of each replica.

    L counts the decoder's MoE layers, or these and the MTP modules, which otherwise keep their E experts. Only replicas
    on this process's devices by `shardings` (as in `load_params`) are planned, because the 288 replicas of DeepSeek-V3
    take 50,000 tensors. Raises ValueError if the map does not have the model's layers and experts.
    """
    phy2log, layers = np.asarray(phy2log), cfg.num_moe_layers
    _check_map(cfg, phy2log)
    by_stack = {"moe": phy2log[:layers], "mtp": phy2log[layers:]}
    leaves = dict(plan.leaves)
    for path, spec in layout.leaves(cfg).items():
        mine = by_stack.get(path.split(".")[0])
        if "experts" in spec.axes and mine is not None and len(mine):
            leaves[path] = tuple(_replicated(array, mine, shardings.get(path)) for array in plan.leaves[path])
    return dataclasses.replace(plan, leaves=leaves)


def with_row_order(plan: LoadPlan, cfg: ModelConfig, shards: int) -> LoadPlan:
    """Returns the plan with fused rows in the order of `tensor_parallel.row_order`, for equal parts per device.

    Raises ValueError if `shards` devices cannot split the model (`tensor_parallel.check_shards`).
    """
    check_shards(cfg, shards, fp8=any(leaf[0].dtype == E4M3 for leaf in plan.leaves.values()))
    leaves = dict(plan.leaves)
    for path, spec in layout.leaves(cfg).items():
        if (order := row_order(spec, cfg, shards)) is not None:
            leaves[path] = tuple(_in_order(array, order) for array in plan.leaves[path])
    return dataclasses.replace(plan, leaves=leaves)


def gather(array: PlannedArray, index: np.ndarray) -> PlannedArray:
    """Returns `array` [L, n, ...] at `index` [L, m] of its second axis, [L, m, ...]; -1 in `index` is not read."""
    slices = [
        tensor_slice
        for layer, row in enumerate(index)
        for target, source, count in _runs(row)
        for tensor_slice in _shifted_slices(array, layer, slice(source, source + count), target - source)
    ]
    ordered = sorted(slices, key=lambda p: (p.target[0].start, p.target[1].start, p.target[1].stop))
    return dataclasses.replace(array, shape=(*index.shape, *array.shape[2:]), slices=tuple(ordered))


def _shifted_slices(array: PlannedArray, layer: int, rows: slice, by: int) -> Iterator[TensorSlice]:
    """Yields the slices that fill `array[layer, rows]`, cut to that box and shifted on the second axis."""
    for tensor_slice, part in array.slices_in((slice(layer, layer + 1), rows, *full_box(array.shape[2:]))):
        to_view = tuple(t.start - p.start for t, p in zip(tensor_slice.source, tensor_slice.target, strict=True))
        target = (part[0], slice(part[1].start + by, part[1].stop + by), *part[2:])
        yield dataclasses.replace(tensor_slice, source=shift_box(part, to_view), target=target)


def _replicated(array: PlannedArray, phy2log: np.ndarray, shardings: Any) -> PlannedArray:
    needed = np.zeros(len(phy2log[0]), bool)
    for box in device_shards((*phy2log.shape, *array.shape[2:]), sharding_of(array, shardings)):
        needed[box[1]] = True
    return gather(array, np.where(needed, phy2log, -1))


def _in_order(array: PlannedArray, order: np.ndarray) -> PlannedArray:
    """Reorders rows by `order`, which counts rows of weights; block scales have one row per 128 of them."""
    rows = order[::BLOCK] // BLOCK if array.positive else order
    return gather(array, np.broadcast_to(rows, (array.shape[0], len(rows))))


def _runs(index: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields start, value and length of each run of consecutive values, which one slice fills."""
    starts = np.flatnonzero((np.diff(index, prepend=-2) != 1) | (index <= 0))
    for start, end in zip(starts, [*starts[1:], len(index)], strict=True):
        if index[start] >= 0:
            yield int(start), int(index[start]), int(end - start)


def _check_map(cfg: ModelConfig, phy2log: np.ndarray) -> None:
    layers, experts = cfg.num_moe_layers, cfg.n_routed_experts
    may_be = (layers, layers + cfg.num_cache_layers - cfg.num_hidden_layers)
    if phy2log.ndim != 2 or len(phy2log) not in may_be or not phy2log.size or phy2log.dtype.kind not in "iu":
        raise ValueError(
            f"phy2log is {phy2log.dtype}{list(phy2log.shape)}; it must be integers [{layers} MoE layers, replicas]"
        )
    if phy2log.min() < 0 or phy2log.max() >= experts:
        raise ValueError(f"phy2log names experts {phy2log.min()} to {phy2log.max()}; the model has 0 to {experts - 1}")
