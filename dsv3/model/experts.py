"""The routed experts of one layer on one device."""

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dsv3.model.linear import Index, Numerics, swiglu
from dsv3.model.params import Fp8Weight, MoeParams
from pallas_kernels import fp8, grouped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Rows of `dtype` as they travel to FP8 experts: e4m3 `[T, D]` and float32 scales `[T, ceil(D/128)]`."""

    values: jax.Array
    scale: jax.Array
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})


class Tally(NamedTuple):
    """What a layer's routed experts count beside their result, or a step's by layer (leading axis L)."""

    counts: jax.Array  # [E] int32, (token, expert) pairs of this rank's rows, without padding
    rounds: jax.Array | None  # [2] int32, rounds of each hop of the transport; None where all experts are local


class RoutedExperts(Protocol):
    """What a decoder layer asks for: `moe`'s contract, wherever the experts live."""

    def __call__(
        self,
        x: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array,
        params: MoeParams,
        layer: Index,
        numerics: Numerics,
        /,
    ) -> tuple[jax.Array, Tally]: ...


@jax.named_scope("experts")
def moe(
    x: jax.Array | Quantized,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    params: MoeParams,
    layer: Index,
    numerics: Numerics,
) -> tuple[jax.Array, Tally]:
    """The weighted sum of each token's routed experts.

    Rows are sorted by expert and padded to whole tiles; the grouped products address expert e of the layer as
    `layer * E + e` in the stack, so no weight is copied and those of idle experts are not read.

    Args:
      x: `[T, D]`; quantised already only where the experts are FP8.
      topk_ids: `[T, K]` int32, experts of this layer, each in 0..E-1; others (padding has -1) take no expert.
      topk_weights: `[T, K]` float32.
      params: the stack of layers, `gate_up` `[L, E, 2 * I, D]` and `down` `[L, E, D, I]`.
      layer: index of the layer in the stack, may be traced.

    Returns:
      y `[T, D]` in the dtype of x, summed in float32, and the (token, expert) pairs each expert worked on.
    """
    (T, K), E = topk_ids.shape, jax.tree.leaves(params.gate_up)[0].shape[1]
    tile_m = grouped.choose_tile_m(T * K, E, backend=numerics.backend)
    rows = grouped.align_groups(topk_ids.reshape(-1), E, tile_m)
    token_of_slot = rows.row_of_slot // K  # T where the slot is padding
    tiles = {
        "tile_group": rows.tile_group,
        "tile_m": tile_m,
        "group_offset": layer * E,
        "backend": numerics.backend,
    }
    if isinstance(params.gate_up, Fp8Weight):
        out = _fp8_experts(x, token_of_slot, params, tiles, numerics)  # [slots, D]
    else:
        assert isinstance(x, jax.Array), "rows are quantised only for FP8 experts"
        out = _plain_experts(x, token_of_slot, params, tiles)
    picked = out.at[rows.slot_of_row].get(mode="fill", fill_value=0).reshape(T, K, -1)
    y = jnp.einsum("tk,tkd->td", topk_weights, picked.astype(jnp.float32))
    return y.astype(x.dtype), Tally(rows.counts, None)


def _plain_experts(x: jax.Array, token_of_slot: jax.Array, params: MoeParams, tiles: dict) -> jax.Array:
    gathered = x.at[token_of_slot].get(mode="fill", fill_value=0)
    inner = swiglu(grouped.grouped_gemm_contiguous(gathered, _merge(params.gate_up), **tiles))
    return grouped.grouped_gemm_contiguous(inner, _merge(params.down), **tiles)


def _fp8_experts(
    x: jax.Array | Quantized, token_of_slot: jax.Array, params: MoeParams, tiles: dict, numerics: Numerics
) -> jax.Array:
    if isinstance(x, Quantized):
        values, scale = x.values, x.scale.T
    else:
        values, scale = fp8.quantize_1x128(x, ue8m0=numerics.ue8m0, backend=numerics.backend)
    values = values.at[token_of_slot].get(mode="fill", fill_value=0)
    scale = scale.at[:, token_of_slot].get(mode="fill", fill_value=0)
    gate_up = _fp8_product(values, scale, params.gate_up, x.dtype, tiles)
    values, scale = fp8.swiglu_quantize(gate_up, ue8m0=numerics.ue8m0, backend=numerics.backend)
    return _fp8_product(values, scale, params.down, x.dtype, tiles)


def _fp8_product(values: jax.Array, scale: jax.Array, weight: Fp8Weight, dtype: jnp.dtype, tiles: dict) -> jax.Array:
    data, block_scale = _merge(weight.data), _merge(weight.scale)
    return grouped.fp8_grouped_gemm_contiguous(values, scale, data, block_scale, out_dtype=dtype, **tiles)


def _merge(stack: jax.Array) -> jax.Array:
    """`[L, E, ...]` as `[L * E, ...]`, which moves nothing."""
    return stack.reshape(-1, *stack.shape[2:])
