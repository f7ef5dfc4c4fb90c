"""Rearranges a load plan: experts as replicas, fused rows in the order in which a rank's devices share them.

Only the pieces' boxes change. So a rearranged array is read straight from the files, like any other.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dsv3.checkpoint import layout
from dsv3.checkpoint.boxes import full_box, moved
from dsv3.checkpoint.layout import Piece
from dsv3.checkpoint.load_plan import Array, LoadPlan
from dsv3.checkpoint.reader import sharding_of, shares
from dsv3.config.model import ModelConfig
from dsv3.model.tensor_parallel import check_shards, row_order
from pallas_kernels.float8 import BLOCK, E4M3


def with_replicas(plan: LoadPlan, cfg: ModelConfig, phy2log: np.ndarray, shardings: Mapping[str, Any]) -> LoadPlan:
    """Returns the plan with replicas of the routed experts: `phy2log` [L, Er] names the expert of each.

    L are the decoder's MoE layers, or these and the MTP modules, which otherwise keep their E experts. Only replicas
    that this process's devices hold by `shardings` (as `reader.read_leaves` takes them) are planned, because the 288
    replicas of DeepSeek-V3 take 50,000 tensors. Raises ValueError if the map does not have the model's layers and
    experts.
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
    """Returns the plan with fused rows in the order of `tensor_parallel.row_order`; each device takes an equal part.

    Raises ValueError if `shards` devices cannot split the model (`tensor_parallel.check_shards`).
    """
    check_shards(cfg, shards, fp8=any(leaf[0].dtype == E4M3 for leaf in plan.leaves.values()))
    leaves = dict(plan.leaves)
    for path, spec in layout.leaves(cfg).items():
        if (order := row_order(spec, cfg, shards)) is not None:
            leaves[path] = tuple(_in_order(array, order) for array in plan.leaves[path])
    return dataclasses.replace(plan, leaves=leaves)


def gather(array: Array, index: np.ndarray) -> Array:
    """Returns `array` [L, n, ...] at `index` [L, m] of its second axis, [L, m, ...]; -1 in `index` plans nothing."""
    pieces = [
        piece
        for layer, row in enumerate(index)
        for put, take, count in _runs(row)
        for piece in _shifted(array, layer, slice(take, take + count), put - take)
    ]
    ordered = sorted(pieces, key=lambda p: (p.put[0].start, p.put[1].start, p.put[1].stop))
    return dataclasses.replace(array, shape=(*index.shape, *array.shape[2:]), pieces=tuple(ordered))


def _shifted(array: Array, layer: int, rows: slice, by: int) -> Iterator[Piece]:
    """Returns the pieces that fill `array[layer, rows]`, cut to that box and shifted on the second axis."""
    for piece, part in array.pieces_in((slice(layer, layer + 1), rows, *full_box(array.shape[2:]))):
        to_view = tuple(t.start - p.start for t, p in zip(piece.take, piece.put, strict=True))
        put = (part[0], slice(part[1].start + by, part[1].stop + by), *part[2:])
        yield dataclasses.replace(piece, take=moved(part, to_view), put=put)


def _replicated(array: Array, phy2log: np.ndarray, shardings: Any) -> Array:
    needed = np.zeros(len(phy2log[0]), bool)
    for box in shares((*phy2log.shape, *array.shape[2:]), sharding_of(array, shardings)):
        needed[box[1]] = True
    return gather(array, np.where(needed, phy2log, -1))


def _in_order(array: Array, order: np.ndarray) -> Array:
    """Gathers by `order`, which counts rows of weights; block scales have one row per 128 of them."""
    rows = order[::BLOCK] // BLOCK if array.positive else order
    return gather(array, np.broadcast_to(rows, (array.shape[0], len(rows))))


def _runs(index: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Returns start, value and length of each run of consecutive values: a pre-stacked file gives a run in one go."""
    starts = np.flatnonzero((np.diff(index, prepend=-2) != 1) | (index <= 0))
    for start, end in zip(starts, [*starts[1:], len(index)], strict=True):
        if index[start] >= 0:
            yield int(start), int(index[start]), int(end - start)


def _check_map(cfg: ModelConfig, phy2log: np.ndarray) -> None:
    layers, experts = cfg.num_moe_layers, cfg.n_routed_experts
    may_be = (layers, layers + cfg.num_nextn_predict_layers)
    if phy2log.ndim != 2 or len(phy2log) not in may_be or not phy2log.size or phy2log.dtype.kind not in "iu":
        raise ValueError(
            f"phy2log is {phy2log.dtype}{list(phy2log.shape)}; it must be integers [{layers} MoE layers, replicas]"
        )
    if phy2log.min() < 0 or phy2log.max() >= experts:
        raise ValueError(f"phy2log names experts {phy2log.min()} to {phy2log.max()}; the model has 0 to {experts - 1}")
