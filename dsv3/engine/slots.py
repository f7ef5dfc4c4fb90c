"""The running requests as numpy columns, so that a step's bookkeeping is a few vector operations and no loop.

A slot is a row of the device's decode state. Slots of all ranks stand in one flat range: slot s of rank r is
`r * max_num_seqs + s`.
"""

import heapq

import numpy as np

from dsv3.cache.page import PAGE_SIZE
from dsv3.engine.config import EngineConfig
from dsv3.engine.sequence import Sequence


class SlotTable:
    """Columns over all slots.

    `planned` counts a request's tokens once every launched step has finished, the token being sampled included;
    `known` those the host has seen. `epoch` changes when a slot changes hands: results of a step launched for an
    earlier owner are recognised and dropped.
    """

    def __init__(self, cfg: EngineConfig, vocab_size: int) -> None:
        total = cfg.num_ranks * cfg.max_num_seqs
        self._per_rank = cfg.max_num_seqs
        self.sequences: list[Sequence | None] = [None] * total
        self.ids = np.zeros(total, np.int64)  # of the requests
        self.planned = np.zeros(total, np.int64)
        self.known = np.zeros(total, np.int64)
        self.capacity = np.zeros(total, np.int64)
        self.limit = np.zeros(total, np.int64)
        self.epoch = np.zeros(total, np.int64)
        self.variant = np.zeros(total, np.int8)
        self.wants_logprobs = np.zeros(total, bool)
        self.started = np.zeros(total, bool)  # its first token has been reported
        self.decoding = np.zeros(total, bool)
        self.history = np.zeros((total, cfg.max_model_len), np.int32)
        self.stop_users = np.zeros(vocab_size, np.int32)  # running requests that a token would stop
        self.version = 0  # changes with `decoding`
        self._free = [list(range(r * self._per_rank, (r + 1) * self._per_rank)) for r in range(cfg.num_ranks)]

    def num_running(self, rank: int) -> int:
        return self._per_rank - len(self._free[rank])

    @property
    def total_running(self) -> int:
        return len(self.sequences) - self.num_free

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def has_room(self, rank: int) -> bool:
        return bool(self._free[rank])

    def rank_of(self, slot: int) -> int:
        return slot // self._per_rank

    def running(self, rank: int) -> list[Sequence]:
        """Requests that hold a slot of `rank`."""
        start = rank * self._per_rank
        return [s for s in self.sequences[start : start + self._per_rank] if s is not None]

    def enter(self, sequence: Sequence, rank: int) -> None:
        """Gives a sequence the lowest free slot of `rank`."""
        slot = heapq.heappop(self._free[rank])
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.ids[slot] = sequence.id
        count = len(sequence.tokens)
        self.history[slot, :count] = sequence.tokens
        self.planned[slot] = self.known[slot] = count
        self.capacity[slot] = len(sequence.pages) * PAGE_SIZE
        self.limit[slot] = sequence.max_length
        self.variant[slot] = sequence.variant
        self.wants_logprobs[slot] = sequence.sampling.logprobs is not None
        self.started[slot] = sequence.started
        for token in sequence.stop_ids:
            self.stop_users[token] += 1

    def start_decoding(self, slot: int) -> None:
        """The prompt's last chunk, which samples a token, has been launched."""
        self.planned[slot] += 1
        self.decoding[slot] = True
        self.version += 1

    def stop_decoding(self, slots: np.ndarray) -> None:
        self.decoding[slots] = False
        self.version += 1

    def leave(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence."""
        slot = sequence.slot
        self.sequences[slot] = None
        self.epoch[slot] += 1
        if self.decoding[slot]:
            self.decoding[slot] = False
            self.version += 1
        for token in sequence.stop_ids:
            self.stop_users[token] -= 1
        heapq.heappush(self._free[self.rank_of(slot)], slot)
        sequence.slot = -1
