"""The routed experts of one layer on one device."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dsv3.model.layers.linear import Index, Numerics, Rows, clamp_gate_up, fp8_rows, layer_slice, plain_rows
from dsv3.model.layers.router import Routing
from dsv3.model.params import E4m3Weight, Fp4Weight, Int4Weight, MoeParams
from dsv3.model.tensor_parallel import ONE_DEVICE, Shards
from pallas_kernels import fp8, grouped
from pallas_kernels.float8 import BLOCK
from pallas_kernels.rows import swiglu
from sharding.experts.placement import Placement
from sharding.experts.rows import Lines


@dataclasses.dataclass(frozen=True)
class ExpertLayer:
    """The experts of layer `index` of a stack, and how their products are computed.

    `placement` maps this stack's experts to replicas; None if all experts are local. It belongs to the stack and not to
    the transport, because `index` counts the layers of this stack only: an MTP module is layer 0 of its own stack, not
    of the main model's. Buffers hold `pairs` (token, expert) pairs; None: all.
    """

    params: MoeParams
    index: Index
    numerics: Numerics
    placement: Placement | None = None
    pairs: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Rows of `dtype`, quantized for FP8 experts: e4m3 `[T, D]` and float32 scales `[T, ceil(D/128)]`."""

    values: jax.Array
    scale: jax.Array
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})


class RouterStats(NamedTuple):
    """Statistics of the routed experts of a layer, or of a step by layer (leading axis L)."""

    counts: jax.Array  # [E] int32, (token, expert) pairs of this rank's rows, without padding
    overflows: jax.Array | None  # [] int32, buffers of this device that overflowed; None: no buffer can overflow
    ids: jax.Array | None = None  # [T, K] uint8 or uint16, the experts of each row, if the step returns them


class RoutedExperts(Protocol):
    """The routed experts as a decoder layer calls them, on one device or several: the contract of `moe`."""

    @property
    def shards(self) -> Shards:
        """The devices that split the rest of the layer."""
        ...

    def __call__(self, x: Any, routing: Routing, layer: ExpertLayer, /) -> tuple[jax.Array, RouterStats]: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertActivations:
    """Rows between the two products of their experts: sorted by expert, each expert's rows padded to whole tiles."""

    inner: jax.Array  # [A, I], e4m3 where the experts have e4m3 values
    scale: jax.Array | None  # float32 scales of FP8 values
    order: grouped.GroupAlignment
    overflow: jax.Array | None  # [] int32, 1 if the pairs exceeded the capacity, else 0; None: they cannot
    weights: jax.Array  # [T, K] float32
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})  # of the rows, and so of their sums


def moe(x: Rows | Quantized | Lines, routing: Routing, layer: ExpertLayer) -> tuple[jax.Array, RouterStats]:
    """Computes the weighted sum of each token's routed experts, all of which are on this device.

    Rows are sorted by expert and padded to whole tiles. The grouped products address expert e of the layer as
    `layer * E + e` in the stack, so no weight is copied and those of idle experts are not read.

    Args:
      x: `[T, D]`; `Quantized` only for experts of e4m3 values, and `Lines` if it was received from other devices.
      routing: experts of this layer, each in 0..E-1; other ids (padding has -1) take no expert.
      layer: `params` are stacks `gate_up` `[L, E, 2 * I, D]` and `down` `[L, E, D, I]`; `index` may be traced.

    Returns:
      y `[T, D]` in the dtype of x, summed in float32, and the (token, expert) pairs of each expert. If there are more
      than `layer.pairs`, `overflows` is 1 and y is undefined.
    """
    activations = gate_up(x, routing, layer)
    return down(activations, layer), RouterStats(activations.order.counts, activations.overflow)


@dataclasses.dataclass(frozen=True)
class LocalExperts:
    """`RoutedExperts`, all on this device."""

    @property
    def shards(self) -> Shards:
        return ONE_DEVICE

    def __call__(self, x: Rows, routing: Routing, layer: ExpertLayer, /) -> tuple[jax.Array, RouterStats]:
        return moe(x, routing, layer)


LOCAL_EXPERTS = LocalExperts()


@jax.named_scope("experts")
def gate_up(x: Rows | Quantized | Lines, routing: Routing, layer: ExpertLayer) -> ExpertActivations:
    """Runs the first half of `moe`: the order of rows, the gate and up projections, and SwiGLU."""
    params, numerics = layer.params, layer.numerics
    K, E = routing.ids.shape[1], _num_experts(params)
    pairs = min(routing.ids.size, numerics.expert_pairs or routing.ids.size)
    stored = jax.tree.leaves(params.gate_up)[0].dtype
    preferred = grouped.choose_tile_m(pairs, E, dtype=stored, backend=numerics.backend)
    tile_m = BLOCK if numerics.fp8_products else preferred
    ids = routing.ids.reshape(-1)
    order = grouped.align_groups(ids, E, tile_m, max_rows=layer.pairs, backend=numerics.backend)
    dtype = x.like.dtype if isinstance(x, Lines) else x.dtype
    overflow = None if layer.pairs is None else order.overflow
    rest = order, overflow, routing.weights, dtype
    token = order.source_row // K  # [A], T where the aligned row is padding
    tiles = _tiles(order, layer)
    if not isinstance(params.gate_up, E4m3Weight):
        assert not isinstance(x, Quantized), "rows are quantized only for experts of e4m3 values"
        product = clamp_gate_up(
            _product(_gather(x if isinstance(x, Lines) else plain_rows(x), token), params.gate_up, tiles, layer),
            numerics,
        )
        return ExpertActivations(swiglu(product, backend=numerics.backend), None, *rest)
    product = _scaled_product(*_aligned_fp8(x, token, numerics), params.gate_up, dtype, tiles)
    how: dict[str, Any] = {"limit": numerics.swiglu_limit, "ue8m0": numerics.ue8m0, "backend": numerics.backend}
    values, scale = fp8.swiglu_quantize(product, used_rows=order.needed, **how)
    return ExpertActivations(values, scale, *rest)


