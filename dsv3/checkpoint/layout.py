"""The boxes of checkpoint tensors that make up each parameter leaf.

`slices` expands a family's table (`dsv3.checkpoint.tables`) for a configuration. Each `TensorSlice` maps a box of a
tensor to a box of a stack; planning, reading and writing all use these slices.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax

from dsv3.checkpoint.tables import TensorRows, TensorTable, has_leaf, layer_prefix, scale_name, table_of
from dsv3.config.model import ModelConfig
from dsv3.model.params import ParamSpec, declare
from pallas_kernels.float8 import BLOCK

Box = tuple[slice, ...]
"""One slice per axis, each with a start and a stop."""


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """Box `source` of a tensor is box `target` of a stack.

    The tensor is `name`, of `shape`. `source` counts in `view`, the same tensor reshaped to as many axes as the stack.
    `scale` names the tensor of block scales that reading multiplies in; None: values are read as stored. `packed`
    marks INT4 words, which reading reorders (`pallas_kernels.int4`).
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    source: Box
    target: Box
    scale: str | None = None
    packed: bool = False


@dataclasses.dataclass(frozen=True)
class Duplicate:
    """Tensor `name` repeats tensor `of`: never loaded, compared if present, an error if absent and `required`."""

    name: str
    of: str
    required: bool


def leaves(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Returns the declared parameters by dotted path ("moe.attention.qkv_a"), in the order of the flattened tree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(declare(cfg))
    return {leaf_path(keys): spec for keys, spec in flat}


def leaf_path(keys: tuple[Any, ...]) -> str:
    """Returns the dotted path of a leaf from its key path in a tree."""
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def slices(cfg: ModelConfig) -> dict[str, tuple[TensorSlice, ...]]:
    """Returns the slices that tile each leaf, by leaf path, in the order of the stack."""
    table = table_of(cfg)
    return {path: tuple(_leaf_slices(cfg, table, path, spec)) for path, spec in leaves(cfg).items()}


def duplicates(cfg: ModelConfig) -> tuple[Duplicate, ...]:
    """Returns the tensors that repeat another one: embedding and head of each MTP module, and a tied head.

    DeepSeek-V4 repeats none.
    """
    if cfg.compressed is not None:
        return ()
    top = table_of(cfg).top
    embed = top["embed"]
    head = embed if cfg.tie_word_embeddings else top["head"]
    result = [Duplicate(top["head"], embed, required=False)] if cfg.tie_word_embeddings else []
    for prefix in (layer_prefix(cfg, layer) for layer in _layers(cfg, "mtp")):
        result.append(Duplicate(f"{prefix}embed_tokens.weight", embed, required=True))
        result.append(Duplicate(f"{prefix}shared_head.head.weight", head, required=True))
    return tuple(result)


def stated_shape_name(name: str) -> str:
    """Returns the name of the tensor that states the shape `[N, K]` of packed INT4 tensor `name`."""
    return f"{name}_shape"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the block scales of an FP8 tensor `[..., N, K]`; blocks at the edges may be partial."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


def scale_slice(tensor_slice: TensorSlice) -> TensorSlice:
    """Returns the slice of the scales of `tensor_slice`, whose first row must be a multiple of 128."""
    target = (
        *tensor_slice.target[:-2],
        *(slice(s.start // BLOCK, -(-s.stop // BLOCK)) for s in tensor_slice.target[-2:]),
    )
    view = scale_shape(tensor_slice.view)
    return TensorSlice(scale_name(tensor_slice.name), scale_shape(tensor_slice.shape), view, full_box(view), target)


def whole_slice(name: str, shape: tuple[int, ...]) -> TensorSlice:
    """Returns the slice of a leaf that is one tensor."""
    box = full_box(shape)
    return TensorSlice(name, shape, shape, box, box)


def _layers(cfg: ModelConfig, stack: str) -> range:
    """Returns the cache layers of a stack."""
    groups = {name: range(first, first + depth) for name, first, depth in cfg.layer_groups}
    return (groups | {"mtp": range(cfg.num_hidden_layers, cfg.num_cache_layers)})[stack]


def _leaf_slices(cfg: ModelConfig, table: TensorTable, path: str, spec: ParamSpec) -> Iterator[TensorSlice]:
    if path in table.top:
        name, one_of_stack = table.top[path], spec.axes[0] == "layers"
        yield (
            _tensor_slice(name, TensorRows(name), (0,), (0, 0), spec.shape)
            if one_of_stack
            else whole_slice(name, spec.shape)
        )
        return
    stack, _, rest = path.partition(".")
    of_module = stack == "mtp" and rest in table.module
    rest = rest.removeprefix("layers.")
    parts = table.module[rest] if of_module else table.layer[rest]
    experts = spec.shape[1] if "{e}" in parts[0].name else None
    among = [layer for layer in _layers(cfg, stack) if of_module or has_leaf(cfg, rest, layer)]
    for number, layer in enumerate(among):
        for index in [(number,)] if experts is None else [(number, e) for e in range(experts)]:
            row = column = 0
            for part in parts:
                name = layer_prefix(cfg, layer) + part.name.format(e=index[-1])
                yield _tensor_slice(name, part, index, (row, column), spec.shape)
                row, column = row + (part.rows or 0), column + (part.columns or 0)


def _tensor_slice(
    name: str, part: TensorRows, index: tuple[int, ...], start: tuple[int, int], stack: tuple[int, ...]
) -> TensorSlice:
    """Returns the slice that fills the part of `stack[*index, ...]` that begins at row and column `start`."""
    row, column = start
    inner = list(stack[len(index) :])
    target = [*(slice(i, i + 1) for i in index), *full_box(stack[len(index) :])]
    if part.rows is not None:
        target[-2] = slice(row, row + part.rows)
        inner[-2] = part.of or part.rows
    if part.columns is not None:
        target[-1] = slice(column, column + part.columns)
        inner[-1] = part.columns
    view = (*(1 for _ in index), *inner)
    source = list(full_box(view))
    if part.rows is not None:
        source[-2] = slice(part.skip, part.skip + part.rows)
    # A checkpoint tensor is at most a matrix: heads, or groups of them, follow each other in its rows.
    shape = (inner[0] * inner[1], inner[2]) if len(inner) == 3 else tuple(inner)
    return TensorSlice(name, shape, view, tuple(source), tuple(target))


def full_box(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, n) for n in shape)


def extents(box: Box) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two boxes; None if it is empty."""
    box = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return box if all(s.start < s.stop for s in box) else None


def shift_box(box: Box, by: tuple[int, ...]) -> Box:
    """Returns the box shifted on each axis."""
    return tuple(slice(s.start + d, s.stop + d) for s, d in zip(box, by, strict=True))


def block_axis(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, int]:
    """Returns the axis to cut blocks on, and the indices of it per block of at most `limit` bytes.

    A block fixes all axes before that one, so its bytes are contiguous. Raises ValueError if one element exceeds
    `limit`.
    """
    for axis in range(len(shape)):
        unit = math.prod(shape[axis + 1 :]) * itemsize
        if unit <= limit:
            return axis, max(1, min(shape[axis], limit // unit))
    raise ValueError(f"no block of {limit} bytes fits an array of shape {shape} with {itemsize}-byte elements")


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
