"""Capacities of dispatch buffers and of the experts behind them.

Pure arithmetic on expected loads; T tokens, J peers, K experts per token, C rows per pair of peers.

A step that overflows is retried, so buffers are sized to make that rare, for loads above even routing (`headroom`).
"""

import functools
import math

UNEVEN = 0.35
"""Assumed excess of the load of one expert replica over the mean, as a share of the mean."""
OVERFLOW_CHANCE = 1e-3
"""Accepted share of layers with an overflow under that excess; with even routing nearly none overflow
(`tests/sharding/test_exchange.py` simulates both)."""
MIN_CAPACITY = 8
"""Minimum rows: the tokens of one row of a decode batch, with the most drafts."""


def headroom(replicas: int) -> float:
    """Returns the assumed load of a peer with `replicas` replicas, relative to the mean; replicas average out.

    1.25 for two replicas (EP144), 1.12 for nine (EP32), 1.06 for 32. EPLB rebalances if the busiest device has 1.11
    times the mean (`eplb_threshold` 0.9).
    """
    return 1 + UNEVEN / math.sqrt(replicas)


@functools.cache
def expected_capacity(
    tokens: int, peers: int, experts_per_token: int, pairs: int, replicas: int, *, least: int = MIN_CAPACITY
) -> int:
    """Returns the rows per pair of peers, `C`: the length of the longest queue among all `pairs`.

    A peer holds or leads to `replicas` replicas. `C` is at least `least`, and at most one per token. The longest of
    many queues is far above the mean: at 144 peers and 128 tokens a queue has 7 rows on average, and the longest of
    20,736 has 18 to 21 with even routing.
    """
    mean = expected_rows(tokens, peers / headroom(replicas), experts_per_token)
    return min(tokens, max(least, _longest_queue(tokens, mean, pairs)))


def pair_capacity(
    tokens: int, peers: int, experts_per_token: int, replicas: int, capacity: int, *, least: int = MIN_CAPACITY
) -> int | None:
    """Returns the (row, replica) pair capacity of a device, or None if it covers all that may arrive.

    Up to `capacity` rows arrive from each of `peers`, which hold `tokens` each, and a row may select each of the
    device's `replicas`. The result is the expected number of pairs when all queues are full, and at least all pairs of
    `least` rows. The sum over all queues varies less than each queue, so a device with too many pairs most likely has
    too long a queue as well. At EP32 with 8,192 tokens the capacity is 76,804 pairs: 65,536 are expected, and 541,184
    would be the worst case.
    """
    columns = min(experts_per_token, replicas)
    everything = peers * capacity * columns
    if capacity >= tokens:
        return None
    chance = 1 - (1 - capacity / tokens) ** (1 / experts_per_token)  # that one expert of a token is on this device
    pairs = max(least * columns, math.ceil(peers * tokens * experts_per_token * chance))
    return pairs if pairs < everything else None


def expected_rows(tokens: int, peers: float, experts_per_token: int) -> float:
    """Returns the mean number of rows per pair of peers under even, independent routing."""
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
