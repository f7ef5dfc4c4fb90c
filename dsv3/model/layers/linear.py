"""Products with stacked weights: one function for plain and for FP8 weights, and for FP8 products in training."""

import dataclasses

import jax
import jax.numpy as jnp

from dsv3.config.model import ModelConfig
from dsv3.model.params import Fp8Weight, MlpParams
from pallas_kernels import dense, fp8
from pallas_kernels.backend import Backend
from pallas_kernels.rows import swiglu

Index = jax.Array | int
"""Index of a layer in a stack: static, or traced by a scan over the layers."""


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How products are computed.

    `backend` is the kernels' implementation. `ue8m0` says whether activation scales are powers of two. `expert_pairs`
    is the expected number of (token, expert) pairs of a device per layer, None if unknown: the buffers in which they
    arrive hold several times as many. With `fp8_products`, an option of training, linear layers and experts quantize
    weights that are no `Fp8Weight` and multiply in e4m3, with gradients. `swiglu_limit` bounds gate and up projections,
    see `clamp_gate_up`.
    """

    backend: Backend | None = None
    ue8m0: bool = False
    expert_pairs: int | None = None
    fp8_products: bool = False
    swiglu_limit: float | None = None

    @classmethod
    def from_config(cls, cfg: ModelConfig, backend: Backend | None, tokens: int | None = None) -> "Numerics":
        """Returns the numerics of a checkpoint of `cfg` on `backend`, for `tokens` per device.

        With even routing a device computes as many (token, expert) pairs as it sends.
        """
        pairs = None if tokens is None else max(1, tokens * cfg.num_experts_per_tok)
        ue8m0 = cfg.fp8 is not None and cfg.fp8.scale_fmt == "ue8m0"
        return cls(backend, ue8m0, pairs, swiglu_limit=cfg.swiglu_limit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """Rows that a kernel has made together with what products with FP8 weights take of them."""

    rows: jax.Array  # [T, D]
    values: jax.Array  # [T, D] e4m3, as `fp8.quantize_1x128` gives them
    scale: jax.Array  # [D / 128, T] float32

    @property
    def dtype(self) -> jnp.dtype:
        """That of the rows."""
        return self.rows.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """`(T, D)`."""
        return self.rows.shape


Rows = jax.Array | QuantizedRows
"""Rows `[T, D]` of activations, quantized already or not."""


def plain_rows(x: Rows) -> jax.Array:
    """Returns the rows as they are."""
    return x.rows if isinstance(x, QuantizedRows) else x


def fp8_rows(x: Rows, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
    """Returns what `fp8.quantize_1x128` does of the rows."""
    if isinstance(x, QuantizedRows):
        return x.values, x.scale
    return fp8.quantize_1x128(x, ue8m0=numerics.ue8m0, backend=numerics.backend)


def linear(x: Rows, weight: jax.Array | Fp8Weight, layer: Index, numerics: Numerics) -> jax.Array:
    """Returns `x` `[T, in]` times layer `layer` of the stack `weight` `[L, out, in]`, in the dtype of x: `[T, out]`.

    With an `Fp8Weight`, x is quantized per row and 128 channels. GPU kernels address the layer in the stack, because a
    slice by a traced index would be a copy. Sums are float32.
    """
    if isinstance(weight, Fp8Weight):
        return _fp8_linear(*fp8_rows(x, numerics), weight, layer, x.dtype, numerics)
    x = plain_rows(x)
    if numerics.fp8_products:
        return fp8.trained_gemm(x, layer_slice(weight, layer), backend=numerics.backend)
    return dense.layer_gemm(x, weight, layer, backend=numerics.backend)


def mlp(x: Rows, params: MlpParams, layer: Index, numerics: Numerics) -> jax.Array:
    """Returns SwiGLU of `x` `[T, D]`: the MLP of a dense layer, or the shared expert."""
    gate_up = linear(x, params.gate_up, layer, numerics)
    if isinstance(params.down, Fp8Weight):
        values, scale = fp8.swiglu_quantize(
            gate_up, limit=numerics.swiglu_limit, ue8m0=numerics.ue8m0, backend=numerics.backend
        )
        return _fp8_linear(values, scale, params.down, layer, x.dtype, numerics)
    inner = swiglu(clamp_gate_up(gate_up, numerics), backend=numerics.backend)
    return linear(inner, params.down, layer, numerics)


def clamp_gate_up(gate_up: jax.Array, numerics: Numerics) -> jax.Array:
    """Returns `[..., 2 * F]` as SwiGLU takes it: the gate bounded from above, the up projection on both sides."""
    limit = numerics.swiglu_limit
    if limit is None:
        return gate_up
    is_up = jnp.arange(gate_up.shape[-1]) >= gate_up.shape[-1] // 2
    return jnp.clip(gate_up, jnp.where(is_up, -limit, -jnp.inf).astype(gate_up.dtype), limit)


def layer_slice(stack: jax.Array, layer: Index) -> jax.Array:
    """Returns layer `layer` of a stack `[L, ...]`: `[...]`."""
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def _fp8_linear(
    values: jax.Array, scale: jax.Array, weight: Fp8Weight, layer: Index, dtype: jnp.dtype, numerics: Numerics
) -> jax.Array:
    return fp8.fp8_gemm(
        values, scale, weight.data, weight.scale, layer=layer, out_dtype=dtype, backend=numerics.backend
    )
