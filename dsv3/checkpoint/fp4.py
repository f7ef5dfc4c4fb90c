"""FP4 weights of DeepSeek-V4's routed experts: e2m1 codes, two in a byte, with an e8m0 scale per 32 columns.

In a file a matrix is two tensors: `X.weight` int8 `[N, K / 2]`, the low four bits of a byte being the even column, and
`X.scale` e8m0 `[N, K / 32]`, multiplied. Stacks are converted on their devices, one layer after the other.

Both forms that are served, FP8 and FP4, stand for the same e4m3 values in blocks of 128 x 128. A block has no room for
groups whose scales lie too far below its largest one; such a checkpoint is refused.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsv3.checkpoint.load_plan import PlannedArray
from dsv3.checkpoint.safetensors_file import CheckpointError
from dsv3.model.params import Fp4Weight, Fp8Weight
from pallas_kernels import fp4
from pallas_kernels.float8 import BLOCK, E4M3
from pallas_kernels.fp4 import GROUP, GROUPS, HEADROOM

Fp4Mode = Literal["fp8", "keep"]
"""How FP4 experts are served: as block-scaled FP8 with the same values, or as FP4."""

MAX_SPREAD: dict[Fp4Mode, int] = {"fp8": 14, "keep": fp4.MAX_SPREAD}
"""How many binary places a group's scale may lie below the largest of its block: in FP8, 0.5 would become 0 at 15."""

_BIAS = 127  # of e8m0, and of float32
_LEAST = HEADROOM + 1 - _BIAS  # scales of blocks are normal numbers of float32
_PAIRS = GROUP // 2  # bytes of a group


