"""Boxes of arrays: how they meet, how they shift, and the contiguous blocks that an array is read or written in."""

import itertools
import math
from collections.abc import Iterator

Box = tuple[slice, ...]
"""One slice per axis, each with a start and a stop."""


def full_box(shape: tuple[int, ...]) -> Box:
    """Returns the box that covers all of `shape`."""
    return tuple(slice(0, n) for n in shape)


def extents(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
    return tuple(s.stop - s.start for s in box)


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the box that two boxes share; None if they share nothing."""
    box = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return box if all(s.start < s.stop for s in box) else None


def moved(box: Box, by: tuple[int, ...]) -> Box:
    """Returns the box shifted on each axis."""
    return tuple(slice(s.start + d, s.stop + d) for s, d in zip(box, by, strict=True))


def block_axis(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, int]:
    """Returns the axis to cut blocks on, and how many of its indices one block of at most `limit` bytes takes.

    A block fixes all axes before that one, so its bytes are contiguous. Raises ValueError if one element exceeds
    `limit`.
    """
    for axis in range(len(shape)):
        unit = math.prod(shape[axis + 1 :]) * itemsize
        if unit <= limit:
            return axis, max(1, min(shape[axis], limit // unit))
    raise ValueError(f"no block of {limit} bytes fits an array of shape {shape} with {itemsize}-byte elements")


def num_blocks(shape: tuple[int, ...], itemsize: int, limit: int) -> int:
    """Returns how many blocks of at most `limit` bytes tile an array; raises ValueError as `block_axis` does."""
    if not math.prod(shape):
        return 0
    axis, count = block_axis(shape, itemsize, limit)
    return math.prod(shape[:axis]) * -(-shape[axis] // count)


def blocks(shape: tuple[int, ...], itemsize: int, inside: Box, limit: int) -> Iterator[tuple[int, Box]]:
    """Returns number and box of each block that meets `inside`; all blocks of at most `limit` bytes tile the array."""
    yield from grid(shape, *block_axis(shape, itemsize, limit), inside)


def grid(shape: tuple[int, ...], axis: int, count: int, inside: Box) -> Iterator[tuple[int, Box]]:
    """Returns number and box of each block that meets `inside`.

    A block is `count` indices of `axis`, all before it fixed.
    """
    per_prefix = -(-shape[axis] // count)
    for prefix in itertools.product(*(range(s.start, s.stop) for s in inside[:axis])):
        before = sum(i * math.prod(shape[a + 1 : axis]) for a, i in enumerate(prefix)) * per_prefix
        fixed = tuple(slice(i, i + 1) for i in prefix)
        for j in range(inside[axis].start // count, -(-inside[axis].stop // count)):
            here = slice(j * count, min((j + 1) * count, shape[axis]))
            yield before + j, (*fixed, here, *full_box(shape[axis + 1 :]))
