"""Plans whose arrays hold rows of the checkpoint's in another order, some repeatedly: experts in slots, rows in shards.

Only the boxes of the sources change, so the rearranged array is read straight from the files like any other.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dsv3.checkpoint import layout
from dsv3.checkpoint.fill import Array, Source, moved
from dsv3.checkpoint.layout import full_box
from dsv3.checkpoint.plan import Plan
from dsv3.checkpoint.reader import target
from dsv3.config import ModelConfig
from dsv3.model.tensor_parallel import check_shards, row_order
from pallas_kernels.float8 import BLOCK, E4M3


def in_slots(plan: Plan, cfg: ModelConfig, phy2log: np.ndarray, shardings: Mapping[str, Any]) -> Plan:
    """The plan with the decoder's routed experts in physical slots: `phy2log` [L, R] is the expert of each.

    Only slots are planned that this process's devices hold by `shardings` (as `reader.read_leaves` takes them): 50,000
    tensors fill 288 slots of DeepSeek-V3. Raises ValueError for a map that is not of the model's layers and experts.
    """
    phy2log = np.asarray(phy2log)
    _check_map(cfg, phy2log)
    leaves = dict(plan.leaves)
    for path, spec in layout.leaves(cfg).items():
        if "experts" in spec.axes and path.startswith("moe."):
            leaves[path] = tuple(_spread(array, phy2log, shardings.get(path)) for array in plan.leaves[path])
    return dataclasses.replace(plan, leaves=leaves)


def in_shards(plan: Plan, cfg: ModelConfig, shards: int) -> Plan:
    """The plan with fused rows in the order of `tensor_parallel.row_order`, of which each device takes an equal part.

    Raises ValueError where that many devices cannot split the model (`tensor_parallel.check_shards`).
    """
    check_shards(cfg, shards, fp8=any(leaf[0].dtype == E4M3 for leaf in plan.leaves.values()))
    leaves = dict(plan.leaves)
    for path, spec in layout.leaves(cfg).items():
        if (order := row_order(spec, cfg, shards)) is not None:
            leaves[path] = tuple(_in_order(array, order) for array in plan.leaves[path])
    return dataclasses.replace(plan, leaves=leaves)


def gather(array: Array, index: np.ndarray) -> Array:
    """`array` [L, n, ...] at `index` [L, m] of its second axis: [L, m, ...]; nothing is planned where it is -1."""
    sources = [
        source
        for layer, row in enumerate(index)
        for put, take, count in _runs(row)
        for source in _moved(array, layer, slice(take, take + count), put - take)
    ]
    ordered = sorted(sources, key=lambda s: (s.put[0].start, s.put[1].start, s.put[1].stop))
    return dataclasses.replace(array, shape=(*index.shape, *array.shape[2:]), sources=tuple(ordered))


def _moved(array: Array, layer: int, rows: slice, by: int) -> Iterator[Source]:
    """What fills `array[layer, rows]`, shifted on the second axis."""
    for source, part in array.meeting((slice(layer, layer + 1), rows, *full_box(array.shape[2:]))):
        to_view = tuple(t.start - p.start for t, p in zip(source.take, source.put, strict=True))
        put = (part[0], slice(part[1].start + by, part[1].stop + by), *part[2:])
        yield dataclasses.replace(source, take=moved(part, to_view), put=put)


def _spread(array: Array, phy2log: np.ndarray, shardings: Any) -> Array:
    shape = (*phy2log.shape, *array.shape[2:])
    needed = np.zeros(len(phy2log[0]), bool)
    for box in target(dataclasses.replace(array, shape=shape), shardings).shares:
        needed[box[1]] = True
    return gather(array, np.where(needed, phy2log, -1))


def _in_order(array: Array, order: np.ndarray) -> Array:
    """`order` counts rows of weights; block scales have one for each 128 of them."""
    rows = order[::BLOCK] // BLOCK if array.positive else order
    return gather(array, np.broadcast_to(rows, (array.shape[0], len(rows))))


def _runs(index: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Position, value and length of the runs of consecutive values: each lies in one piece of a pre-stacked file."""
    starts = np.flatnonzero((np.diff(index, prepend=-2) != 1) | (index <= 0))
    for start, end in zip(starts, [*starts[1:], len(index)], strict=True):
        if index[start] >= 0:
            yield int(start), int(index[start]), int(end - start)


def _check_map(cfg: ModelConfig, phy2log: np.ndarray) -> None:
    layers, experts = cfg.num_moe_layers, cfg.n_routed_experts
    if phy2log.ndim != 2 or len(phy2log) != layers or not phy2log.size or phy2log.dtype.kind not in "iu":
        raise ValueError(
            f"phy2log is {phy2log.dtype}{list(phy2log.shape)}; it must be integers [{layers} MoE layers, slots]"
        )
    if phy2log.min() < 0 or phy2log.max() >= experts:
        raise ValueError(f"phy2log names experts {phy2log.min()} to {phy2log.max()}; the model has 0 to {experts - 1}")
