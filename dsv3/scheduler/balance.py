"""Balances the ranks of one instance: where a request goes, and whose chunks a step computes."""

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

_MEMORY = 0.99  # of the averages below, per step


class Balancer:
    """Knows the ranks' loads. `backlog` is the cost of the prompts that each has admitted and not computed, `[X]`.

    `keys` are those that take as long as a token (`dsv3.scheduler.cost.keys_per_token`).
    """

    def __init__(self, cfg: EngineConfig, slots: BatchSlots, pages: RankPages, keys: float = KEYS_PER_TOKEN) -> None:
        self._cfg, self._slots, self._pages, self.keys = cfg, slots, pages, keys
        self.backlog = np.zeros(cfg.num_ranks, np.int64)
        self.tiers: HostTiers | Hosts | None = None
        self._held = np.zeros(cfg.num_ranks, np.int64)

    def begin(self) -> None:
        """Looks at the ranks anew, before requests are admitted."""
        if self._cfg.num_ranks > 1 and self._cfg.role != "prefill":  # which is weighed by its backlog alone
            self._held = self._slots.num_tokens()

    def ranked(self, request: Request, useful: Sequence[Key]) -> Iterator[int]:
        """Yields the ranks with a free slot, the one on which a request costs least first.

        `useful` are the keys of its pages that a rank need not compute where it can find them.
        """
        if self._cfg.num_ranks == 1:
            yield from range(min(1, self._slots.num_free_on(0)))
            return
        loads = Loads(self.backlog, self._held, self._slots.running)
        depths = self._pages.holders.depths(useful)
        below = None if self.tiers is None else self.tiers.depths(useful, request.lookup)
        if below is not None:
            depths = np.maximum(0 if depths is None else depths, below)
        own = self._own(len(request.tokens), depths)
        found = costs(loads, own, len(request.tokens), self._cfg.role != "prefill")
        found[self._slots.running >= self._cfg.max_num_seqs] = np.inf
        for _ in range(self._cfg.num_ranks):
            rank = int(found.argmin())
            if found[rank] == np.inf:
                return
            yield rank
            found[rank] = np.inf

    def charge(self, request: Request) -> None:
        """Notes what a request with a slot still costs its rank to compute."""
        done = request.load_stop * self._cfg.page_size if request.state is SequenceStatus.LOADING else request.prefilled
        cost = round(prefill_cost(done, len(request.tokens), self.keys))
        rank = self._slots.rank_of(request.slot)
        if not request.charge:  # it has just got its slot
            self._held[rank] += len(request.tokens)
        self.backlog[rank] += cost - request.charge
        request.charge = cost

    def discharge(self, request: Request) -> None:
        """Notes that a request is about to leave its slot."""
        self.backlog[self._slots.rank_of(request.slot)] -= request.charge
        request.charge = 0

    def deal(self, prefilling: Sequence[Sequence[Request]], rows: int, budget: int) -> list[list[int]]:
        """Returns how many tokens of each prompt the next step computes, at most `budget` and `rows` prompts per rank.

        Where prompts of several priorities run, the earlier ones come first, whatever that does to the balance.
        """
        busy = [rank for rank, mine in enumerate(prefilling) if mine]  # most have none: an instance has long prompts
        pending = [[(s.prefilled, len(s.tokens)) for s in prefilling[rank][:rows]] for rank in busy]
        waiting = [sum([length - done for done, length in mine]) for mine in pending]
        sizes = [max(1, size * budget // self._cfg.max_num_batched_tokens) for size in self._cfg.prefill_buckets]
        budget = min(budget, chunks.batch_size(waiting, sizes))
        if self._slots.are_mixed:
            found = [chunks.in_order(mine, budget) for mine in pending]
        else:
            found = chunks.deal(pending, budget, rows, self.keys)
        dealt: list[list[int]] = [[] for _ in prefilling]
        for rank, taken in zip(busy, found, strict=True):
            dealt[rank] = taken
        return dealt

    def _own(self, tokens: int, depths: np.ndarray | None) -> np.ndarray | float:
        """Returns the cost of a prompt, on each rank where some can find pages of it."""
        if depths is None:
            return prefill_cost(0, tokens, self.keys)
        found = depths * self._cfg.page_size
        return (tokens - found) * (1 + (tokens + found) / (2 * self.keys))


@dataclasses.dataclass
class PrefillBalance:
    """How uneven the ranks' shares of the last hundred steps with prompts were: largest over mean, 1 is even."""

    token_imbalance: float = 1.0
    cost_imbalance: float = 1.0

    def __post_init__(self) -> None:
        self._sums = np.zeros((2, 2))

    def note(self, tokens: np.ndarray, cost: np.ndarray) -> None:
        """Takes in a step: tokens `[X]` and their cost `[X]`, attention included."""
        self._sums = _MEMORY * self._sums + [(x.max(), x.mean()) for x in (tokens, cost)]
        self.token_imbalance, self.cost_imbalance = (self._sums[:, 0] / self._sums[:, 1]).tolist()


@dataclasses.dataclass(frozen=True)
class DecodeBalance:
    """How uneven the ranks' caches and requests are now: largest over mean, 1 is even."""

    cache_imbalance: float
    request_imbalance: float

    @classmethod
    def of(cls, slots: BatchSlots) -> "DecodeBalance":
        """Returns the balance of the running requests."""
        return cls(imbalance(slots.num_tokens()), imbalance(slots.running))


MOST_STEPS = 8
"""A prompt waits for so many steps at most: 0.6 s of DeepSeek's unit."""
_STEPS_COST = 0.5  # decode steps that the program takes


class PrefillBatching:
    """Says whether the ends of prompts wait for the next step of a decode instance, so that few steps compute them.

    Another instance has computed a prompt's whole pages, which leaves up to a page of tokens. The program for these
    reads the same weights and crosses the same links for one prompt as for hundreds. All requests that run pay for it,
    and prompts that wait pay for waiting. So they wait until both costs are equal: no rule can promise to cost less
    than twice the least without knowing which prompts come next.
    """

    def __init__(self) -> None:
        self._steps = self._waited = 0

    def waits(self, prompts: int, running: int) -> bool:
        """Returns whether `prompts` wait for one more step, beside `running` requests that have another token in it."""
        self._steps, self._waited = self._steps + 1, self._waited + prompts
        if self._steps <= MOST_STEPS and self._waited < _STEPS_COST * running:
            return True
        self._steps = self._waited = 0
        return False
