"""What one step shall do: host arrays, already padded to a bucket, and what is needed to read the results."""

import dataclasses

import numpy as np

from dsv3.engine.sequence import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Live rows of a batch: row i belongs to flat slot `slots[i]` and stands at `[rank[i], position[i]]`.

    `epochs` are the slots' epochs at launch. Made anew only when the set of rows changes.
    """

    slots: np.ndarray  # [n]
    rank: np.ndarray  # [n]
    position: np.ndarray  # [n]
    epochs: np.ndarray  # [n]
    ids: np.ndarray  # [n] int64, of their requests

    def only(self, keep: np.ndarray) -> "Rows":
        """The rows where `keep` ([n] bool) is set."""
        return Rows(self.slots[keep], self.rank[keep], self.position[keep], self.epochs[keep], self.ids[keep])


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt: tokens `start` to `stop` of a sequence; the last chunk samples the first token."""

    sequence: Sequence
    epoch: int
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.sequence.tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Chunks by rank, FIFO; `tokens` is the bucket. `sampled` are the rows that sample a token."""

    tokens: int
    chunks: list[list[Chunk]]
    sampled: Rows
    variant: int
    logprobs: bool


@dataclasses.dataclass(frozen=True, slots=True)
class DecodePlan:
    """One token for each row. `batch` is int32 `[ranks, B, 2]`: slot within the rank and newly allocated page.

    The slot is `max_num_seqs` in padding rows, the page -1 where none is new.
    """

    rows: Rows
    batch: np.ndarray
    variant: int
    logprobs: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: a prefill batch, a decode batch, or both."""

    number: int
    prefill: PrefillPlan | None
    decode: DecodePlan | None
