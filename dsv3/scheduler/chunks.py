"""Schedules a step's prefill chunks: how many tokens of each prompt every rank computes next. Imports no jax.

All ranks wait for the slowest one. So each targets the same number of tokens and the same cost, attention included:
first the cost of as many mean tokens of all that wait, then the mean of what the ranks reach, since some have only
cheap tokens. Prompts are computed oldest first where that comes near the target. Otherwise a rank mixes tokens that
attend to much, from deep inside a long prompt, with tokens that attend to little.
"""

import bisect
import itertools
from collections.abc import Sequence

from dsv3.scheduler.cost import affordable, chunks_cost

TOLERANCE = 0.02
"""Relative deviation from the target cost up to which prompts are computed oldest first."""
_MIN_TARGET = 0.25  # of the budget: smaller steps are not worth their fixed cost
_HEAD_SHARE = 0.5  # of the target cost: the oldest prompt's minimum
_MIN_HEAD_TOKENS = 64  # of the oldest prompt, whatever they cost
_STEP_TOKENS = 512  # that could be computed in the fixed time of a step: reading weights, waiting for links
_MAX_STEPS = 16  # for the tokens of the fullest rank
_BISECTIONS = 8
_PASSES = 3  # of lowering the target cost

_NOTHING: tuple[list[int], float] = [], 0.0

Pending = Sequence[tuple[int, int]]
"""The prompts of a rank, oldest first: tokens computed, and tokens in all."""


def schedule_chunks(ranks: Sequence[Pending], budget: int, rows: int, keys: float) -> list[list[int]]:
    """Returns how many tokens of each prompt a step computes: at most `budget` and `rows` prompts per rank.

    `keys` is the number of keys that cost as much as a token (`dsv3.scheduler.cost.keys_per_token`).
    """
    ranks = [pending[:rows] for pending in ranks]
    lefts = [[length - done for done, length in pending] for pending in ranks]
    waiting = list(map(sum, lefts))
    busy = [min(budget, tokens) for tokens in waiting if tokens]
    if len(busy) < 2:
        return [in_order(pending, budget) for pending in ranks]
    aim = round(max(_MIN_TARGET * budget, sum(busy) / len(busy)))
    cost = sum([chunks_cost(pending, left, keys) for pending, left in zip(ranks, lefts, strict=True) if pending])
    level = aim * cost / sum(waiting)
    found = [_near(pending, aim, level, keys) if pending else _NOTHING for pending in ranks]
    for _ in range(_PASSES):
        level = sum([cost for _, cost in found]) / len(busy)
        most = (1 + TOLERANCE) * level
        expensive = [i for i, (_, cost) in enumerate(found) if cost > most]
        if not expensive:
            break
        for i in expensive:
            found[i] = _near(ranks[i], aim, level, keys)
    return [taken for taken, _ in found]


