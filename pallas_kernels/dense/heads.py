"""`head_gemm`: one product per head with one layer of a stack, the up-projections of absorbed attention."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import native
from pallas_kernels.backend import Backend
from pallas_kernels.gemm import dispatch
from pallas_kernels.gemm.checks import check_plain_dtypes, plain_backend
from pallas_kernels.gemm.choice import KERNELS


def head_gemm(
    x: jax.Array,
    w: jax.Array,
    layer: jax.Array | int,
    *,
    transposed: bool = False,
    carried: int = 0,
    backend: Backend | None = None,
) -> jax.Array:
    """Multiplies every head with its weight, `x[:, h] @ w[layer, h].T`, without a copy of `w[layer]`.

    The reference is differentiable. With `carried` the last columns of x stand behind the product, as absorbed queries
    have it. On Hopper the kernel then reads x as it lies, and writes into the wider result: nothing is cut out of the
    one, and only the carried columns are copied to the other.

    Args:
      x: [M, H, K + carried] bfloat16, float16 or float32.
      w: [L, H, N, K] of the same dtype, or [L, H, K, N] if `transposed`, which leaves out the `.T`.
      layer: Python or traced integer.
      transposed: the order of the weight.
      carried: columns of x that no weight meets.
      backend: implementation; None chooses by device.

    Returns:
      [M, H, N + carried] in x's dtype; sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not belong together; on Hopper also N or K that is no multiple of 8.
    """
    _check(x, w, transposed, carried)
    chosen = plain_backend("head_gemm", x.dtype, x.shape[0], backend)
    if carried and chosen is Backend.MOSAIC:
        first = jnp.asarray(layer, jnp.int32) * w.shape[1]
        return dispatch.heads(x, w.reshape(-1, *w.shape[2:]), first, transposed, carried=carried)
    if carried:
        product = head_gemm(x[..., :-carried], w, layer, transposed=transposed, backend=backend)
        return jnp.concatenate([product, x[..., -carried:]], axis=-1)
    if chosen is Backend.NATIVE:
        return native.head_product(x, w, layer, transposed)
    if chosen in KERNELS:
        first = jnp.asarray(layer, jnp.int32) * w.shape[1]
        return KERNELS[chosen].heads(x, w.reshape(-1, *w.shape[2:]), first, transposed)
    # XLA:CPU sums some batched products of bfloat16 in bfloat16, and has none with a float32 result outside of jit.
    x32, w32 = (v.astype(jnp.float32) for v in (x, lax.dynamic_index_in_dim(w, layer, keepdims=False)))
    return jnp.einsum("mhk,hkn->mhn" if transposed else "mhk,hnk->mhn", x32, w32).astype(x.dtype)


def _check(x: jax.Array, w: jax.Array, transposed: bool, carried: int) -> None:
    order, behind = "[L, H, K, N]" if transposed else "[L, H, N, K]", f" + {carried}" if carried else ""
    if x.ndim != 3 or w.ndim != 4 or x.shape[1:] != (w.shape[1], w.shape[2 if transposed else 3] + carried):
        raise ValueError(
            f"head_gemm: needs x [M, H, K{behind}] and w {order} with one H and K, got {x.shape} and {w.shape}"
        )
    check_plain_dtypes("head_gemm", x, w)
