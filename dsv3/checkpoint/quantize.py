"""Weights that are served in another form than a checkpoint holds: plain products rounded to FP8, and INT4 experts.

Both are converted on their devices, one stack after the other, once they are read. A packed INT4 matrix is three
tensors (compressed-tensors): `weight_packed` int32 `[N, K / 8]`, `weight_scale` bfloat16 `[N, K / 32]`, and
`weight_shape`, which says `[N, K]` once more. `hugging_face` calls the first two `weight` and `weight_scale_inv`, as if
they were FP8.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import Sharding

from dsv3.checkpoint.fill import aligned_empty
from dsv3.checkpoint.layout import Piece, leaves, scale_name, stated_shape_name
from dsv3.checkpoint.load_plan import Array, LoadPlan
from dsv3.checkpoint.safetensors_file import NAMES, Tensor
from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp8Weight, Int4Weight, ParamSpec
from pallas_kernels.fp8 import quantize_128x128
from pallas_kernels.grouped import dequantize_int4
from pallas_kernels.int4 import GROUP, VALUES_PER_WORD

Int4Mode = Literal["keep", "fp8", "dequantize"]
"""What INT4 experts become: they stay, or turn into block-scaled FP8, or into the model's dtype."""

WORD = np.dtype(np.int32)
SCALE = np.dtype(ml_dtypes.bfloat16)
_SHAPES: set[np.dtype] = {np.dtype(np.int32), np.dtype(np.int64)}


def is_int4(cfg: ModelConfig, spec: ParamSpec) -> bool:
    """Returns whether a checkpoint of `cfg` holds this parameter as INT4."""
    return cfg.int4_experts and "experts" in spec.axes


def shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of words and scales of a weight `[..., N, K]` in files."""
    *lead, k = shape
    return (*lead, k // VALUES_PER_WORD), (*lead, k // GROUP)


def abstract_int4(shape: tuple[int, ...]) -> Int4Weight:
    """Returns the shapes of words and scales of a weight `[..., N, K]` on devices."""
    *lead, n, k = shape
    return Int4Weight(
        jax.ShapeDtypeStruct((*lead, n, k // VALUES_PER_WORD), WORD),
        jax.ShapeDtypeStruct((*lead, k // GROUP, n), SCALE),
    )


def check_int4(tensors: Mapping[str, Tensor], piece: Piece, findings: Mapping[str, list[str]]) -> None:
    """Adds what is wrong with the headers of a packed matrix to `findings`; one that is missing is found elsewhere."""
    if piece.name not in tensors:
        return
    words, scales = shapes(piece.shape)
    for name, shape, dtype in ((piece.name, words, WORD), (scale_name(piece.name), scales, SCALE)):
        _check(tensors.get(name), name, shape, {dtype}, findings)
    stated = stated_shape_name(piece.name)
    if stated in tensors:
        _check(tensors[stated], stated, (2,), _SHAPES, findings)


def _check(
    tensor: Tensor | None,
    name: str,
    shape: tuple[int, ...],
    dtypes: set[np.dtype],
    findings: Mapping[str, list[str]],
) -> None:
    if tensor is None:
        findings["missing tensors"].append(name)
        return
    where = f"{tensor.name} in {tensor.path.name}"
    if tensor.shape != shape:
        findings["wrong shapes"].append(f"{where} is {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        expected = "/".join(sorted(NAMES[dtype] for dtype in dtypes))
        findings["wrong dtypes"].append(f"{where} is {NAMES[tensor.dtype]}, expected {expected} of an INT4 expert")


def int4_arrays(
    path: str, spec: ParamSpec, pieces: tuple[Piece, ...], tensors: Mapping[str, Tensor]
) -> tuple[Array, Array]:
    """Returns words and scales of a stack of experts, read from the packed matrices of a checkpoint."""
    data, scale = shapes(spec.shape)
    words = tuple(dataclasses.replace(_narrowed(p, VALUES_PER_WORD, p.name), packed=True) for p in pieces)
    scales = tuple(_narrowed(p, GROUP, scale_name(p.name)) for p in pieces)
    return (
        Array(f"{path}.data", data, WORD, words, tensors),
        Array(f"{path}.scale", scale, SCALE, scales, tensors, positive=True),
    )


def _narrowed(piece: Piece, by: int, name: str) -> Piece:
    """Returns the piece of tensor `name`, which has one element for each `by` columns."""

    def shape(wide: tuple[int, ...]) -> tuple[int, ...]:
        return (*wide[:-1], wide[-1] // by)

    def box(wide: tuple[slice, ...]) -> tuple[slice, ...]:
        return (*wide[:-1], slice(wide[-1].start // by, wide[-1].stop // by))

    return Piece(name, shape(piece.shape), shape(piece.view), box(piece.take), box(piece.put))


def converted(weight: Any, mode: Int4Mode, dtype: np.dtype) -> Any:
    """Returns a parameter as it is served: INT4 experts as `mode` says, all else as it is.

    Files have scales `[L, E, N, K / 32]`, which are transposed in any case. Experts are converted on their devices, one
    layer at a time; beside a stack's words its result must fit there.
    """
    if not isinstance(weight, Int4Weight):
        return weight
    where = weight.data.sharding
    served = Int4Weight(weight.data, jax.jit(_transposed, out_shardings=where)(weight.scale))
    if mode != "keep":
        served = jax.jit(_conversion(mode, dtype), out_shardings=where)(served)
    return jax.block_until_ready(served)


def converted_shapes(weight: Any, mode: Int4Mode, dtype: np.dtype) -> Any:
    """Returns the shapes of what `converted` makes of a parameter whose shapes and shardings are given."""
    if not isinstance(weight, Int4Weight):
        return weight
    served = Int4Weight(weight.data, jax.eval_shape(_transposed, weight.scale))
    if mode != "keep":
        served = jax.eval_shape(_conversion(mode, dtype), served)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=weight.data.sharding), served)


def _conversion(mode: Int4Mode, dtype: np.dtype) -> Callable[[Int4Weight], Any]:
    """Returns what converts a stack, one layer at a time."""
    convert = _to_fp8 if mode == "fp8" else functools.partial(_to_plain, dtype=dtype)
    return lambda stack: lax.map(convert, stack)


def _transposed(scale: jax.Array) -> jax.Array:
    return jnp.swapaxes(scale, -1, -2)


def _to_fp8(weight: Int4Weight) -> Fp8Weight:
    return Fp8Weight(*quantize_128x128(dequantize_int4(weight.data, weight.scale, jnp.float32)))


def _to_plain(weight: Int4Weight, dtype: np.dtype) -> jax.Array:
    return dequantize_int4(weight.data, weight.scale, dtype)


def plain_products(plan: LoadPlan, cfg: ModelConfig) -> Iterator[str]:
    """Yields the paths of the leaves of `plan` that a server may keep in FP8 and that are not."""
    for path, spec in leaves(cfg).items():
        if spec.quantizable and len(plan.leaves[path]) == 1:
            yield path


def quantized(stack: jax.Array, *, ue8m0: bool = False, sharding: Sharding | Fp8Weight | None = None) -> Fp8Weight:
    """Rounds a stack `[L, ..., N, K]` to e4m3 with a float32 scale per 128 x 128 values, layer after layer.

    Beside the stack its result must fit on its devices: half the bytes of bfloat16, twice that for a moment on a CPU.
    `ue8m0` rounds scales up to powers of two. `sharding` is that of the result; None leaves it to jax.
    """
    made = jax.block_until_ready(jax.jit(rounding(ue8m0), out_shardings=sharding)(stack))
    return jax.tree.map(_in_huge_pages, made)


def _in_huge_pages(made: jax.Array) -> jax.Array:
    """Returns the same array, where CPUs hold it in memory like that of weights from files (`aligned_empty`).

    jax's own memory has pages of 4 KiB, with which a decode step of one row waits longer for its weights.
    """
    if any(shard.device.platform != "cpu" for shard in made.addressable_shards):
        return made

    def moved(part: jax.Array, device: jax.Device | None) -> jax.Array:
        host = aligned_empty(part.shape, part.dtype)
        host[...] = part
        return jax.device_put(host, device)

    if not made.committed:
        return moved(made, None)
    parts = [moved(shard.data, shard.device) for shard in made.addressable_shards]
    return jax.make_array_from_single_device_arrays(made.shape, made.sharding, parts, dtype=made.dtype)


def quantized_shapes(
    stack: jax.ShapeDtypeStruct, *, ue8m0: bool = False, sharding: Sharding | Fp8Weight | None = None
) -> Fp8Weight:
    """Returns the shapes, dtypes and shardings of what `quantized` makes of such a stack."""
    shapes = jax.eval_shape(rounding(ue8m0), stack)
    apart = sharding if isinstance(sharding, Fp8Weight) else Fp8Weight(sharding, sharding)
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        apart,
        is_leaf=lambda x: x is None,
    )


def rounding(ue8m0: bool) -> Callable[[jax.Array], Fp8Weight]:
    """Returns what rounds a stack, one layer at a time; it can be traced."""
    round_layer = functools.partial(quantize_128x128, ue8m0=ue8m0)
    return lambda layers: Fp8Weight(*lax.map(round_layer, layers))