def decode(packed: Any, scale: Any, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the values `[..., N, K]` of FP4 codes. Float32 holds them exactly, down to 2**-126.

    Args:
      packed: int8 `[..., N, K / 2]`.
      scale: e8m0 `[..., N, K / 32]`.
      dtype: of the result, to which values are rounded once.
    """
    return _scaled(_bytes(packed), _power(_exponents(scale)), dtype)


def to_fp8(packed: Any, scale: Any) -> tuple[Fp8Weight, jax.Array]:
    """Returns the same values in blocks of FP8, and how many places each group's scale lies below its block's largest.

    The values are the same if no element of the second result, int32 `[..., N, K / 32]`, is above `MAX_SPREAD`. It is 0
    for groups of zeros, whose scale says nothing. Arguments are those of `decode`.
    """
    raw = _bytes(packed)
    block_scale, spread = _blocks_of(raw, _exponents(scale))
    data = _scaled(raw, _power(HEADROOM - jnp.minimum(spread, MAX_SPREAD["fp8"])), E4M3)
    return Fp8Weight(data, block_scale), spread


def to_words(packed: Any, scale: Any) -> tuple[Fp4Weight, jax.Array]:
    """Returns the same values in the form of kernels, and how far each group's scale lies below its block's largest.

    Results and arguments are those of `to_fp8`; 128 divides K.
    """
    raw = _bytes(packed)
    block_scale, spread = _blocks_of(raw, _exponents(scale))
    codes = jnp.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)
    powers = fp4.pack_powers(jnp.minimum(spread, fp4.MAX_SPREAD))
    return Fp4Weight(fp4.pack(codes), powers, block_scale), spread


def _blocks_of(raw: jax.Array, exponents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns scales of blocks, and places `[..., N, K / 32]` that groups lie below the largest of their block."""
    *lead, N, groups = exponents.shape
    used = ((raw & 0x77) > 0).reshape(*lead, N, groups, _PAIRS).any(-1)
    largest = _largest(jnp.where(used, exponents, _LEAST))
    of_group = jnp.repeat(jnp.repeat(largest, BLOCK, axis=-2)[..., :N, :], GROUPS, axis=-1)[..., :groups]
    return _power(largest - HEADROOM), jnp.where(used, of_group - exponents, 0)


def _scaled(raw: jax.Array, factor: jax.Array, dtype: Any) -> jax.Array:
    """Returns the values `[..., N, K]` of bytes times their group's factor `[..., N, K / 32]`, rounded to `dtype`.

    Even and odd columns are joined last, when they have few bytes.
    """
    factors, table = jnp.repeat(factor, _PAIRS, axis=-1), jnp.asarray(fp4.VALUES)
    both = [(table[codes] * factors).astype(dtype) for codes in (raw & 15, raw >> 4)]
    return jnp.stack(both, axis=-1).reshape(*raw.shape[:-1], -1)


def _bytes(packed: Any) -> jax.Array:
    return lax.bitcast_convert_type(jnp.asarray(packed), jnp.uint8)


def _exponents(scale: Any) -> jax.Array:
    return lax.bitcast_convert_type(jnp.asarray(scale), jnp.uint8).astype(jnp.int32) - _BIAS


def _power(exponents: jax.Array) -> jax.Array:
    """Returns two to the power of int32 `exponents`, exactly; float32."""
    return lax.bitcast_convert_type((exponents + _BIAS) << 23, jnp.float32)


def _largest(exponents: jax.Array) -> jax.Array:
    """Returns the largest of each block of 128 rows and four groups."""
    *lead, N, groups = exponents.shape
    padding = [(0, 0)] * len(lead) + [(0, -N % BLOCK), (0, -groups % GROUPS)]
    padded = jnp.pad(exponents, padding, constant_values=_LEAST)
    return padded.reshape(*lead, -(-N // BLOCK), BLOCK, -(-groups // GROUPS), GROUPS).max((-3, -1))


class StoredFp4(NamedTuple):
    """A stack of experts as files have them: `data` int8 `[L, E, N, K / 2]`, `scale` e8m0 `[L, E, N, K / 32]`."""

    data: Any
    scale: Any


def convert_fp4(weight: StoredFp4, array: PlannedArray, to: Fp4Mode | np.dtype) -> Any:
    """Converts FP4 experts, whose codes were read as `array`, to FP8, to words, or to an array of a dtype.

    Device memory must hold a stack's codes and its result.

    Raises:
      CheckpointError: blocks have no room for some values.
    """
    made = jax.block_until_ready(jax.jit(_conversion(to), out_shardings=weight.data.sharding)(weight))
    if not isinstance(to, str):
        return made
    converted, worst = made
    for shard in worst.addressable_shards:
        found = np.asarray(shard.data)[:, :, 0]
        if (found[..., 0] > MAX_SPREAD[to]).any():
            layer, expert = np.unravel_index(found[..., 0].argmax(), found.shape[:2])
            start = [s.indices(n)[0] for s, n in zip(shard.index[:2], worst.shape[:2], strict=True)]
            place = start[0] + int(layer), start[1] + int(expert)
            raise _refusal(array, place, *map(int, found[layer, expert]), mode=to)
    return converted


def convert_rows(
    data: np.ndarray, scale: np.ndarray, array: PlannedArray, first: int, to: np.dtype
) -> list[np.ndarray]:
    """Returns layers of a stack of experts as arrays of a dtype, or for e4m3 as data and scales, on the host.

    They have the values of `decode`. One expert at a time is converted.

    Args:
      data: int8 `[L, E, N, K / 2]` of layers `first` and following; `array` is the stack of all codes.
      scale: e8m0 `[L, E, N, K / 32]`.
      to: the dtype.

    Raises:
      CheckpointError: blocks of FP8 have no room for some values.
    """
    made = [_expert(data[i], scale[i], array, (first + i[0], i[1]), to) for i in np.ndindex(data.shape[:2])]
    return [np.stack(parts).reshape(*data.shape[:2], *parts[0].shape) for parts in zip(*made, strict=True)]


def _expert(
    data: np.ndarray, scale: np.ndarray, array: PlannedArray, index: tuple[int, int], to: np.dtype
) -> tuple[np.ndarray, ...]:
    if to != E4M3:
        return (np.asarray(_decoded(data, scale, to)),)
    weight, spread = _blocks(data, scale)
    if (worst := np.asarray(spread).reshape(-1)).max() > MAX_SPREAD["fp8"]:
        raise _refusal(array, index, int(worst.max()), int(worst.argmax()), mode="fp8")
    return np.asarray(weight.data), np.asarray(weight.scale)


_blocks, _decoded = jax.jit(to_fp8), jax.jit(decode, static_argnums=2)


def convert_fp4_shapes(weight: StoredFp4, array: PlannedArray, to: Fp4Mode | np.dtype) -> Any:
    """Returns the shapes of the result of `convert_fp4`, given shapes and shardings."""
    del array
    made = jax.eval_shape(_conversion(to), weight)
    made = made[0] if isinstance(to, str) else made
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=weight.data.sharding), made)


@functools.cache
def _conversion(to: Fp4Mode | np.dtype) -> Callable[[StoredFp4], Any]:
    """Returns the conversion of a stack, one layer at a time; always the same function.

    In blocks it also gives int32 `[L, E, 1, 2]`: of each expert the largest distance of scales, and where it is.
    """
    if not isinstance(to, str):
        return lambda stack: lax.map(lambda layer: decode(layer.data, layer.scale, to), stack)
    in_blocks = to_fp8 if to == "fp8" else to_words

    def convert(layer: StoredFp4) -> tuple[Fp8Weight | Fp4Weight, jax.Array]:
        made, spread = in_blocks(layer.data, layer.scale)
        flat = spread.reshape(len(spread), -1)
        return made, jnp.stack([flat.max(-1), flat.argmax(-1).astype(jnp.int32)], axis=-1)[:, None]

    return lambda stack: lax.map(convert, stack)


def _refusal(array: PlannedArray, index: tuple[int, int], spread: int, where: int, *, mode: Fp4Mode) -> CheckpointError:
    row, group = divmod(where, array.shape[-1] * 2 // GROUP)
    here = (*(slice(i, i + 1) for i in index), slice(row, row + 1), slice(0, array.shape[-1]))
    tensor_slice, _ = next(array.slices_in(here))
    tensor, row = array.tensors[tensor_slice.name], row - tensor_slice.target[-2].start
    fits = "fp4='fp8' or " if spread <= MAX_SPREAD["fp8"] else ""
    return CheckpointError(
        f"{tensor.path}: tensor {tensor.name}: row {row}, columns {group * GROUP} to {(group + 1) * GROUP - 1}: the "
        f"scale is 2**-{spread} of the largest in its block of {BLOCK} x {BLOCK}, and fp4={mode!r} has room for "
        f"2**-{MAX_SPREAD[mode]}; load with {fits}fp8='dequantize'"
    )
