"""The page cache under random operations, against a plain model of owners."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv3.kv_cache.page_cache import PageCache, PagePool
from dsv3.kv_cache.page_keys import extend_keys, root_key

PAGES = 6


class PageCacheMachine(RuleBasedStateMachine):
    """Owners allocate, publish, share and release."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PageCache(PAGES, num_provisional=1)
        self.owners: list[list[int]] = []
        self.content: dict[bytes, int] = {}  # key -> page, until the page is reallocated
        self.counter = 0

    @precondition(lambda self: self.cache.available)
    @rule()
    def allocate(self) -> None:
        [page] = self.cache.allocate(1)
        assert all(page not in pages for pages in self.owners), "an owned page was allocated"
        self.content = {key: p for key, p in self.content.items() if p != page}
        self.owners.append([page])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def publish(self, data) -> None:
        pages = data.draw(st.sampled_from(self.owners))
        self.counter += 1
        key = self.counter.to_bytes(32, "little")
        known = pages[0] in self.content.values()
        assert self.cache.publish([key], pages[:1]) == ([] if known else [0])
        if not known:
            self.content[key] = pages[0]
            if data.draw(st.booleans()):
                self.cache.index.set_provisional(pages[:1])

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        assert self.cache.match([key]) == [self.content[key]]
        self.cache.retain([self.content[key]])
        self.owners.append([self.content[key]])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def invalidate(self, data) -> None:
        pages = data.draw(st.sampled_from(self.owners))
        self.cache.invalidate(pages)
        self.content = {key: p for key, p in self.content.items() if p not in pages}

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.cache.release(self.owners.pop(index))

    @invariant()
    def counts_agree(self) -> None:
        owned = {page for pages in self.owners for page in pages}
        assert self.cache.in_use == len(owned)
        assert self.cache.available == PAGES - len(owned)
        for page in owned:
            assert self.cache.pool.references(page) == sum(pages.count(page) for pages in self.owners)

    @invariant()
    def the_index_has_exactly_the_published_pages(self) -> None:
        for key, page in self.content.items():
            assert self.cache.match([key]) == [page]
        assert len(self.cache.index) == len(self.content)


TestPageCache = PageCacheMachine.TestCase
TestPageCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def _chain(tokens: int, salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(root_key("fingerprint", salt), keys, np.arange(tokens, dtype=np.int32), 64)
    return keys


def test_the_least_recently_used_page_goes_first():
    cache = PageCache(3)
    pages = cache.allocate(3)
    keys = [bytes([i]) * 32 for i in range(3)]
    cache.publish(keys, pages)
    for i in (0, 1, 2):
        cache.release([pages[i]])
    cache.retain(cache.match([keys[0]]))  # page 0 is used again
    cache.release([pages[0]])
    assert cache.allocate(3) == [pages[1], pages[2], pages[0]]


def test_provisional_pages_are_evicted_before_others_but_for_a_few():
    cache = PageCache(6, num_provisional=1)
    pages = cache.allocate(6)
    keys = [bytes([i]) * 32 for i in range(6)]
    cache.publish(keys, pages)
    cache.index.set_provisional(pages[2:])
    cache.release(pages[::-1])  # in their order
    cache.retain(cache.match([keys[3]]))  # a request continues it
    cache.release([pages[3]])
    assert cache.allocate(6) == [pages[2], pages[4], pages[0], pages[1], pages[3], pages[5]]


def test_the_last_page_of_a_prefix_is_evicted_first():
    cache = PageCache(3)
    keys = _chain(192)
    pages = cache.allocate(3)
    cache.publish(keys, pages)
    cache.release(pages)
    cache.allocate(1)
    assert cache.match(keys) == pages[:2]


def test_without_prefix_caching_nothing_matches():
    cache = PageCache(2, enable_prefix_caching=False)
    [page] = cache.allocate(1)
    cache.publish([b"k" * 32], [page])
    assert cache.match([b"k" * 32]) == []
    cache.release([page])
    assert cache.pool.num_free == 2


def test_an_invalidated_page_does_not_match():
    cache = PageCache(2)
    [page] = cache.allocate(1)
    cache.publish([b"k" * 32], [page])
    cache.invalidate([page])
    cache.release([page])
    assert cache.match([b"k" * 32]) == []


def test_a_page_released_twice_is_an_error():
    pool = PagePool(1)
    pages = pool.allocate(1)
    assert pool.release(pages) == pages
    pool.free(pages)
    with pytest.raises(ValueError, match="more often"):
        pool.release(pages)


def test_only_full_pages_have_block_hashes():
    assert [len(_chain(n)) for n in (0, 63, 64, 127, 128)] == [0, 0, 1, 1, 2]
    assert _chain(130)[:2] == _chain(191)[:2]


def test_root_keys_differ_in_every_field_and_boundary():
    fields = [("f", "s"), ("f", ""), ("", "fs"), ("fs", ""), ("s", "f")]
    assert len({root_key(*f) for f in fields}) == len(fields)
    assert not set(_chain(640, "one")) & set(_chain(640, "two"))
    assert root_key("f", "\ud800") != root_key("f", "?")


def test_a_block_hash_depends_on_the_tokens_before():
    tokens = np.arange(128, dtype=np.int32)
    other = tokens.copy()
    other[3] += 1
    root = root_key("f", "")
    a: list[bytes] = []
    b: list[bytes] = []
    extend_keys(root, a, tokens, 64)
    extend_keys(root, b, other, 64)
    assert not set(a) & set(b)
