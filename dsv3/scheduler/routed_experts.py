"""Expert ids of requests that ask for them, token by token, and of the cached pages that such requests have computed.

A page of the prefix cache holds no expert ids, and they cannot be computed from its latents. So the host keeps the ids
of each page that a request with `return_routed_experts` has computed, under the page's key: 464 bytes per token of
DeepSeek-V3, 0.7 % of the page. Such a request uses a cached page only if its ids are here, and computes the others
again. Pages of another instance come without ids: the request brings those, and only it uses them, as they are what its
sender says. Ids of a token stay what they were when it was first computed: a pre-empted request computes its tokens
again, but the answer so far was sampled with the first ones. Where the weights have changed since, no other request
gets them.
"""

from collections.abc import Sequence

import numpy as np

from dsv3.kv_cache.page_keys import Key
from dsv3.scheduler.request import ExpertIds


class PageExperts:
    """Expert ids of at most `limit` pages of `page_size` tokens, by key; the one used longest ago is dropped first."""

    def __init__(self, limit: int, page_size: int) -> None:
        self.limit, self.page_size = limit, page_size
        self.shape, self.dtype = (0, 0), np.dtype(np.uint8)  # of a token's ids, known with the first ones
        self._by_key: dict[Key, bytes] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's ids."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def put(self, key: Key, ids: bytes) -> None:
        """Keeps the ids of a page."""
        self._by_key.pop(key, None)
        self._by_key[key] = ids
        if len(self._by_key) > self.limit:
            del self._by_key[next(iter(self._by_key))]

    def use(self, key: Key) -> bytes:
        """Returns the ids of a page."""
        self.put(key, self._by_key[key])
        return self._by_key[key]

    def clear(self) -> None:
        """Drops the ids of all pages."""
        self._by_key.clear()


class RequestExperts:
    """Expert ids of one request's tokens, from its first one on, and how many of them have been sent.

    They are sent with the request's last output, and before where many wait. With `sends_each_step` they go with every
    output: a stop string may end the text before the engine ends the request. `given` are those of its first tokens.
    """

    __slots__ = ("_count", "_given", "_ids", "_num_given", "_num_private", "_pages", "_sent", "sends_each_step")

    def __init__(self, pages: PageExperts, given: ExpertIds | None = None, *, sends_each_step: bool = False) -> None:
        self._pages, self._ids, self._count, self._sent = pages, bytearray(), 0, 0
        self.sends_each_step = sends_each_step
        self._given = None if given is None else given.array()
        self._num_given = 0 if self._given is None else len(self._given) // pages.page_size
        self._num_private = self._num_given  # pages, the first ones, whose ids are for this request alone

    def __len__(self) -> int:
        return self._count

    @property
    def num_waiting(self) -> int:
        """Tokens whose ids have not been sent."""
        return self._count - self._sent

    def append(self, start: int, ids: np.ndarray) -> None:
        """Records the ids `[n, L, K]` of the tokens from `start` on, except for those recorded before."""
        known = self._count - start
        assert known >= 0, "no step skips a token"
        if known < len(ids):
            self._pages.shape, self._pages.dtype = ids.shape[1:], ids.dtype
            self._ids += ids[known:].tobytes()
            self._count = start + len(ids)

    def extend(self, count: int, ids: bytes) -> None:
        """Records the ids of the next `count` tokens, of the shape of those before."""
        self._ids += ids
        self._count += count

    def num_usable(self, keys: Sequence[Key]) -> int:
        """Returns how many pages, the first ones of those with `keys`, have known ids."""
        recorded = max(len(self) // self._pages.page_size, self._num_given)
        lacking = (i for i, key in enumerate(keys) if i >= recorded and key not in self._pages)
        return next(lacking, len(keys))

    def restore(self, keys: Sequence[Key]) -> None:
        """Records the ids of cached pages, the first ones of the request; they are known (`num_usable`)."""
        size = self._pages.page_size
        for i, key in enumerate(keys[len(self) // size :], len(self) // size):
            if i < self._num_given:
                assert self._given is not None
                ids = self._given[i * size : (i + 1) * size]
            else:
                ids = np.frombuffer(self._pages.use(key), self._pages.dtype).reshape(size, *self._pages.shape)
            self.append(i * size, ids)

    def keep(self, first: int, keys: Sequence[Key]) -> None:
        """Keeps the ids of pages that are published, the request's pages from index `first` on, for other requests."""
        each = self._pages.page_size * self._pages.row_bytes
        for i, key in enumerate(keys[max(0, self._num_private - first) :], max(first, self._num_private)):
            self._pages.put(key, bytes(memoryview(self._ids)[i * each : (i + 1) * each]))

    def on_other_weights(self) -> None:
        """Keeps the ids so far for this request alone: other weights choose others."""
        self._num_private = max(self._num_private, -(-len(self) // self._pages.page_size))

    def take(self, limit: int | None = None) -> ExpertIds | None:
        """Returns the ids that have not been sent, of at most `limit` tokens, as sent from now on; None without any."""
        start, stop = self._sent, len(self) if limit is None else min(len(self), self._sent + limit)
        if start == stop:
            return None
        self._sent, each = stop, self._pages.row_bytes
        ids = bytes(memoryview(self._ids)[start * each : stop * each])
        return ExpertIds(start, *self._pages.shape, self._pages.dtype.str, ids)
