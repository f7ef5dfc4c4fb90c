"""C++ for a CPU: products of few rows, attention, norms and routing; each active weight is read once, in place.

`build.py` builds it from the C++ files beside it at first use; here it is as jax functions.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import invariance, tuned
from pallas_kernels.float8 import BLOCK, E4M3
from pallas_kernels.native.build import Library as Library
from pallas_kernels.native.build import library

DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
"""Types of operands. Results are of the same type, or float32."""

MAX_ROWS = 32
"""Most rows of a product for the C++ kernels where none was measured: at 32 XLA is about as fast."""

PRODUCT = "product on a CPU"
"""The kernel of measured choices between C++ and XLA."""
CPP, XLA = "C++", "XLA"


def takes(dtype: jax.typing.DTypeLike, rows: int, weights: tuple[int, ...] | None = None) -> bool:
    """Returns whether the kernels multiply `rows` rows of this type.

    They multiply any number of e4m3 rows, since XLA would widen them first, and rows of any type where the bits of
    XLA's result would depend on their number.
    With the shape of `weights`, `[L, N, K]`, the choice may have been measured.
    """
    if rows <= 0 or jnp.dtype(dtype) not in DTYPES:
        return rows > 0 and jnp.dtype(dtype) == E4M3
    few = rows <= MAX_ROWS or invariance.required()
    if weights is None:
        return few
    shape: tuple[int | str, ...] = (rows, *weights[1:], jnp.dtype(dtype).name)
    shape += ("of a stack" if weights[0] > 1 else "alone",)
    return tuned.choose(PRODUCT, shape, CPP if few else XLA, lambda: (CPP, XLA)) == CPP


def layer_product(x: jax.Array, w: jax.Array, layer: jax.Array | int, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns `x @ w[layer].T` `[M, N]` of x `[M, K]` and w `[L, N, K]`; sums are float32."""
    made = x.dtype if out_dtype == x.dtype else jnp.float32
    return _call("LayerProduct", ((x.shape[0], w.shape[1]), made))(x, w, _index(layer)).astype(out_dtype)


def head_product(x: jax.Array, w: jax.Array, layer: jax.Array | int, transposed: bool) -> jax.Array:
    """Returns `x[:, h] @ w[layer, h].T` `[M, H, N]` of x `[M, H, K]` and w `[L, H, N, K]`.

    With `transposed` w is `[L, H, K, N]`, without the `.T`.
    """
    shape = (*x.shape[:2], w.shape[3 if transposed else 2])
    return _call("HeadProduct", (shape, x.dtype))(x, w, _index(layer), transposed=transposed)


def grouped_product(x: jax.Array, w: jax.Array, tile_group: jax.Array, group_offset: jax.Array | int) -> jax.Array:
    """Returns `x[rows of tile] @ w[group_offset + tile_group[tile]].T` for every tile; 0 for tiles of group -1.

    Shapes are those of `grouped_gemm_contiguous`. Adjacent tiles of one group are one product.
    """
    shape = (x.shape[0], w.shape[1])
    return _call("GroupedProduct", (shape, x.dtype))(x, w, tile_group.astype(jnp.int32), _index(group_offset))


