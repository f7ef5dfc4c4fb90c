"""What a load reads: arrays made of pieces of tensors, decided from headers before any weight is read."""

import dataclasses
import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from dsv3.checkpoint.boxes import Box, extents, full_box, intersection
from dsv3.checkpoint.layout import Piece, stated_shape_name
from dsv3.checkpoint.safetensors_file import Tensor

Fp8Mode = Literal["keep", "dequantize", "quantize"]
"""What products are served as: FP8 where the checkpoint has it, the model's dtype, or FP8 whatever it has."""


@dataclasses.dataclass(frozen=True)
class Array:
    """One array to read: a stack, or the scales of one. Its pieces tile it, or the part that this process needs.

    An array of several pieces has each in one index of the first axis. They are ordered by that index, then by where
    they begin and end on the second axis. `tensors` are those of the checkpoint, by name. `positive` marks an array of
    scales, which must be finite and above zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[Piece, ...]
    tensors: Mapping[str, Tensor] = dataclasses.field(repr=False)
    positive: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    def bytes_to_read(self, box: Box) -> int:
        """Returns the bytes in files that fill a box, not counting scales that are multiplied in."""
        found = self.pieces_in(box)
        return sum(self.tensors[piece.name].dtype.itemsize * math.prod(extents(part)) for piece, part in found)

    def files(self, box: Box) -> Iterator[Path]:
        """Returns the files that fill a box; most of them come many times."""
        for piece, _ in self.pieces_in(box):
            yield self.tensors[piece.name].path
            if piece.scale is not None:
                yield self.tensors[piece.scale].path
            if (stated := self.stated_shape(piece)) is not None:
                yield stated.path

    def stated_shape(self, piece: Piece) -> Tensor | None:
        """Returns the tensor that states the shape of a packed piece's matrix, where there is one."""
        return self.tensors.get(stated_shape_name(piece.name)) if piece.packed else None

    def pieces_in(self, box: Box) -> Iterator[tuple[Piece, Box]]:
        """Finds the pieces that meet a box, each with the part of it that it fills, in the array's coordinates."""
        for piece in self._near(box):
            if (part := intersection(piece.put, box)) is not None:
                yield piece, part

    def _near(self, box: Box) -> Iterator[Piece]:
        """Finds the pieces that meet the box on the first two axes, without looking at the thousands that do not."""
        if len(self.pieces) == 1:
            yield self.pieces[0]
            return
        begins, ends = self._order
        for i in range(box[0].start, box[0].stop):
            yield from self.pieces[bisect_right(ends, (i, box[1].start)) : bisect_left(begins, (i, box[1].stop))]

    @functools.cached_property
    def _order(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Each piece's (index of the first axis, begin on the second axis), and the same with its end."""
        boxes = [piece.put for piece in self.pieces]
        return [(b[0].start, b[1].start) for b in boxes], [(b[0].start, b[1].stop) for b in boxes]


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """What to read from a checkpoint directory.

    `leaves` has one array per leaf path, or data and scales. `equal` lists pairs of tensors that must hold the same
    bytes. `skipped_mtp_layers` are the layer numbers of MTP modules that are not loaded.
    """

    directory: Path
    leaves: dict[str, tuple[Array, ...]]
    equal: tuple[tuple[Tensor, Tensor], ...] = ()
    skipped_mtp_layers: tuple[int, ...] = ()

    @property
    def files(self) -> list[Path]:
        """Files that the plan reads."""
        arrays = (path for leaf in self.leaves.values() for a in leaf for path in a.files(full_box(a.shape)))
        pairs = (tensor.path for pair in self.equal for tensor in pair)
        return list(dict.fromkeys((*arrays, *pairs)))

    @property
    def bytes_to_compare(self) -> int:
        """Bytes that comparing the `equal` tensors reads."""
        return sum(a.nbytes + b.nbytes for a, b in self.equal)
