"""The shares of a decode step's pages that the streaming multiprocessors get, computed on the device.

FlashMLA's metadata in closed form: the pages of all requests are laid end to end, each request preceded by a fixed
overhead, and the line is cut into equal parts, one for each persistent thread block (or group of blocks, when a request
has several tiles of rows). A request that a cut falls into is split, and its parts are combined afterwards.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.mla.layout import PAGE_SIZE
from pallas_kernels.search import search

REQUEST_OVERHEAD = 5
"""What a request costs besides its pages, in pages: loading queries, writing the output. FlashMLA's figure."""

_ALIGNMENT = 2  # pages; the kernel takes two at a time


class DecodeSchedule(NamedTuple):
    """Depends on the lengths alone: one is enough for all layers of a step."""

    cuts: jax.Array
    """[parts + 1, 2] int32: part p begins at page `cuts[p, 1]` of request `cuts[p, 0]` and ends where p + 1 begins."""
    last_part: jax.Array
    """[B] int32, the part that holds the request's last page."""


def schedule_pages(lengths: jax.Array, parts: int, request_overhead: int = REQUEST_OVERHEAD) -> DecodeSchedule:
    """Cuts the pages of requests with `lengths` [B] int32 into `parts` of nearly equal cost.

    Part p covers pages from its cut to the next, in the order of requests; every page of every request belongs to
    exactly one part, and a request without pages to the one that its place falls in.
    """
    requests = lengths.shape[0]
    pages = -(-jnp.maximum(lengths, 0) // PAGE_SIZE)
    ends = jnp.cumsum(pages + request_overhead)
    starts = ends - pages - request_overhead
    share = -(-ends[-1] // parts)
    targets = jnp.arange(parts + 1, dtype=jnp.int32) * share
    request = search(ends, targets, side="right")  # B for the end of the line
    within = jnp.minimum(request, requests - 1)
    page = jnp.maximum(targets - starts[within] - request_overhead, 0) // _ALIGNMENT * _ALIGNMENT
    page = jnp.where(request == requests, 0, page)
    places = jnp.where(request == requests, ends[-1], starts[within] + page)
    last = search(places, jnp.maximum(starts + pages, 1)) - 1
    return DecodeSchedule(jnp.stack([request, page], axis=1), last)