def fp8_grouped_product(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    group_offset: jax.Array | int,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Does `grouped_product` of block-scaled e4m3; shapes are those of `fp8_grouped_gemm_contiguous`.

    Scales multiply the float32 rows before the sums, not after every 128 of K as on Hopper.
    """
    operands = (x, x_scale, w, w_scale, tile_group.astype(jnp.int32), _index(group_offset))
    return _call("Fp8GroupedProduct", ((x.shape[0], w.shape[1]), out_dtype))(*operands)


def fp4_grouped_product(
    x: jax.Array,
    x_scale: jax.Array,
    w: jax.Array,
    w_powers: jax.Array,
    w_scale: jax.Array,
    tile_group: jax.Array,
    group_offset: jax.Array | int,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Does `fp4_grouped_gemm_contiguous` with the bits of `fp8_grouped_product`."""
    operands = (x, x_scale, w, w_powers, w_scale, tile_group.astype(jnp.int32), _index(group_offset))
    return _call("Fp4GroupedProduct", ((x.shape[0], w.shape[1]), out_dtype))(*operands)


def int4_grouped_product(
    x: jax.Array, w: jax.Array, w_scale: jax.Array, tile_group: jax.Array, group_offset: jax.Array | int
) -> jax.Array:
    """Does `grouped_product` with INT4 weights; shapes are those of `int4_grouped_gemm_contiguous`.

    The bits are those of the product with dequantized weights.
    """
    operands = (x, w, w_scale, tile_group.astype(jnp.int32), _index(group_offset))
    return _call("Int4GroupedProduct", ((x.shape[0], w.shape[1]), x.dtype))(*operands)


def quantize_rows(x: jax.Array, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """Returns `[G, M, K]` e4m3 and scales `[G, ceil(K / 128), M]` of x `[G, M, K]` float32, as `quantize_1x128`."""
    groups, rows, depth = x.shape
    values, scale = (x.shape, E4M3), ((groups, -(-depth // BLOCK), rows), jnp.float32)
    return _call("QuantizeRows", values, scale)(x, power_of_two=power_of_two)


def align_rows(group_ids: jax.Array, num_groups: int, tile_m: int, aligned: int) -> tuple[jax.Array, ...]:
    """Returns the fields of `GroupAlignment` for ids `[M]` int32, in their order, for A = `aligned`."""
    shapes = ((aligned,), group_ids.shape, (aligned // tile_m,), (num_groups,), (), ())
    return _call("AlignGroups", *((shape, jnp.int32) for shape in shapes))(group_ids)


def choose_experts(scores: jax.Array, num_experts: int, groups: int, kept: int, counted: int) -> jax.Array:
    """Returns the indices `[T, num_experts]` int32 of the highest scores of each row `[T, E]` float32, highest first.

    They come from the `kept` best of `groups` groups, ranked by the sum of their `counted` highest scores. One group is
    no restriction. The order of floats, NaN included, is that of `jax.lax.top_k`.
    """
    call = _call("ChooseExperts", ((scores.shape[0], num_experts), jnp.int32))
    return call(scores, groups=np.int64(groups), kept=np.int64(kept), counted=np.int64(counted))


def takes_rows(x: jax.Array) -> bool:
    """Returns whether the row functions support x."""
    return x.dtype in DTYPES and x.size > 0


def rms_norm(x: jax.Array, w: jax.Array, layer: jax.Array, *, eps: float) -> jax.Array:
    """Computes `rows.rms_norm`; w has the dtype of x."""
    out = (*x.shape[:-1], w.shape[-1]), x.dtype
    return _call("RmsNorm", out)(x, w, _index(layer), eps=np.float32(eps))


def swiglu(gate_up: jax.Array) -> jax.Array:
    """Computes `rows.swiglu`."""
    return _call("SwiGlu", ((*gate_up.shape[:-1], gate_up.shape[-1] // 2), gate_up.dtype))(gate_up)


def rotate_heads(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Computes `rows.rotate_heads`."""
    return _call("RotateHeads", (x.shape, x.dtype))(x, cos, sin)


def latent_rows(
    down: jax.Array, w: jax.Array, layer: jax.Array, cos: jax.Array, sin: jax.Array, *, eps: float
) -> jax.Array:
    """Computes `rows.latent_rows`; w has the dtype of down."""
    out = (down.shape[0], w.shape[-1] + 2 * cos.shape[-1]), down.dtype
    return _call("LatentRows", out)(down, w, _index(layer), cos, sin, eps=np.float32(eps))


def attends(q: jax.Array, keys: jax.Array) -> bool:
    """Returns whether attention supports these types of queries, and of pages or keys."""
    return q.dtype == keys.dtype and q.dtype in DTYPES


def decode_attention(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int,
    value_width: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes `mla_decode`; `first_page` is the layer's first page in the pool. Weights stay float32."""
    out, lse = ((*q.shape[:3], value_width), q.dtype), (q.shape[:3], jnp.float32)
    operands = (q, pages, page_table.astype(jnp.int32), lengths.astype(jnp.int32), _index(first_page))
    return _call("DecodeAttention", out, lse)(*operands, scale=np.float32(scale))


def context_attention(
    q: jax.Array,
    pages: jax.Array,
    page_table: jax.Array,
    context_lengths: jax.Array,
    cu_lengths: jax.Array,
    *,
    scale: float,
    first_page: jax.Array | int,
    value_width: int,
) -> tuple[jax.Array, jax.Array]:
    """Computes `mla_prefill_context`; `first_page` is the layer's first page in the pool."""
    out, lse = ((*q.shape[:2], value_width), q.dtype), (q.shape[:2], jnp.float32)
    numbers = (each.astype(jnp.int32) for each in (page_table, context_lengths, cu_lengths))
    call = _call("ContextAttention", out, lse)
    return call(q, pages, *numbers, _index(first_page), scale=np.float32(scale))


def prefill_attention(
    q: jax.Array, k: jax.Array, shared_key: jax.Array, v: jax.Array, cu_lengths: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Computes `mla_prefill` of keys in two parts; the shared one `[T, P]` may be empty."""
    out, lse = (v.shape, q.dtype), (q.shape[:2], jnp.float32)
    call = _call("PrefillAttention", out, lse)
    return call(q, k, shared_key, v, cu_lengths.astype(jnp.int32), scale=np.float32(scale))


def _call(handler: str, *results: tuple[tuple[int, ...], jax.typing.DTypeLike]):
    """Returns the handler as a function of one result, or a tuple, of these shapes and dtypes."""
    shapes = [jax.ShapeDtypeStruct(*result) for result in results]
    result = shapes if len(shapes) > 1 else shapes[0]
    return jax.ffi.ffi_call(library().targets[handler], result, vmap_method="sequential")


def _index(value: jax.Array | int) -> jax.Array:
    return jnp.asarray(value, jnp.int32)
