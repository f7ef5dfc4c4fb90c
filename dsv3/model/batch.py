"""Input arrays of one rank's step, which the engine fills and the model reads.

The engine adds a leading rank axis; the step body sees one rank. Shapes are buckets: rows beyond the live ones are
padding, marked by a length of 0. Both batches carry the attention form that the step's program was compiled for. The
host knows the lengths of requests and selects the form from the table in `dsv3.model.forms`.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.search import search


class AttentionForm(enum.IntEnum):
    """How a step attends, in the order in which the host tries the forms (`dsv3.model.forms`).

    ANY fits every batch: the device tests while it runs whether there are cached tokens, and whether queries need their
    top-k tokens. On a GPU the host would have to wait for these tests in every layer. NEW: no request has cached
    tokens. ABSORBED and MATERIALIZED attend to all tokens: to the cached latents, or to keys and values computed from
    them (`materialize_kv`). TOPK and TOPK_MATERIALIZED attend to the top-k tokens of the indexer (`use_topk`): to
    copies of their latents, or to the keys and values of all tokens under a mask. A model with dense attention treats
    both as ABSORBED.
    """

    ANY = 0
    NEW = 1
    MATERIALIZED = 2
    ABSORBED = 3
    TOPK_MATERIALIZED = 4
    TOPK = 5

    __hash__ = int.__hash__  # a step looks the table up several times, and Enum's own hash is a Python function


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """A flat ragged batch: chunks of up to B requests one after the other in T rows.

    Chunk b occupies rows `cu_lengths[b]` to `cu_lengths[b + 1]`; rows from `cu_lengths[B]` on are padding. Its request
    already has `context_lengths[b]` tokens in its pages; the chunk's own tokens follow them. A materialized form
    computes keys and values of at most `kv_capacity` tokens: those of all requests, each rounded up to whole pages.

    A model whose cache groups have the lifetime "window" has a `window_table`, with pages of the window at the indices
    of `page_table`, and one with groups of the lifetime "request" has `slots`, one per request. A row whose page is -1
    is not written, since no later step reads it. Entries of pages that the window does not reach are never read.

    With `returns_routed_experts` the step returns the experts of its tokens. The later one of two micro-batches has
    `rows_before`: how many rows of each chunk the earlier one ends with.
    """

    tokens: Any  # [T] int32
    positions: Any  # [T] int32
    cu_lengths: Any  # [B + 1] int32
    context_lengths: Any  # [B] int32
    page_table: Any  # [B, Mp] int32 (vLLM: block table), entries beyond a request's pages are never read
    form: AttentionForm = dataclasses.field(default=AttentionForm.ANY, metadata={"static": True})
    kv_capacity: int = dataclasses.field(default=0, metadata={"static": True})
    window_table: Any = None  # [B, Mp] int32
    slots: Any = None  # [B] int32
    returns_routed_experts: bool = dataclasses.field(default=False, metadata={"static": True})
    rows_before: Any = None  # [B] int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """B requests with S query tokens each (1 + drafts).

    `lengths` counts a request's tokens including these S, so its queries start at position `lengths - S`. A row of
    length 0 is inactive: nothing is written for it and its output is undefined. A token below 0 stands for no draft:
    its row is written, but no expert computes it. `window_table`, `slots` and `returns_routed_experts` are those of
    `PrefillBatch`.
    """

    tokens: Any  # [B, S] int32
    lengths: Any  # [B] int32
    page_table: Any  # [B, Mp] int32
    form: AttentionForm = dataclasses.field(default=AttentionForm.ANY, metadata={"static": True})
    window_table: Any = None  # [B, Mp] int32
    slots: Any = None  # [B] int32
    returns_routed_experts: bool = dataclasses.field(default=False, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class StepRows:
    """The T tokens of a step, those of one request after the other, and where the cache keeps these requests' rows."""

    requests: jax.Array  # [T] int32, request of a token
    positions: jax.Array  # [T] int32, 0 in padding
    valid: jax.Array  # [T] bool, False in padding
    visible: jax.Array  # [T] int32, how many tokens each one sees, itself included; 0 in padding
    firsts: jax.Array  # [B] int32, where a request's tokens begin
    contexts: jax.Array  # [B] int32, tokens that it had before the step
    ends: jax.Array  # [B] int32, tokens that it has after it
    page_table: jax.Array  # [B, Mp] int32
    window_table: jax.Array  # [B, Mp] int32
    slots: jax.Array  # [B] int32
    rows_before: jax.Array | None = None  # [B] int32, of the later one of two micro-batches

    @classmethod
    def of(cls, batch: PrefillBatch | DecodeBatch) -> "StepRows":
        """Returns the rows of a batch, in decode `[B * S]`: S new tokens of each request."""
        tables: dict[str, Any] = {
            "page_table": batch.page_table,
            "window_table": batch.window_table,
            "slots": batch.slots,
        }
        if isinstance(batch, DecodeBatch):
            B, S = batch.tokens.shape
            positions = (batch.lengths[:, None] - S + jnp.arange(S, dtype=jnp.int32)).reshape(-1)
            return cls(
                requests=jnp.repeat(jnp.arange(B, dtype=jnp.int32), S),
                positions=jnp.maximum(positions, 0),
                valid=positions >= 0,
                visible=jnp.maximum(positions + 1, 0),
                firsts=S * jnp.arange(B, dtype=jnp.int32),
                contexts=batch.lengths - S,
                ends=batch.lengths,
                **tables,
            )
        B, rows = len(batch.page_table), jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
        chunk = search(batch.cu_lengths[1:], rows, side="right")
        return cls(
            requests=jnp.minimum(chunk, B - 1),
            positions=jnp.where(chunk < B, batch.positions, 0),
            valid=chunk < B,
            visible=jnp.where(chunk < B, batch.positions + 1, 0),
            firsts=batch.cu_lengths[:-1],
            contexts=batch.context_lengths,
            ends=batch.context_lengths + jnp.diff(batch.cu_lengths),
            rows_before=batch.rows_before,
            **tables,
        )


def split_prefill(batch: PrefillBatch) -> tuple[PrefillBatch, PrefillBatch]:
    """Splits a batch by rows; the second part of a chunk reads the first one from the cache, as context."""
    T = batch.tokens.shape[0]
    middle = T // 2
    first = jnp.minimum(batch.cu_lengths, middle)
    rows_before = jnp.diff(first)
    earlier = dataclasses.replace(
        batch, tokens=batch.tokens[:middle], positions=batch.positions[:middle], cu_lengths=first
    )
    later = dataclasses.replace(
        batch,
        tokens=batch.tokens[middle:],
        positions=batch.positions[middle:],
        cu_lengths=jnp.maximum(batch.cu_lengths, middle) - middle,
        context_lengths=batch.context_lengths + rows_before,
        rows_before=rows_before,
        form=AttentionForm.ABSORBED if batch.form is AttentionForm.NEW else batch.form,
    )
    return earlier, later


def split_decode(batch: DecodeBatch) -> tuple[DecodeBatch, DecodeBatch]:
    """Splits a batch by requests, in equal halves."""
    middle = batch.lengths.shape[0] // 2
    return jax.tree.map(lambda a: a[:middle], batch), jax.tree.map(lambda a: a[middle:], batch)
