"""Plans whose arrays hold parts of the checkpoint's in another order, some of them repeatedly: experts in their slots.

Only the boxes of the sources change, so the rearranged array is read straight from the files like any other.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from dsv3.checkpoint import layout
from dsv3.checkpoint.fill import Array, Source, moved
from dsv3.checkpoint.layout import Box, full_box
from dsv3.checkpoint.plan import Plan
from dsv3.config import ModelConfig

Move = tuple[Box, tuple[int, ...]]
"""A box of an array, and how far it is shifted to its place in the rearranged one."""


def in_slots(plan: Plan, cfg: ModelConfig, phy2log: np.ndarray) -> Plan:
    """The plan with the decoder's routed experts in physical slots: `phy2log` [L, R] is the expert of each.

    Raises ValueError for a map that is not of the model's layers and experts.
    """
    phy2log = np.asarray(phy2log)
    _check(cfg, phy2log)
    leaves = dict(plan.leaves)
    for path, spec in layout.leaves(cfg).items():
        if "experts" in spec.axes and path.startswith("moe."):
            leaves[path] = tuple(_spread(array, phy2log) for array in plan.leaves[path])
    return dataclasses.replace(plan, leaves=leaves)


def rearranged(array: Array, shape: tuple[int, ...], moves: Iterable[Move]) -> Array:
    """An array of `shape` that the moved boxes of `array` tile; a box has one index of the first axis."""
    sources = (source for box, by in moves for source in _moved_sources(array, box, by))
    ordered = sorted(sources, key=lambda s: (s.put[0].start, s.put[1].start, s.put[1].stop))
    return dataclasses.replace(array, shape=shape, sources=tuple(ordered))


def _moved_sources(array: Array, box: Box, by: tuple[int, ...]) -> Iterator[Source]:
    for source, part in array.meeting(box):
        to_view = tuple(t.start - p.start for t, p in zip(source.take, source.put, strict=True))
        yield dataclasses.replace(source, take=moved(part, to_view), put=moved(part, by))


def _spread(array: Array, phy2log: np.ndarray) -> Array:
    """`array` [L, E, ...] as [L, R, ...]."""
    layers, slots = phy2log.shape
    rest = array.shape[2:]
    still = (0,) * len(rest)
    moves = (
        ((slice(layer, layer + 1), slice(expert, expert + count), *full_box(rest)), (0, slot - expert, *still))
        for layer in range(layers)
        for slot, expert, count in _runs(phy2log[layer])
    )
    return rearranged(array, (layers, slots, *rest), moves)


def _runs(experts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Slot, expert and length of the runs of consecutive experts: in the pre-stacked form each is one piece of file."""
    starts = np.flatnonzero(np.diff(experts, prepend=-2) != 1)
    for slot, end in zip(starts, [*starts[1:], len(experts)], strict=True):
        yield int(slot), int(experts[slot]), int(end - slot)


def _check(cfg: ModelConfig, phy2log: np.ndarray) -> None:
    layers, experts = cfg.num_moe_layers, cfg.n_routed_experts
    if phy2log.ndim != 2 or len(phy2log) != layers or not phy2log.size or phy2log.dtype.kind not in "iu":
        raise ValueError(
            f"phy2log is {phy2log.dtype}{list(phy2log.shape)}; it must be integers [{layers} MoE layers, slots]"
        )
    if phy2log.min() < 0 or phy2log.max() >= experts:
        raise ValueError(f"phy2log names experts {phy2log.min()} to {phy2log.max()}; the model has 0 to {experts - 1}")
