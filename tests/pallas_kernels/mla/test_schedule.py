"""The cuts cover every page once and share the cost evenly."""

import itertools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.mla.schedule import schedule_pages

REQUESTS = 6
PARTS = 7
schedule = jax.jit(schedule_pages, static_argnums=(1, 2))


def pieces(cuts, pages):
    """The (request, first page, end page) triples of each part, read like the kernel."""
    for (request, page), (last_request, last_page) in itertools.pairwise(cuts):
        stop = last_request + (last_page > 0)
        yield [
            (r, page if r == request else 0, last_page if r == last_request else pages[r]) for r in range(request, stop)
        ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2000), min_size=REQUESTS, max_size=REQUESTS), st.sampled_from([1, 5, 12]))
def test_every_page_once_in_order_and_evenly(lengths, overhead):
    cuts, last = (np.asarray(x) for x in schedule(np.asarray(lengths, np.int32), PARTS, overhead))
    pages = [-(-n // 64) for n in lengths]
    parts = list(pieces(cuts, pages))
    seen = [[] for _ in lengths]
    holders = [[] for _ in lengths]
    for index, part in enumerate(parts):
        for request, begin, end in part:
            assert begin < end or (begin == end == 0 == pages[request])
            seen[request] += range(begin, end)
            holders[request].append(index)
    assert seen == [list(range(n)) for n in pages]
    assert all(pages[request] == 0 or held[-1] == last[request] for request, held in enumerate(holders))
    share = -(-(sum(pages) + overhead * REQUESTS) // PARTS)
    assert max(sum(end - begin for _, begin, end in part) for part in parts) <= share + 2


def test_one_request_is_split_over_all_parts():
    cuts = np.asarray(schedule(np.asarray([64 * 700, 0, 0, 0, 0, 0], np.int32), PARTS).cuts)
    assert all(request == 0 for request, _ in cuts[:-1])
    assert (np.diff(cuts[:-1, 1]) > 90).all()


def test_more_parts_than_pages():
    cuts, last = (np.asarray(x) for x in schedule_pages(np.asarray([1], np.int32), 132))
    filled = [part for part in pieces(cuts, [1]) if part]
    assert filled == [[(0, 0, 1)]]
    assert list(pieces(cuts, [1]))[last[0]] == [(0, 0, 1)]