def batch_size(waiting: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns which of the ascending `sizes` computes most tokens per time, where ranks have `waiting` tokens.

    A program computes its padding, too, and sizes lie far apart. DeepSeek's prefill unit took 2.25 s for 5,000 tokens
    per rank in a batch of 16,384, and takes 0.57 s for the first 4,096 of them. Many short prompts come before the rest
    of a long one, which still advances by a sixteenth per step.
    """
    least = min(max(waiting), sizes[-1]) / _MAX_STEPS
    allowed = [size for size in sizes if size >= least]
    filled = [sum([size if size < tokens else tokens for tokens in waiting]) for size in allowed]
    return max(zip(allowed, filled, strict=True), key=lambda each: each[1] / (_STEP_TOKENS + each[0]))[0]


def in_order(pending: Pending, budget: int) -> list[int]:
    """Returns how many tokens of each prompt of one rank a step computes: at most `budget`, the oldest prompt first."""
    taken = []
    for done, length in pending:
        taken.append(min(length - done, budget))
        budget -= taken[-1]
    return taken


def _near(pending: Pending, aim: int, level: float, keys: float) -> tuple[list[int], float]:
    """Returns up to `aim` tokens that cost about `level`, in order or else the best mixture, and their cost."""
    if len(pending) == 1:
        [(done, length)] = pending
        count = _of_one(done, length, aim, level, keys)
        return [count], count + count * (2 * done + count) / (2 * keys)
    taken = in_order(pending, aim)
    cost = chunks_cost(pending, taken, keys)
    if abs(cost - level) <= TOLERANCE * level or (
        cost < level and sum(taken) == sum([length - done for done, length in pending])
    ):
        return taken, cost
    first = max(_MIN_HEAD_TOKENS, affordable(_HEAD_SHARE * level, pending[0][0], keys))
    head = [min(first, taken[0]), *[0] * (len(pending) - 1)]
    by_context = sorted(range(len(pending)), key=lambda i: pending[i][0] + head[i])
    mixtures = _Mixtures(pending, head, by_context, aim, keys)
    if mixtures.cost(0) > level:
        taken = _within(pending, head, by_context, aim, level, keys)
        return taken, chunks_cost(pending, taken, keys)
    deep = mixtures.deepest(level)
    return _mixed(pending, head, by_context, deep, aim), mixtures.cost(deep)


def _of_one(done: int, length: int, aim: int, level: float, keys: float) -> int:
    """Returns how many tokens of a rank's only prompt cost about `level`: the result of `_near`, without a mixture."""
    whole = min(length - done, aim)
    if whole * (1 + (2 * done + whole) / (2 * keys)) <= (1 + TOLERANCE) * level:
        return whole
    head = min(whole, max(_MIN_HEAD_TOKENS, affordable(_HEAD_SHARE * level, done, keys)))
    left = level - head * (1 + (2 * done + head) / (2 * keys))
    return head + min(whole - head, affordable(left, done + head, keys))


class _Mixtures:
    """The cost of `_mixed` tokens by prefix sums, without a loop over prompts, for bisection on ranks with many."""

    def __init__(self, pending: Pending, head: list[int], by_context: list[int], aim: int, keys: float) -> None:
        self._left, self._keys, self._head = aim - head[0], keys, head[0]
        self._head_pairs = head[0] * (2 * pending[0][0] + head[0])
        self._starts = [pending[i][0] + head[i] for i in by_context]
        lefts = [pending[i][1] - start for i, start in zip(by_context, self._starts, strict=True)]
        whole = [left * (2 * start + left) for left, start in zip(lefts, self._starts, strict=True)]
        self._tokens = [0, *itertools.accumulate(lefts)]  # of the first prompts
        self._pairs = [0, *itertools.accumulate(whole)]

    def deepest(self, level: float) -> int:
        """Returns about how many tokens may attend to the most keys so that all cost `level` at most."""
        few, many = 0, self._left
        for _ in range(_BISECTIONS):
            if few == many:
                break
            middle = (few + many + 1) // 2
            few, many = (few, middle) if self.cost(middle) > level else (middle, many)
        return few

    def cost(self, deep: int) -> float:
        """Returns the cost of `deep` tokens that attend to the most keys, with the rest attending to the fewest."""
        tokens, pairs, total = self._tokens, self._pairs, self._tokens[-1]
        back = min(deep, total)
        shallow = min(self._left - deep, total - back)
        first = bisect.bisect_left(tokens, total - back)  # of the prompts that are computed whole from the back
        found = self._head_pairs + pairs[-1] - pairs[first]
        if first:
            rest = back - (total - tokens[first])
            i = min(bisect.bisect_right(tokens, shallow), first) - 1  # the prompt in which they end
            if i == first - 1:
                found += pairs[i] + self._of(i, shallow - tokens[i] + rest)
            else:
                found += pairs[i] + self._of(i, shallow - tokens[i]) + self._of(first - 1, rest)
        return self._head + back + shallow + found / (2 * self._keys)

    def _of(self, i: int, count: int) -> int:
        """Returns the (token, key) pairs of the next `count` tokens of a prompt."""
        return count * (2 * self._starts[i] + count)


def _mixed(pending: Pending, head: list[int], by_context: list[int], deep: int, aim: int) -> list[int]:
    """Returns `aim` tokens, `head` included: `deep` more that attend to the most keys, then those with the fewest."""
    taken, left = head.copy(), aim - sum(head)
    for order, most in ((reversed(by_context), min(deep, left)), (by_context, left - min(deep, left))):
        for i in order:
            if not most:
                break
            count = min(pending[i][1] - pending[i][0] - taken[i], most)
            taken[i] += count
            most -= count
    return taken


def _within(pending: Pending, head: list[int], by_context: list[int], aim: int, level: float, keys: float) -> list[int]:
    """Returns fewer tokens, which cost `level`: those that attend to the fewest keys."""
    taken, tokens = head.copy(), head[0]
    pairs = tokens * (2 * pending[0][0] + tokens)
    for i in by_context:
        computed, length = pending[i]
        start = computed + head[i]
        most = affordable(level - (tokens + pairs / (2 * keys)), start, keys)
        count = min(length - start, aim - tokens, most)
        taken[i] += count
        tokens += count
        pairs += count * (2 * start + count)
    return taken
