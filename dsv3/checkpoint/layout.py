"""The one table between parameter leaves and Hugging Face tensor names; reading and writing both derive from it.

A leaf of `dsv3.model.params.Params` is a stack over layers (and experts). Its entry in the table lists the checkpoint
tensors of one layer (one expert), in the order of their rows. `slices` expands the table for a configuration. Each
`TensorSlice` maps a box of a tensor to a box of a stack; planning, reading and writing all use these slices.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from dsv3.config.model import ModelConfig
from dsv3.model.params import ParamSpec, declare
from pallas_kernels.float8 import BLOCK

Box = tuple[slice, ...]
"""One slice per axis, each with a start and a stop."""

# A layer after the last decoder layer is an MTP module if it has this tensor.
MTP_MARK = "eh_proj.weight"


@dataclasses.dataclass(frozen=True)
class TensorRows:
    """One checkpoint tensor of a leaf: its name below the layer's prefix, and its rows in the leaf.

    `rows` None: the leaf is this tensor alone. Otherwise the tensor fills `rows` rows of the leaf. A tensor with more
    rows has `of` rows, and the leaf uses `rows` of them from row `skip` on. Example: kv_b_proj holds N key rows and V
    value rows per head; `k_up` uses N of N + V, `v_up` uses V and skips N.
    """

    name: str
    rows: int | None = None
    of: int | None = None
    skip: int = 0


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


def _table(cfg: ModelConfig) -> dict[str, tuple[TensorRows, ...]]:
    """Returns the checkpoint tensors of one layer, by leaf path below `LayerParams`.

    `{e}` stands for the expert's number.
    """
    H, N, V = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.v_head_dim
    queries = (
        TensorRows("self_attn.q_a_proj.weight", cfg.q_lora_rank)
        if cfg.q_lora_rank
        else TensorRows("self_attn.q_proj.weight", H * cfg.qk_head_dim)
    )
    return {
        "input_norm": (TensorRows("input_layernorm.weight"),),
        "post_norm": (TensorRows("post_attention_layernorm.weight"),),
        "post_moe_norm": (TensorRows("post_mlp_layernorm.weight"),),
        "attention.qkv_a": (queries, TensorRows("self_attn.kv_a_proj_with_mqa.weight", cfg.latent_dim)),
        "attention.q_norm": (TensorRows("self_attn.q_a_layernorm.weight"),),
        "attention.q_b": (TensorRows("self_attn.q_b_proj.weight"),),
        "attention.kv_norm": (TensorRows("self_attn.kv_a_layernorm.weight"),),
        "attention.k_up": (TensorRows("self_attn.kv_b_proj.weight", N, of=N + V),),
        "attention.v_up": (TensorRows("self_attn.kv_b_proj.weight", V, of=N + V, skip=N),),
        "attention.o": (TensorRows("self_attn.o_proj.weight"),),
        f"{_INDEXER}q_b": (TensorRows("self_attn.indexer.wq_b.weight"),),
        f"{_INDEXER}k": (TensorRows("self_attn.indexer.wk.weight"),),
        f"{_INDEXER}k_norm": (TensorRows("self_attn.indexer.k_norm.weight"),),
        f"{_INDEXER}k_bias": (TensorRows("self_attn.indexer.k_norm.bias"),),
        f"{_INDEXER}weights": (TensorRows("self_attn.indexer.weights_proj.weight"),),
        "mlp.gate_up": _swiglu("mlp", cfg.intermediate_size),
        "mlp.down": (TensorRows("mlp.down_proj.weight"),),
        "moe.router": (TensorRows("mlp.gate.weight"),),
        "moe.router_bias": (TensorRows("mlp.gate.e_score_correction_bias"),),
        "moe.gate_up": _swiglu("mlp.experts.{e}", cfg.moe_intermediate_size),
        "moe.down": (TensorRows("mlp.experts.{e}.down_proj.weight"),),
        "moe.shared.gate_up": _swiglu("mlp.shared_experts", cfg.n_shared_experts * cfg.moe_intermediate_size),
        "moe.shared.down": (TensorRows("mlp.shared_experts.down_proj.weight"),),
    }


def _swiglu(prefix: str, width: int) -> tuple[TensorRows, ...]:
    return TensorRows(f"{prefix}.gate_proj.weight", width), TensorRows(f"{prefix}.up_proj.weight", width)


_INDEXER = "attention.indexer."
"""Prefix of the leaves of an indexer; layers without one lack these tensors."""

_TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}

_MTP = {
    "embed_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "proj": MTP_MARK,
    "norm": "shared_head.norm.weight",
}


def leaves(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Returns the declared parameters by dotted path ("moe.attention.qkv_a"), in the order of the flattened tree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(declare(cfg))
    return {leaf_path(keys): spec for keys, spec in flat}


def leaf_path(keys: tuple[Any, ...]) -> str:
    """Returns the dotted path of a leaf from its key path in a tree."""
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def slices(cfg: ModelConfig) -> dict[str, tuple[TensorSlice, ...]]:
    """Returns the slices that tile each leaf, by leaf path, in the order of the stack."""
    table = _table(cfg)
    return {path: tuple(_leaf_slices(cfg, table, path, spec)) for path, spec in leaves(cfg).items()}


def duplicates(cfg: ModelConfig) -> tuple[Duplicate, ...]:
    """Returns the tensors that repeat another one: embedding and head of each MTP module, and a tied head."""
    embed = _TOP["embed"]
    head = embed if cfg.tie_word_embeddings else _TOP["head"]
    result = [Duplicate(_TOP["head"], embed, required=False)] if cfg.tie_word_embeddings else []
    for prefix in _prefixes(cfg, "mtp"):
        result.append(Duplicate(f"{prefix}embed_tokens.weight", embed, required=True))
        result.append(Duplicate(f"{prefix}shared_head.head.weight", head, required=True))
    return tuple(result)


def scale_name(name: str) -> str:
    """Returns the name of the block scales of FP8 tensor `name`."""
    return f"{name}_scale_inv"


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


def mtp_layers_beyond(cfg: ModelConfig, names: Iterable[str]) -> set[int]:
    """Returns the layer numbers of a checkpoint's MTP modules that `cfg` does not have."""
    mark = re.compile(r"model\.layers\.(\d+)\." + re.escape(MTP_MARK))
    found = {int(match[1]) for match in map(mark.fullmatch, names) if match}
    return {layer for layer in found if layer >= cfg.num_cache_layers}


