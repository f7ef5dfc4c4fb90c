"""The tokens of the running requests: prompts as they came, answers as they grow."""

import numpy as np

from dsv3.config.page import PAGE_SIZE

_PART = 4 * PAGE_SIZE  # tokens that leave a row at once: page by page, that took twice as long as writing them
_WIDTH = 2 * _PART  # a row of drafts may reach into the next part
_IN_ROW = _WIDTH - 1  # the bits of a place in a row: numpy divides integers 20 times as slowly
_NONE = np.empty(0, np.int32)


class History:
    """Tokens by slot. Those that a step writes lie close together: a row of 512 per slot, which it goes round in.

    One array of every slot's longest request had 12 GB for 18,432 slots of 163,840 tokens, all of which came into use,
    and each step wrote all over it. What leaves a row lies in a buffer of its request.
    """

    def __init__(self, num_slots: int) -> None:
        self._recent = np.zeros((num_slots, _WIDTH), np.int32)
        self._flat, self._starts = self._recent.reshape(-1), np.arange(num_slots, dtype=np.int64) * _WIDTH
        self._bytes = memoryview(self._flat).cast("B")
        self._begun = [_NONE] * num_slots  # what a request has when it enters
        self._full = [bytearray()] * num_slots  # whole parts behind the last whole part of that

    def enter(self, slot: int, tokens: np.ndarray) -> None:
        """Notes the tokens `[n]` that a slot's new request begins with; they are kept, not copied."""
        self._begun[slot], self._full[slot] = tokens, bytearray()
        first = len(tokens) // _PART * _PART
        place = first & _IN_ROW
        self._recent[slot, place : place + len(tokens) - first] = tokens[first:]

    def leave(self, slot: int) -> None:
        """Forgets the tokens of a slot."""
        self._begun[slot], self._full[slot] = _NONE, bytearray()

    def note(self, slots: np.ndarray, before: np.ndarray, known: np.ndarray, tokens: np.ndarray) -> None:
        """Enters `tokens` `[n, S]` behind the `before` `[n]` of `slots` `[n]`; those up to `known` `[n]` are valid.

        What lies behind is written over by the next ones. S is far below a page.
        """
        starts = self._starts[slots]
        if tokens.shape[1] == 1:
            self._flat[starts + (before & _IN_ROW)] = tokens[:, 0]
        else:
            self._flat[starts[:, None] + ((before[:, None] + np.arange(tokens.shape[1])) & _IN_ROW)] = tokens
        filled = ((before ^ known) >= _PART).nonzero()[0]
        mine, firsts = slots[filled], starts[filled] + (before[filled] & _IN_ROW & -_PART)
        for slot, first in zip(mine.tolist(), (firsts * self._recent.itemsize).tolist(), strict=True):
            self._full[slot] += self._bytes[first : first + _PART * self._recent.itemsize]

    def read(self, slot: int, start: int, stop: int) -> np.ndarray:
        """Returns a slot's tokens `start` to `stop`, which have been noted, as a new array int32."""
        begun, full = self._begun[slot], self._full[slot]
        base = len(begun) // _PART * _PART
        first = base + len(full) // begun.itemsize  # of the part that is being filled
        parts = [begun[start : min(stop, base)]]
        if full and stop > base:
            parts.append(np.frombuffer(full, np.int32)[max(start - base, 0) : stop - base])
        if stop > first:
            place = first & _IN_ROW
            parts.append(self._recent[slot, place + max(start - first, 0) : place + stop - first])
        return np.concatenate(parts)
