"""The routed experts of one layer on one device."""

import dataclasses
from typing import Any, NamedTuple, Protocol

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


class Gated(NamedTuple):
    """Rows between the two products of their experts: sorted by expert, padded to whole tiles."""

    inner: jax.Array  # [A, I], e4m3 where the experts are FP8
    scale: jax.Array | None  # float32 scales of FP8 values
    order: grouped.GroupAlignment
    weights: jax.Array  # [T, K] float32


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
    gated = gate_up(x, topk_ids, topk_weights, params, layer, numerics)
    return down(gated, params, layer, numerics, x.dtype), Tally(gated.order.counts, None)


@jax.named_scope("experts")
def gate_up(
    x: jax.Array | Quantized,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    params: MoeParams,
    layer: Index,
    numerics: Numerics,
) -> Gated:
    """The first half of `moe`: its order of rows, the gate and up projections, and SwiGLU."""
    K, E = topk_ids.shape[1], _num_experts(params)
    pairs = min(topk_ids.size, numerics.expert_pairs or topk_ids.size)
    tile_m = grouped.choose_tile_m(pairs, E, backend=numerics.backend)
    order = grouped.align_groups(topk_ids.reshape(-1), E, tile_m)
    token = order.source_row // K  # [A], T in padding
    tiles = _tiles(order, E, layer, numerics)
    if not isinstance(params.gate_up, Fp8Weight):
        assert isinstance(x, jax.Array), "rows are quantised only for FP8 experts"
        gathered = x.at[token].get(mode="fill", fill_value=0)
        product = grouped.grouped_gemm_contiguous(gathered, _merge(params.gate_up), **tiles)
        return Gated(swiglu(product), None, order, topk_weights)
    if isinstance(x, Quantized):
        values, scale = x.values, x.scale.T
    else:
        values, scale = fp8.quantize_1x128(x, ue8m0=numerics.ue8m0, backend=numerics.backend)
    values = values.at[token].get(mode="fill", fill_value=0)
    scale = scale.at[:, token].get(mode="fill", fill_value=0)
    product = _fp8_product(values, scale, params.gate_up, x.dtype, tiles)
    values, scale = fp8.swiglu_quantize(
        product, ue8m0=numerics.ue8m0, used_rows=order.used_rows(), backend=numerics.backend
    )
    return Gated(values, scale, order, topk_weights)


@jax.named_scope("experts")
def down(gated: Gated, params: MoeParams, layer: Index, numerics: Numerics, dtype: jnp.dtype) -> jax.Array:
    """The second half of `moe`: the down projections, and each token's sum in `dtype`."""
    tiles = _tiles(gated.order, _num_experts(params), layer, numerics)
    if isinstance(params.down, Fp8Weight):
        assert gated.scale is not None, "FP8 experts quantise what is between their products"
        out = _fp8_product(gated.inner, gated.scale, params.down, dtype, tiles)
    else:
        out = grouped.grouped_gemm_contiguous(gated.inner, _merge(params.down), **tiles)
    picked = out.at[gated.order.aligned_row].get(mode="fill", fill_value=0).reshape(*gated.weights.shape, -1)
    return jnp.einsum("tk,tkd->td", gated.weights, picked.astype(jnp.float32)).astype(dtype)


def _tiles(order: grouped.GroupAlignment, num_experts: int, layer: Index, numerics: Numerics) -> dict[str, Any]:
    return {
        "tile_group": order.tile_group,
        "tile_m": order.tile_m,
        "group_offset": layer * num_experts,
        "backend": numerics.backend,
    }


def _num_experts(params: MoeParams) -> int:
    return jax.tree.leaves(params.gate_up)[0].shape[1]


def _fp8_product(
    values: jax.Array, scale: jax.Array, weight: Fp8Weight, dtype: jnp.dtype, tiles: dict[str, Any]
) -> jax.Array:
    data, block_scale = _merge(weight.data), _merge(weight.scale)
    return grouped.fp8_grouped_gemm_contiguous(values, scale, data, block_scale, out_dtype=dtype, **tiles)


def _merge(stack: jax.Array) -> jax.Array:
    """`[L, E, ...]` as `[L * E, ...]`, which moves nothing."""
    return stack.reshape(-1, *stack.shape[2:])
