"""The tokens of the running requests: prompts as they came, answers as they grow."""

import numpy as np

from dsv3.cache.page import PAGE_SIZE

_WIDTH = 2 * PAGE_SIZE  # a row of drafts may reach into the page after the one that it fills
_NONE = np.empty(0, np.int32)


class History:
    """Tokens by slot. A step writes into the last two pages of each, which lie close together.

    One array of every slot's longest request took 12 GB for 18,432 slots of 163,840 tokens, as far as they were
    touched, and each step wrote all over it. Pages of an answer that are full lie in a buffer of their request.
    """

    def __init__(self, num_slots: int) -> None:
        self._recent = np.zeros((num_slots, _WIDTH), np.int32)
        self._flat, self._starts = self._recent.reshape(-1), np.arange(num_slots, dtype=np.int64) * _WIDTH
        self._begun = [_NONE] * num_slots  # what a request has when it enters
        self._full = [bytearray()] * num_slots  # whole pages behind the last whole page of that

    def enter(self, slot: int, tokens: np.ndarray) -> None:
        """Notes the tokens `[n]` that a slot's new request begins with; they are kept, not copied."""
        self._begun[slot], self._full[slot] = tokens, bytearray()
        first = len(tokens) // PAGE_SIZE * PAGE_SIZE
        place = first % _WIDTH
        self._recent[slot, place : place + len(tokens) - first] = tokens[first:]

    def leave(self, slot: int) -> None:
        """Forgets the tokens of a slot."""
        self._begun[slot], self._full[slot] = _NONE, bytearray()

    def note(self, slots: np.ndarray, before: np.ndarray, known: np.ndarray, tokens: np.ndarray) -> None:
        """Enters `tokens` `[n, S]` behind the `before` `[n]` of `slots` `[n]`; those up to `known` `[n]` are valid.

        What lies behind is written over by the next ones. S is a page at most.
        """
        starts = self._starts[slots]
        if tokens.shape[1] == 1:
            self._flat[starts + before % _WIDTH] = tokens[:, 0]
        else:
            self._flat[starts[:, None] + (before[:, None] + np.arange(tokens.shape[1])) % _WIDTH] = tokens
        filled = (before // PAGE_SIZE < known // PAGE_SIZE).nonzero()[0]
        if len(filled):
            self._keep(slots[filled], before[filled] // PAGE_SIZE)

    def _keep(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """Copies the full pages number `pages` of `slots` out of the way."""
        halves = _WIDTH // PAGE_SIZE
        contents = self._flat.reshape(-1, PAGE_SIZE)[slots * halves + pages % halves]
        for slot, content in zip(slots.tolist(), contents, strict=True):
            self._full[slot] += content.tobytes()

    def read(self, slot: int, start: int, stop: int) -> np.ndarray:
        """Returns a slot's tokens `start` to `stop`, which have been noted, as a new array int32."""
        begun, full = self._begun[slot], self._full[slot]
        base = len(begun) // PAGE_SIZE * PAGE_SIZE
        first = base + len(full) // begun.itemsize  # of the page that is being filled
        parts = [begun[start : min(stop, base)]]
        if full and stop > base:
            parts.append(np.frombuffer(full, np.int32)[max(start - base, 0) : stop - base])
        if stop > first:
            place = first % _WIDTH
            parts.append(self._recent[slot, place + max(start - first, 0) : place + stop - first])
        return np.concatenate(parts)
