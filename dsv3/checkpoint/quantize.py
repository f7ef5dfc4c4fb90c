"""Weights that are served in another format than stored: plain products quantized to FP8, and experts of four bits.

All are converted on their devices, one stack after the other, after they are read. A packed INT4 matrix is three
tensors (compressed-tensors): `weight_packed` int32 `[N, K / 8]`, `weight_scale` bfloat16 `[N, K / 32]`, and
`weight_shape`, which repeats `[N, K]`. `hugging_face` renames the first two to `weight` and `weight_scale_inv`, as for
FP8. A packed FP4 matrix is two (`dsv3.checkpoint.fp4`).
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

from dsv3.checkpoint.layout import TensorSlice, leaves, scale_name, stated_shape_name
from dsv3.checkpoint.load_plan import LoadPlan, PlannedArray
from dsv3.checkpoint.reader import aligned_empty
from dsv3.checkpoint.safetensors_file import Tensor, check_tensor
from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp8Weight, Int4Weight, ParamSpec
from pallas_kernels.float8 import E4M3
from pallas_kernels.fp8 import quantize_128x128
from pallas_kernels.grouped import dequantize_int4
from pallas_kernels.int4 import GROUP, VALUES_PER_WORD

Int4Mode = Literal["keep", "fp8", "dequantize"]
"""How INT4 experts are served: as INT4, as block-scaled FP8, or in the model's dtype."""

_SHAPES: set[np.dtype] = {np.dtype(np.int32), np.dtype(np.int64)}
_SET_FP8 = "; set expert_dtype of config.json to fp8"


