"""Compressed attention in jax.numpy: every query copies the rows that it attends to."""

import jax
import jax.numpy as jnp

from pallas_kernels.compressed.entry_row import decode_rows
from pallas_kernels.compressed.row_list import RowList

_LEAST = -1e30  # below every logit


def attend(
    q: jax.Array, sink: jax.Array, own: jax.Array, window: RowList, entries: RowList | None, *, scale: float, plain: int
) -> tuple[jax.Array, jax.Array]:
    """See `attend_compressed` and `attend_part`."""
    copies, visible = [], []
    for rows in (window,) if entries is None else (window, entries):
        (_, _, width), (_, listed) = rows.array.shape, rows.numbers.shape
        copied = (
            rows.array.reshape(-1, width)
            .at[rows.layer * rows.layer_rows + jnp.maximum(rows.numbers, 0)]
            .get(mode="clip")
        )
        if rows is window:
            new = own.at[jnp.maximum(-1 - rows.numbers, 0)].get(mode="clip")
            copied = jnp.where((rows.numbers < 0)[..., None], new, copied)
        copies.append(copied)
        visible.append(jnp.arange(listed) < rows.counts[:, None])
    values = decode_rows(jnp.concatenate(copies, axis=1), plain, q.shape[-1], q.dtype)
    seen = jnp.concatenate(visible, axis=1)
    values = jnp.where(seen[..., None], values, 0)  # a weight of 0 does not undo NaN
    out, lse = sink_attention(q[:, None], values, seen[:, None], sink, scale)
    return out[:, 0], lse[:, 0]


@jax.named_scope("attend")
def sink_attention(
    q: jax.Array, keys: jax.Array, visible: jax.Array, sink: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Returns what heads see `[B, T, H, d]`, weighted sums of `keys`, which are the values too, and lse `[B, T, H]`.

    Args:
      q: `[B, T, H, d]`.
      keys: `[B, S, d]`, tokens and entries in any order.
      visible: bool `[B, T, S]`.
      sink: float32 `[H]`, the logit of a key whose value is zero, which every query sees; -inf where there is none.
      scale: factor on the products of queries and keys.
    """
    logits = jnp.einsum("bthd,bsd->bths", q, keys, preferred_element_type=jnp.float32, precision="highest") * scale
    logits = jnp.where(visible[:, :, None], logits, -jnp.inf)
    highest = jnp.maximum(jnp.maximum(logits.max(-1), sink), _LEAST)
    weights = jnp.exp(logits - highest[..., None])
    total = weights.sum(-1) + jnp.exp(sink - highest)
    seen = total > 0
    weights = (weights / jnp.where(seen, total, 1)[..., None]).astype(keys.dtype)
    out = jnp.einsum("bths,bsd->bthd", weights, keys, precision="highest")
    return out, jnp.where(seen, highest + jnp.log(total), jnp.inf)
