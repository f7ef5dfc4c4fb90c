"""Balances the ranks of one instance: which rank a request runs on, and which chunks of prompts a step computes."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from dsv3.config.engine import EngineConfig
from dsv3.kv_cache.page_keys import Key
from dsv3.kv_cache.tiers.hosts import Hosts
from dsv3.kv_cache.tiers.tiers import HostTiers
from dsv3.scheduler import chunks
from dsv3.scheduler.batch_slots import BatchSlots, RankPages
from dsv3.scheduler.cost import KEYS_PER_TOKEN, Loads, costs, imbalance, prefill_cost
from dsv3.scheduler.sequence import Sequence as Request
from dsv3.scheduler.sequence import SequenceStatus

_DECAY = 0.99  # of the running sums below, per step


class Balancer:
    """Tracks the ranks' loads. `backlog` is the cost of the admitted prompts that each has yet to compute, `[X]`.

    `keys` is the number of keys that take as long as a token (`dsv3.scheduler.cost.keys_per_token`). In a replay of
    skewed prompts and answers over 8 ranks the busiest rank had 1.03 times the mean; with the fewest running requests
    as the rule it had 1.13 in decode and 1.62 in prefill.
    """

    def __init__(self, cfg: EngineConfig, slots: BatchSlots, pages: RankPages, keys: float = KEYS_PER_TOKEN) -> None:
        self._cfg, self._slots, self._pages, self.keys_per_token = cfg, slots, pages, keys
        self.backlog = np.zeros(cfg.num_ranks, np.int64)
        self.tiers: HostTiers | Hosts | None = None
        self._cached_tokens = np.zeros(cfg.num_ranks, np.int64)

    def refresh(self) -> None:
        """Reads the ranks' cached tokens; call it before requests are admitted."""
        if self._cfg.num_ranks > 1 and self._cfg.role != "prefill":  # a prefill rank's load is its backlog alone
            self._cached_tokens = self._slots.num_tokens()

    def ranks_by_cost(self, request: Request, useful: Sequence[Key]) -> Iterator[int]:
        """Yields the ranks with a free slot, the one on which a request costs least first.

        `useful` are the keys of its pages that a rank need not compute where it has them cached.
        """
        if self._cfg.num_ranks == 1:
            yield from range(min(1, self._slots.num_free_on(0)))
            return
        loads = Loads(self.backlog, self._cached_tokens, self._slots.running)
        depths = self._pages.depths(useful)
        below = None if self.tiers is None else self.tiers.depths(useful, request.lookup)
        if below is not None:
            depths = np.maximum(0 if depths is None else depths, below)
        own = self._prefill_costs(len(request.tokens), depths)
        found = costs(loads, own, len(request.tokens), self._cfg.role != "prefill")
        found[self._slots.running >= self._cfg.max_num_seqs] = np.inf
        for _ in range(self._cfg.num_ranks):
            rank = int(found.argmin())
            if found[rank] == np.inf:
                return
            yield rank
            found[rank] = np.inf

    def charge(self, request: Request) -> None:
        """Updates what a request with a slot still costs its rank to compute."""
        done = request.load_stop * self._cfg.page_size if request.state is SequenceStatus.LOADING else request.prefilled
        cost = round(prefill_cost(done, len(request.tokens), self.keys_per_token))
        rank = self._slots.rank_of(request.slot)
        if not request.charge:  # it has just got its slot
            self._cached_tokens[rank] += len(request.tokens)
        self.backlog[rank] += cost - request.charge
        request.charge = cost

    def discharge(self, request: Request) -> None:
        """Removes the cost of a request that is about to leave its slot."""
        self.backlog[self._slots.rank_of(request.slot)] -= request.charge
        request.charge = 0

    def schedule_chunks(self, prefilling: Sequence[Sequence[Request]], rows: int, budget: int) -> list[list[int]]:
        """Returns how many tokens of each prompt the next step computes, at most `budget` and `rows` prompts per rank.

        With prompts of several priorities, those of lower numbers come first, whatever that does to the balance.
        """
        busy = [rank for rank, mine in enumerate(prefilling) if mine]
        pending = [[(s.prefilled, len(s.tokens)) for s in prefilling[rank][:rows]] for rank in busy]
        waiting = [sum([length - done for done, length in mine]) for mine in pending]
        sizes = [max(1, size * budget // self._cfg.max_num_batched_tokens) for size in self._cfg.prefill_buckets]
        budget = min(budget, chunks.batch_size(waiting, sizes))
        if self._slots.has_mixed_priorities:
            found = [chunks.in_order(mine, budget) for mine in pending]
        else:
            found = chunks.schedule_chunks(pending, budget, rows, self.keys_per_token)
        counts: list[list[int]] = [[] for _ in prefilling]
        for rank, each in zip(busy, found, strict=True):
            counts[rank] = each
        return counts

    def _prefill_costs(self, tokens: int, depths: np.ndarray | None) -> np.ndarray | float:
        """Returns the cost of a prompt: one number, or one per rank where some have pages of it cached."""
        if depths is None:
            return prefill_cost(0, tokens, self.keys_per_token)
        found = depths * self._cfg.page_size
        return (tokens - found) * (1 + (tokens + found) / (2 * self.keys_per_token))


@dataclasses.dataclass
class PrefillBalance:
    """Imbalance of the ranks over about the last hundred steps with prompts: largest share over mean, 1 is even."""

    token_imbalance: float = 1.0
    cost_imbalance: float = 1.0

    def __post_init__(self) -> None:
        self._sums = np.zeros((2, 2))

    def update(self, tokens: np.ndarray, cost: np.ndarray) -> None:
        """Adds a step: tokens `[X]` and their cost `[X]`, attention included."""
        self._sums = _DECAY * self._sums + [(x.max(), x.mean()) for x in (tokens, cost)]
        self.token_imbalance, self.cost_imbalance = (self._sums[:, 0] / self._sums[:, 1]).tolist()


@dataclasses.dataclass(frozen=True)
class DecodeBalance:
    """Imbalance of the ranks' caches and requests now: largest over mean, 1 is even."""

    cache_imbalance: float
    request_imbalance: float

    @classmethod
    def of(cls, slots: BatchSlots) -> "DecodeBalance":
        """Returns the balance of the running requests."""
        return cls(imbalance(slots.num_tokens()), imbalance(slots.running))


MOST_STEPS = 8
"""The most steps that the last chunk of a prompt waits: 0.6 s in DeepSeek's decode unit."""
_STEPS_COST = 0.5  # of one prefill program, in decode steps


class PrefillBatching:
    """Decides on a decode instance whether the last chunks of prompts wait for the next step, to share a program.

    Another instance has computed a prompt's whole pages, which leaves up to a page of tokens. The program for these
    reads the same weights and crosses the same links for one prompt as for hundreds. All running requests pay for it,
    and prompts that wait pay for waiting. So they wait until both costs are equal: no rule can promise to cost less
    than twice the least without knowing which prompts come next.
    """

    def __init__(self) -> None:
        self._steps = self._waited = 0

    def should_wait(self, prompts: int, running: int) -> bool:
        """Returns whether `prompts` wait one more step, beside `running` requests that decode in it."""
        self._steps, self._waited = self._steps + 1, self._waited + prompts
        if self._steps <= MOST_STEPS and self._waited < _STEPS_COST * running:
            return True
        self._steps = self._waited = 0
        return False
