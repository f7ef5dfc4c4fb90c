"""What one rank's step works on: the arrays that the engine fills and the model reads.

The engine carries them with a leading rank axis. The step body sees one rank (no such axis). Shapes are buckets: rows
beyond the live ones are padding, marked by a length of 0.

Both batches say with `chooses` what the host knows of sparse attention: whether a query may see more tokens than an
indexer chooses. False: none does, so attention is dense. None: the step looks while it runs, for which a GPU's host
would wait in every layer. Dense models do not read it. `expands` of prefill is the host's word too. Above 0 a step
attends to cached tokens in expanded form: dense (`layers/context.py`), or masked where it chooses (`layers/masked.py`).
All tokens of its requests, those of each in whole pages, are no more than that.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """A flat ragged batch: chunks of up to B requests one after the other in T rows.

    Chunk b occupies rows `cu_lengths[b]` to `cu_lengths[b + 1]`; rows from `cu_lengths[B]` on are padding. Its request
    already has `context_lengths[b]` tokens in its pages; the chunk's own tokens follow them. Without `has_context` all
    of these are 0, which the compiled step relies on.
    """

    tokens: Any  # [T] int32
    positions: Any  # [T] int32
    cu_lengths: Any  # [B + 1] int32
    context_lengths: Any  # [B] int32
    page_table: Any  # [B, Mp] int32, entries beyond a request's pages are never read
    has_context: bool = dataclasses.field(default=True, metadata={"static": True})
    chooses: bool | None = dataclasses.field(default=None, metadata={"static": True})
    expands: int = dataclasses.field(default=0, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """B requests with S query tokens each (1 + drafts).

    `lengths` counts a request's tokens including these S, so its queries have positions `lengths - S` and on. A row of
    length 0 is inactive: nothing is written for it and its output means nothing.
    """

    tokens: Any  # [B, S] int32
    lengths: Any  # [B] int32
    page_table: Any  # [B, Mp] int32
    chooses: bool | None = dataclasses.field(default=None, metadata={"static": True})


def split_prefill(batch: PrefillBatch) -> tuple[PrefillBatch, PrefillBatch]:
    """Splits a batch by rows; a chunk cut in two finds its first part in the cache as context."""
    T = batch.tokens.shape[0]
    middle = T // 2
    first = jnp.minimum(batch.cu_lengths, middle)
    earlier = dataclasses.replace(
        batch, tokens=batch.tokens[:middle], positions=batch.positions[:middle], cu_lengths=first
    )
    later = dataclasses.replace(
        batch,
        tokens=batch.tokens[middle:],
        positions=batch.positions[middle:],
        cu_lengths=jnp.maximum(batch.cu_lengths, middle) - middle,
        context_lengths=batch.context_lengths + jnp.diff(first),
        has_context=True,
    )
    return earlier, later


def split_decode(batch: DecodeBatch) -> tuple[DecodeBatch, DecodeBatch]:
    """Splits a batch by requests, in equal halves."""
    middle = batch.lengths.shape[0] // 2
    return jax.tree.map(lambda a: a[:middle], batch), jax.tree.map(lambda a: a[middle:], batch)