def _aligned_fp8(x: Rows | Quantized | Lines, token: jax.Array, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
    """Returns rows `token` of x as e4m3 `[A, D]` and their scales `[ceil(D/128), A]`; any for those out of range."""
    values: jax.Array | Lines
    if isinstance(x, Lines):
        values, scale = x, x.array(1).T
    elif isinstance(x, Quantized):
        values, scale = x.values, x.scale.T
    else:
        values, scale = fp8_rows(x, numerics)
    return _gather(values, token), scale.at[:, token].get(mode="clip")


def _gather(x: jax.Array | Lines, token: jax.Array) -> jax.Array:
    return x.gather(token) if isinstance(x, Lines) else x.at[token].get(mode="clip")


@jax.named_scope("experts")
def down(activations: ExpertActivations, layer: ExpertLayer) -> jax.Array:
    """Runs the second half of `moe`: the down projections, and the sum of each token `[T, D]`."""
    params, tiles = layer.params, _tiles(activations.order, layer)
    if isinstance(params.down, E4m3Weight):
        assert activations.scale is not None, "experts of e4m3 values quantize the activations between their products"
        out = _scaled_product(activations.inner, activations.scale, params.down, activations.dtype, tiles)
    else:
        out = _product(activations.inner, params.down, tiles, layer)
    return weighted_sum(out, activations).astype(activations.dtype)


def weighted_sum(out: jax.Array, activations: ExpertActivations) -> jax.Array:
    """Returns the weighted sum of each token's aligned rows `out` `[A, D]`, float32 `[T, D]`, in the order of K.

    Each row is weighted as it is read. If rows were gathered before a product with the weights, XLA would write them
    out in float32: 4 K D bytes per token, and the result has 2 D.
    """
    total = jnp.zeros((activations.weights.shape[0], out.shape[1]), jnp.float32)
    rows = activations.order.aligned_row.reshape(activations.weights.shape)
    for k in range(rows.shape[1]):
        row = out.at[rows[:, k]].get(mode="fill", fill_value=0)
        total += activations.weights[:, k, None] * row.astype(jnp.float32)
    return total


def _tiles(order: grouped.GroupAlignment, layer: ExpertLayer) -> dict[str, Any]:
    return {
        "tile_group": order.tile_group,
        "tile_m": order.tile_m,
        "group_offset": layer.index * _num_experts(layer.params),
        "backend": layer.numerics.backend,
    }


def _num_experts(params: MoeParams) -> int:
    """Returns the experts of the stack on this device: E, or `Ed` replicas where they are spread."""
    return jax.tree.leaves(params.gate_up)[0].shape[1]


def _product(rows: jax.Array, weight: jax.Array | Int4Weight, tiles: dict[str, Any], layer: ExpertLayer) -> jax.Array:
    """Multiplies rows that are not quantized."""
    if isinstance(weight, Int4Weight):
        return grouped.int4_grouped_gemm_contiguous(rows, _merge(weight.data), _merge(weight.scale), **tiles)
    if layer.numerics.fp8_products:
        own = layer_slice(weight, layer.index)
        return grouped.trained_gemm_contiguous(rows, own, tiles["tile_group"], backend=tiles["backend"])
    return grouped.grouped_gemm_contiguous(rows, _merge(weight), **tiles)


def _scaled_product(
    values: jax.Array, scale: jax.Array, weight: E4m3Weight, dtype: jnp.dtype, tiles: dict[str, Any]
) -> jax.Array:
    """Multiplies quantized rows."""
    rows, data, block_scale = (values, scale), _merge(weight.data), _merge(weight.scale)
    if isinstance(weight, Fp4Weight):
        powers = _merge(weight.powers)
        return grouped.fp4_grouped_gemm_contiguous(*rows, data, powers, block_scale, out_dtype=dtype, **tiles)
    return grouped.fp8_grouped_gemm_contiguous(*rows, data, block_scale, out_dtype=dtype, **tiles)


def _merge(stack: jax.Array) -> jax.Array:
    """Returns `[L, E, ...]` as `[L * E, ...]`, which moves nothing."""
    return stack.reshape(-1, *stack.shape[2:])