def layer_of(name: str) -> int | None:
    """Returns the layer number in a tensor's name."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def _prefixes(cfg: ModelConfig, stack: str, *, with_indexer: bool = False) -> list[str]:
    """Returns the name prefixes of a stack's layers, or only of those `with_indexer`."""
    among = cfg.index_layers if with_indexer else range(cfg.num_cache_layers)
    groups = {name: (first, depth) for name, first, depth in cfg.layer_groups}
    first, count = (groups | {"mtp": (cfg.num_hidden_layers, cfg.num_nextn_predict_layers)})[stack]
    return [f"model.layers.{layer}." for layer in range(first, first + count) if layer in among]


def _leaf_slices(
    cfg: ModelConfig, table: dict[str, tuple[TensorRows, ...]], path: str, spec: ParamSpec
) -> Iterator[TensorSlice]:
    if path in _TOP:
        yield whole_slice(_TOP[path], spec.shape)
        return
    stack, _, rest = path.partition(".")
    rest = rest.removeprefix("layers.")
    parts = (TensorRows(_MTP[rest]),) if stack == "mtp" and rest in _MTP else table[rest]
    experts = spec.shape[1] if "{e}" in parts[0].name else None
    for layer, prefix in enumerate(_prefixes(cfg, stack, with_indexer=rest.startswith(_INDEXER))):
        for index in [(layer,)] if experts is None else [(layer, e) for e in range(experts)]:
            row = 0
            for part in parts:
                yield _tensor_slice(prefix + part.name.format(e=index[-1]), part, index, row, spec.shape)
                row += part.rows or 0


def _tensor_slice(name: str, part: TensorRows, index: tuple[int, ...], row: int, stack: tuple[int, ...]) -> TensorSlice:
    """Returns the slice that fills `stack[*index, ..., row : row + part.rows, :]`."""
    inner = list(stack[len(index) :])
    target = [*(slice(i, i + 1) for i in index), *full_box(stack[len(index) :])]
    if part.rows is not None:
        target[-2] = slice(row, row + part.rows)
        inner[-2] = part.of or part.rows
    view = (*(1 for _ in index), *inner)
    source = list(full_box(view))
    if part.rows is not None:
        source[-2] = slice(part.skip, part.skip + part.rows)
    # A checkpoint tensor is at most a matrix: the heads of kv_b_proj follow each other in its rows.
    shape = (inner[0] * inner[1], inner[2]) if len(inner) == 3 else tuple(inner)
    return TensorSlice(name, shape, view, tuple(source), tuple(target))


def full_box(shape: tuple[int, ...]) -> Box:
    """Returns the box that covers all of `shape`."""
    return tuple(slice(0, n) for n in shape)


def extents(box: Box) -> tuple[int, ...]:
    """Returns the shape of a box."""
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
