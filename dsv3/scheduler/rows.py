"""The live rows of a batch, and what a step has sampled for them."""

import dataclasses

import numpy as np

from dsv3.scheduler.codes import NOTHING, UNDRAFTED
from dsv3.scheduler.slots import SlotTable


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRows:
    """Live rows of a batch: row i belongs to flat slot `slots[i]` and stands at `[rank[i], position[i]]`.

    `epochs` are the slots' epochs at launch. Made anew only when the set of rows changes.
    """

    slots: np.ndarray  # [n]
    rank: np.ndarray  # [n]
    position: np.ndarray  # [n]
    epochs: np.ndarray  # [n]
    ids: np.ndarray  # [n] int64, of their requests

    @classmethod
    def at(cls, table: SlotTable, slots: np.ndarray, rank: np.ndarray, position: np.ndarray) -> "BatchRows":
        """Returns rows of `slots`, with what the table knows of them."""
        return cls(slots, rank, position, table.epoch[slots], table.ids[slots])

    def only(self, keep: np.ndarray) -> "BatchRows":
        """Returns the rows where `keep` ([n] bool) is set."""
        return BatchRows(*(getattr(self, field.name)[keep] for field in dataclasses.fields(self)))


@dataclasses.dataclass
class DraftCounts:
    """Totals since the start: rows that brought drafts, their drafts, and by place in the row those that were right."""

    accepted: np.ndarray  # [S - 1] int64
    rows: int = 0
    tokens: int = 0

    def add(self, tokens: np.ndarray) -> np.ndarray:
        """Counts the rows of a step with results `tokens` `[n, S]`; returns how many each accepted, `[n]` int64."""
        counts, drafts = np.ones(len(tokens), np.int64), tokens.shape[1] - 1
        if not drafts:
            return counts
        for i, column in enumerate(tokens.T[1:]):  # numpy takes 15 times as long along so short an axis
            right = column > NOTHING
            counts += right
            self.accepted[i] += np.count_nonzero(right)
        self.rows += len(tokens)
        self.tokens += len(tokens) * drafts
        missing = tokens == UNDRAFTED
        if absent := int(np.count_nonzero(missing)):
            self.rows -= int(np.count_nonzero(missing[:, 1]))  # a row's drafts have no gaps
            self.tokens -= absent
        return counts


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """Results of a sampler, for every row of a batch.

    `tokens` `[ranks, B, S]`: the accepted ones first, then `NOTHING` or `UNDRAFTED`; `NOT_FINITE` where the logits were
    not finite. Where a request asked for them, `logprobs` `[ranks, B, S]` are those of the tokens, `top_ids` and
    `top_logprobs` `[ranks, B, S, 20]` the most likely, best first.
    """

    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
