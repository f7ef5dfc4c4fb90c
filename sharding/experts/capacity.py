"""How many rows the buffers of an exchange hold, and how many pairs the experts behind it have room for.

Pure arithmetic on expected loads; T tokens, J peers, K per token, C rows per pair of peers.

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
MIN_CAPACITY = 8
"""Rows that fit in any case: the tokens of one row of a decode batch, the most there can be with drafts."""


def headroom(replicas: int) -> float:
    """Returns how many times as often as the mean a peer with so many replicas may be chosen: they even each other out.

    It is 1.25 for the two of a device at EP144, 1.12 for the nine at EP32, 1.06 for 32. EPLB moves experts where the
    busiest device has 1.11 times the mean (`eplb_threshold` 0.9).
    """
    return 1 + UNEVEN / math.sqrt(replicas)


@functools.cache
def expected_capacity(
    tokens: int, peers: int, experts_per_token: int, pairs: int, replicas: int, *, least: int = MIN_CAPACITY
) -> int:
    """Returns the rows per pair of peers, `C`: as many as the longest of the queues of all `pairs` has.

    A peer leads to `replicas`. `C` is at least `least`, and at most one per token. The longest queue of many is far
    above the mean: at 144 peers and 128 tokens a queue has 7 rows on average, and the longest of 20,736 has 18 to 21
    with even routing.
    """
    mean = expected_rows(tokens, peers / headroom(replicas), experts_per_token)
    return min(tokens, max(least, _longest_queue(tokens, mean, pairs)))


def pair_capacity(
    tokens: int, peers: int, experts_per_token: int, replicas: int, capacity: int, *, least: int = MIN_CAPACITY
) -> int | None:
    """Returns how many (row, replica) pairs a device computes at most, or None where that is all that may arrive.

    Up to `capacity` rows arrive from each of `peers`, which hold `tokens` each, and a row may want each of the device's
    `replicas`. The room is for as many pairs as there are on average when all queues are full, and for all pairs of
    `least` rows in any case. A sum over all queues strays less than each of them, so a device with too many pairs most
    likely has too long a queue, too. At EP32 with 8,192 tokens the room is 76,804 pairs. 65,536 are expected, and
    541,184 would hold whatever tokens choose.
    """
    columns = min(experts_per_token, replicas)
    everything = peers * capacity * columns
    if capacity >= tokens:
        return None
    chosen = 1 - (1 - capacity / tokens) ** (1 / experts_per_token)  # chance that one choice of a token leads here
    room = max(least * columns, math.ceil(peers * tokens * experts_per_token * chosen))
    return room if room < everything else None


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
