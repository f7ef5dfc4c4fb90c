"""The command of a draft job, for whatever drafts."""

import numpy as np

from dsv3.engine.device.choosing import ANY_LENGTH
from dsv3.engine.job import Command
from dsv3.engine.jobs import prefill

NAME = "draft"


class CachedText(Command, frozen=True):
    """Tokens of a request whose pages were found in the cache, so that no forward job has seen them."""

    rank: int
    slot: int  # within the rank
    tokens: np.ndarray  # [n] int32


class DraftCommand(Command, frozen=True):
    """Drafts for the requests of the forward job `source` of the same step, whose bucket is `size`.

    `width` are the tokens per row of a decode job. `texts` come before what the job has computed, at most one per rank
    in each of `text_launches`. With `tells` the host wants to see the drafts. `longest` is that of the forward job.
    """

    source: str
    size: int
    width: int
    texts: list[CachedText]
    text_launches: int
    tells: bool
    longest: int = ANY_LENGTH

    @classmethod
    def after_prefill(cls, size: int, texts: list[CachedText], tells: bool, longest: int) -> "DraftCommand":
        """Returns the command that follows a prefill job of the bucket `size`."""
        ranks = [text.rank for text in texts]
        return cls(prefill.NAME, size, 1, texts, max(map(ranks.count, ranks), default=0), tells, longest)

    def part(self, ranks: range) -> "DraftCommand":
        """Returns the command with the texts of `ranks` only."""
        mine = [
            CachedText(text.rank - ranks.start, text.slot, text.tokens) for text in self.texts if text.rank in ranks
        ]
        return DraftCommand(self.source, self.size, self.width, mine, self.text_launches, self.tells, self.longest)
