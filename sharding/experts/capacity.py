"""How many rows the buffers of an exchange hold. Pure arithmetic on expected loads; T tokens, J peers, K per token."""

import functools
import math

ROUND_BOUND = 2.5
"""A first round carries at most this many times the payload, unless 8 rows per pair exceed that already."""
OVERFLOW_CHANCE = 0.01
"""Share of the layers that may need an overflow round, where the bound allows it."""


@functools.cache
def expected_capacity(tokens: int, peers: int, experts_per_token: int, pairs: int) -> int:
    """Returns the rows per pair of peers in the first round, `C`.

    They hold the longest of the queues of all `pairs`, in 99 of 100 layers with even routing, or 2.5 times the payload
    if that is less. The longest queue of so many is far above the mean. At 144 peers and 128 tokens a queue has 7 rows
    on average, and the longest of 20,736 has 18 to 21. The flat exchange of such a mesh has 17 rows, and takes
    overflow rounds.
    """
    payload = tokens * experts_per_token / peers
    bound = max(8, math.floor(ROUND_BOUND * payload))
    return min(tokens, bound, _longest_queue(tokens, expected_rows(tokens, peers, experts_per_token), pairs))


def overflow_capacity(capacity: int) -> int:
    """Returns the rows per pair in an overflow round: a quarter of the first round's."""
    return max(1, capacity // 4)


def expected_rows(tokens: int, peers: int, experts_per_token: int) -> float:
    """Returns the mean number of rows per pair of peers when experts are chosen evenly and independently."""
    return tokens * (1 - (1 - 1 / peers) ** experts_per_token)


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
