"""The distribution of a decode step's pages over the multiprocessors, computed on the device.

FlashMLA's metadata in closed form: the pages of all requests are concatenated, each request preceded by a fixed
overhead, and cut into equal parts, one per persistent thread block (or group of blocks, if a request has several tiles
of rows). A request across a cut is split, and its pieces are combined afterwards.

Where a request's bits must not depend on the others, it is not split: it begins the next part.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import invariance
from pallas_kernels.mla.layout import PAGE_SIZE
from pallas_kernels.search import search

REQUEST_OVERHEAD = 5
"""The fixed cost of a request, in pages: loading queries, writing the output. FlashMLA's figure."""

_ALIGNMENT = 2  # pages; the kernel processes two at a time


class DecodeSchedule(NamedTuple):
    """Depends only on the lengths: all layers of a step share one."""

    cuts: jax.Array
    """[parts + 1, 2] int32: part p begins at page `cuts[p, 1]` of request `cuts[p, 0]` and ends where p + 1 begins."""
    last_part: jax.Array
    """[B] int32, the part that holds the request's last page."""


def schedule_pages(lengths: jax.Array, parts: int, request_overhead: int = REQUEST_OVERHEAD) -> DecodeSchedule:
    """Cuts the pages of requests with `lengths` [B] int32 into `parts` of nearly equal cost.

    Part p covers pages from its cut to the next, in the order of requests; every page of every request belongs to
    exactly one part, and a request without pages to the one at its position.
    """
    requests = lengths.shape[0]
    pages = -(-jnp.maximum(lengths, 0) // PAGE_SIZE)
    ends = jnp.cumsum(pages + request_overhead)
    starts = ends - pages - request_overhead
    share = -(-ends[-1] // parts)
    targets = jnp.arange(parts + 1, dtype=jnp.int32) * share
    whole = invariance.required()
    request = search(starts, targets) if whole else search(ends, targets, side="right")  # B for the end of the line
    within = jnp.minimum(request, requests - 1)
    page = jnp.maximum(targets - starts[within] - request_overhead, 0) // _ALIGNMENT * _ALIGNMENT
    page = jnp.where(whole | (request == requests), 0, page)
    places = jnp.where(request == requests, ends[-1], starts[within] + page)
    last = search(places, jnp.maximum(starts + pages, 1)) - 1
    return DecodeSchedule(jnp.stack([request, page], axis=1), last)
