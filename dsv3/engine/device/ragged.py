"""The flat batch of a prefill step on the device: chunks of several requests, their tokens one after the other."""

import jax
import jax.numpy as jnp

from dsv3.engine.device.state import NUM_FIELDS
from dsv3.model.batch import AttentionForm, PrefillBatch
from pallas_kernels.search import search

HEADER = 4 + NUM_FIELDS
"""Columns of a chunk on the device before its page table: slot, its tokens, tokens before it, the token that follows
it in the prompt (-1: none, the chunk samples), and sampling parameters."""


def ragged_batch(
    tokens: jax.Array, rows: jax.Array, form: AttentionForm = AttentionForm.ANY, room: int = 0
) -> PrefillBatch:
    """Returns the model's batch of the chunks `rows` `[B, HEADER + Mp]` over `tokens` `[T]`."""
    count, context = rows[:, 1], rows[:, 2]
    ends = jnp.cumsum(count)
    cu_lengths = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    chunk = search(ends, jnp.arange(tokens.shape[0]), side="right")
    chunk = jnp.minimum(chunk, rows.shape[0] - 1)
    positions = jnp.maximum(context[chunk] + jnp.arange(tokens.shape[0]) - cu_lengths[chunk], 0)
    return PrefillBatch(tokens, positions, cu_lengths, context, rows[:, HEADER:], form, room)


def last_rows(batch: PrefillBatch) -> jax.Array:
    """Returns the row of each chunk's last token, `[B]`; some row for padding."""
    return jnp.maximum(batch.cu_lengths[1:] - 1, 0)


def next_tokens(batch: PrefillBatch, rows: jax.Array, sampled: jax.Array) -> jax.Array:
    """Returns the token that follows each token of the batch, `[T]`: in the prompt, or `sampled` `[B]` at its end."""
    count, follows = rows[:, 1], rows[:, 3]
    last = jnp.where(count > 0, last_rows(batch), batch.tokens.shape[0])
    after = jnp.where(follows < 0, jnp.maximum(sampled, 0), follows)
    return jnp.roll(batch.tokens, -1).at[last].set(after, mode="drop")
