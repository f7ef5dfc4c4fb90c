"""What one rank's step works on: the arrays the engine fills and the model reads.

The engine carries them with a leading rank axis; the step body sees one rank (no such axis). Shapes are buckets:
rows beyond the live ones are padding, marked by a length of 0.
"""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """A flat ragged batch: chunks of up to G requests one after the other in T rows.

    Chunk g occupies rows `cu_lengths[g]` to `cu_lengths[g + 1]`; rows from `cu_lengths[G]` on are padding. Its request
    already has `context_lengths[g]` tokens in its pages; the chunk's own tokens follow them.
    """

    tokens: Any  # [T] int32
    positions: Any  # [T] int32
    cu_lengths: Any  # [G + 1] int32
    context_lengths: Any  # [G] int32
    page_table: Any  # [G, MP] int32, entries beyond a request's pages are never read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """B requests with S query tokens each (1 + drafts).

    `lengths` counts a request's tokens including these S, so its queries stand at positions `lengths - S` and on.
    A row of length 0 is inactive: nothing is written for it and its output means nothing.
    """

    tokens: Any  # [B, S] int32
    lengths: Any  # [B] int32
    page_table: Any  # [B, MP] int32