@dataclasses.dataclass(frozen=True)
class PackedForm:
    """How a checkpoint stores routed experts of four bits: `per_element` values in one element of type `data`, and a
    scale of type `scale` per `GROUP` columns.
    """

    name: str
    data: np.dtype
    per_element: int
    scale: np.dtype

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of elements and scales of a weight `[..., N, K]` in files."""
        *lead, k = shape
        return (*lead, k // self.per_element), (*lead, k // GROUP)


INT4 = PackedForm("INT4", np.dtype(np.int32), VALUES_PER_WORD, np.dtype(ml_dtypes.bfloat16))
FP4 = PackedForm("FP4", np.dtype(np.int8), 2, np.dtype(ml_dtypes.float8_e8m0fnu))


def packed_form(cfg: ModelConfig, spec: ParamSpec) -> PackedForm | None:
    """Returns how a checkpoint of `cfg` packs this parameter; None if it does not."""
    if "experts" not in spec.axes:
        return None
    return INT4 if cfg.int4_experts else FP4 if cfg.fp4_experts else None


def abstract_int4(shape: tuple[int, ...]) -> Int4Weight:
    """Returns the shapes of words and scales of a weight `[..., N, K]` on devices."""
    *lead, n, k = shape
    return Int4Weight(
        jax.ShapeDtypeStruct((*lead, n, k // VALUES_PER_WORD), INT4.data),
        jax.ShapeDtypeStruct((*lead, k // GROUP, n), INT4.scale),
    )


def check_packed(
    tensors: Mapping[str, Tensor], tensor_slice: TensorSlice, form: PackedForm, findings: Mapping[str, list[str]]
) -> None:
    """Adds header errors of a packed matrix to `findings`; `hugging_face` reports missing ones."""
    tensor = tensors.get(tensor_slice.name)
    if tensor is None:
        return
    data, scales = form.shapes(tensor_slice.shape)
    note = f" of an {form.name} expert"
    is_fp8 = form is FP4 and tensor.dtype == E4M3
    check_tensor(tensor.name, tensor, data, (form.data,), findings, f"{note}{_SET_FP8 if is_fp8 else ''}")
    scale = tensors.get(scale_name(tensor_slice.name))
    if scale is None:
        findings["missing tensors"].append(scale_name(tensor_slice.name))
    else:
        check_tensor(scale.name, scale, scales, (form.scale,), findings, note)
    stated = tensors.get(stated_shape_name(tensor_slice.name))
    if stated is not None:
        check_tensor(stated.name, stated, (2,), _SHAPES, findings, note)


def packed_arrays(
    path: str, spec: ParamSpec, slices: tuple[TensorSlice, ...], tensors: Mapping[str, Tensor], form: PackedForm
) -> tuple[PlannedArray, PlannedArray]:
    """Returns elements and scales of a stack of experts, read from the packed matrices of a checkpoint."""
    data, scale = form.shapes(spec.shape)
    elements = (_narrowed_slice(p, form.per_element, p.name) for p in slices)
    scales = tuple(_narrowed_slice(p, GROUP, scale_name(p.name)) for p in slices)
    return (
        PlannedArray(
            f"{path}.data",
            data,
            form.data,
            tuple(dataclasses.replace(p, packed=form is INT4) for p in elements),
            tensors,
        ),
        PlannedArray(f"{path}.scale", scale, form.scale, scales, tensors, positive=True),
    )


def _narrowed_slice(tensor_slice: TensorSlice, by: int, name: str) -> TensorSlice:
    """Returns the slice of tensor `name`, which has one element for each `by` columns."""

    def shape(wide: tuple[int, ...]) -> tuple[int, ...]:
        return (*wide[:-1], wide[-1] // by)

    def box(wide: tuple[slice, ...]) -> tuple[slice, ...]:
        return (*wide[:-1], slice(wide[-1].start // by, wide[-1].stop // by))

    return TensorSlice(
        name, shape(tensor_slice.shape), shape(tensor_slice.view), box(tensor_slice.source), box(tensor_slice.target)
    )


def convert_int4(weight: Int4Weight, mode: Int4Mode, dtype: np.dtype) -> Any:
    """Converts INT4 experts as `mode` says.

    Scales are stored as `[L, E, N, K / 32]` and always transposed. Experts are converted on their devices, one layer at
    a time; device memory must hold a stack's words and its result. Kept INT4 has the error of bfloat16; FP8 has more,
    because it quantizes activations too.
    """
    where = weight.data.sharding
    served = Int4Weight(weight.data, jax.jit(_transposed, out_shardings=where)(weight.scale))
    if mode != "keep":
        served = jax.jit(_conversion(mode, dtype), out_shardings=where)(served)
    return jax.block_until_ready(served)


def convert_int4_shapes(weight: Int4Weight, mode: Int4Mode, dtype: np.dtype) -> Any:
    """Returns the shapes of the result of `convert_int4`, given shapes and shardings."""
    served = Int4Weight(weight.data, jax.eval_shape(_transposed, weight.scale))
    if mode != "keep":
        served = jax.eval_shape(_conversion(mode, dtype), served)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=weight.data.sharding), served)


@functools.cache
def _conversion(mode: Int4Mode, dtype: np.dtype) -> Callable[[Int4Weight], Any]:
    """Returns the conversion of a stack, one layer at a time; always the same function, which jax compiles once."""

    def convert(weight: Int4Weight) -> Any:
        if mode != "fp8":
            return dequantize_int4(weight.data, weight.scale, dtype)
        return Fp8Weight(*quantize_128x128(dequantize_int4(weight.data, weight.scale, jnp.float32)))

    return lambda stack: lax.map(convert, stack)


def _transposed(scale: jax.Array) -> jax.Array:
    return jnp.swapaxes(scale, -1, -2)


def plain_products(plan: LoadPlan, cfg: ModelConfig) -> Iterator[str]:
    """Yields the paths of the quantizable leaves of `plan` that are not FP8."""
    for path, spec in leaves(cfg).items():
        if spec.quantizable and len(plan.leaves[path]) == 1:
            yield path


def quantize_stack(stack: jax.Array, *, ue8m0: bool = False, sharding: Sharding | Fp8Weight | None = None) -> Fp8Weight:
    """Quantizes a stack `[L, ..., N, K]` to e4m3 with a float32 scale per 128 x 128 values, layer after layer.

    Device memory must hold the stack and its result: half the bytes of bfloat16, for a moment twice that on a CPU.
    `ue8m0` rounds scales up to powers of two. `sharding` is that of the result; None leaves it to jax.
    """
    made = jax.block_until_ready(jax.jit(rounding(ue8m0), out_shardings=sharding)(stack))
    return jax.tree.map(_in_huge_pages, made)


def _in_huge_pages(made: jax.Array) -> jax.Array:
    """Copies an array on CPUs into memory with huge pages (`aligned_empty`).

    jax allocates 4 KiB pages, with which a decode step of one row waits longer for its weights.
    """
    if any(shard.device.platform != "cpu" for shard in made.addressable_shards):
        return made

    def copied(part: jax.Array, device: jax.Device | None) -> jax.Array:
        host = aligned_empty(part.shape, part.dtype)
        host[...] = part
        return jax.device_put(host, device)

    if not made.committed:
        return copied(made, None)
    parts = [copied(shard.data, shard.device) for shard in made.addressable_shards]
    return jax.make_array_from_single_device_arrays(made.shape, made.sharding, parts, dtype=made.dtype)


def quantize_stack_shapes(
    stack: jax.ShapeDtypeStruct, *, ue8m0: bool = False, sharding: Sharding | Fp8Weight | None = None
) -> Fp8Weight:
    """Returns shapes, dtypes and shardings of the result of `quantize_stack`."""
    shapes = jax.eval_shape(rounding(ue8m0), stack)
    shardings = sharding if isinstance(sharding, Fp8Weight) else Fp8Weight(sharding, sharding)
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        shardings,
        is_leaf=lambda x: x is None,
    )


@functools.cache
def rounding(ue8m0: bool) -> Callable[[jax.Array], Fp8Weight]:
    """Returns the function that quantizes a stack, one layer at a time; always the same, which jax compiles once."""
    round_layer = functools.partial(quantize_128x128, ue8m0=ue8m0)
    return lambda layers: Fp8Weight(*lax.map(round_layer, layers))
