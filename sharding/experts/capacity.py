"""How many rows the buffers of an exchange hold. Pure arithmetic on expected loads; T tokens, J peers, K per token.

A step whose rows do not fit is computed again, so buffers are sized for that to be rare: for peers that are all chosen
more often than with even routing (`headroom`).
"""

import functools
import math

UNEVEN = 0.35
"""The share of the mean by which the load of one expert replica may exceed it."""
OVERFLOW_CHANCE = 1e-3
"""Share of the layers in which a queue is too long if all peers were chosen that often; with even routing it is next to
none (`tests/sharding/test_exchange.py` draws both)."""
LEAST_ROOM = 8
"""Rows that fit in any case: the tokens of one row of a decode batch, the most there can be with drafts."""


def headroom(replicas: int) -> float:
    """Returns how many times as often as the mean a peer with so many replicas may be chosen: they even each other out.

    It is 1.25 for the two of a device at EP144, 1.12 for the nine at EP32, 1.06 for 32. EPLB moves experts where the
    busiest device has 1.11 times the mean (`eplb_threshold` 0.9).
    """
    return 1 + UNEVEN / math.sqrt(replicas)


@functools.cache
def expected_capacity(
    tokens: int, peers: int, experts_per_token: int, pairs: int, replicas: int, *, least: int = LEAST_ROOM
) -> int:
    """Returns the rows per pair of peers, `C`: as many as the longest of the queues of all `pairs` has.

    A peer leads to `replicas`. `C` is at least `least`, and at most one per token. The longest queue of many is far
    above the mean: at 144 peers and 128 tokens a queue has 7 rows on average, and the longest of 20,736 has 18 to 21
    with even routing.
    """
    mean = expected_rows(tokens, peers / headroom(replicas), experts_per_token)
    return min(tokens, max(least, _longest_queue(tokens, mean, pairs)))


def expected_rows(tokens: int, peers: float, experts_per_token: int) -> float:
    """Returns the mean number of rows per pair of peers when experts are chosen evenly and independently."""
    return tokens * (1 - (1 - min(1, 1 / peers)) ** experts_per_token)


def _longest_queue(tokens: int, mean: float, pairs: int) -> int:
    """Returns the length that a binomial queue with this mean exceeds in `OVERFLOW_CHANCE` / `pairs` of the cases."""
    p = mean / tokens
    if p >= 1:
        return tokens
    tail, length = 0.0, tokens
    while length > mean:
        log_chance = (
            math.lgamma(tokens + 1) - math.lgamma(length + 1) - math.lgamma(tokens - length + 1)
            + length * math.log(p) + (tokens - length) * math.log1p(-p)
        )  # fmt: skip
        tail += math.exp(log_chance)
        if tail * pairs > OVERFLOW_CHANCE:
            break
        length -= 1
    return length
