"""Deals a step's chunks: how many tokens of each waiting prompt every rank computes next. Imports no jax.

All ranks wait for the slowest one. So each aims at the same number of tokens, and at the same cost with their
attention: first that of as many mean tokens of all that wait, then what the ranks have come to at the mean, since some
have only cheap tokens. Prompts are computed oldest first where that comes near it. Otherwise a rank mixes: tokens that
attend to much, from deep inside a long prompt, with tokens that attend to little.
"""

from collections.abc import Sequence

from dsv3.fleet.cost import affordable, chunks_cost

TOLERANCE = 0.02
"""The share of the cost aimed at by which prompts in their order may miss it."""
_LEAST_AIM = 0.25  # of the budget: smaller steps are not worth their fixed cost
_HEAD_SHARE = 0.5  # of the cost aimed at, which the oldest prompt gets at least
_LEAST_TOKENS = 64  # which it gets whatever they cost
_STEP_TOKENS = 512  # that could be computed in the fixed time of a step: reading weights, waiting for links
_MOST_STEPS = 16  # for the tokens of the fullest rank
_HALVINGS = 8
_PASSES = 3  # of lowering the cost aimed at

Pending = Sequence[tuple[int, int]]
"""The prompts of a rank, oldest first: tokens computed, and tokens in all."""


def deal(ranks: Sequence[Pending], budget: int, rows: int, keys: float) -> list[list[int]]:
    """Returns how many tokens of each prompt a step computes: at most `budget` and `rows` prompts per rank.

    `keys` are those that cost as much as a token (`dsv3.fleet.cost.keys_per_token`).
    """
    ranks = [pending[:rows] for pending in ranks]
    waiting = [sum(length - done for done, length in pending) for pending in ranks]
    busy = [min(budget, tokens) for tokens in waiting if tokens]
    if len(busy) < 2:
        return [in_order(pending, budget) for pending in ranks]
    aim = round(max(_LEAST_AIM * budget, sum(busy) / len(busy)))
    cost = sum(_whole_cost(pending, keys) for pending in ranks)
    level = aim * cost / sum(waiting)
    dealt = [_near(pending, aim, level, keys) if pending else [] for pending in ranks]
    work = [chunks_cost(pending, taken, keys) for pending, taken in zip(ranks, dealt, strict=True)]
    for _ in range(_PASSES):
        level = sum(work) / len(busy)
        dear = [i for i, cost in enumerate(work) if cost > (1 + TOLERANCE) * level]
        if not dear:
            break  # another pass would change nothing either
        for i in dear:
            dealt[i] = _near(ranks[i], aim, level, keys)
            work[i] = chunks_cost(ranks[i], dealt[i], keys)
    return dealt


def batch_size(waiting: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns which of the ascending `sizes` computes the most tokens per time, where ranks have `waiting` tokens.

    A program computes its padding, too, and sizes lie far apart. DeepSeek's prefill unit took 2.25 s for 5,000 tokens
    per rank in a batch of 16,384, and takes 0.57 s for the first 4,096 of them. Many short prompts come before the rest
    of a long one, which still goes on by a sixteenth per step.
    """
    least = min(max(waiting), sizes[-1]) / _MOST_STEPS
    allowed = [size for size in sizes if size >= least]
    filled = [sum([size if size < tokens else tokens for tokens in waiting]) for size in allowed]
    return max(zip(allowed, filled, strict=True), key=lambda each: each[1] / (_STEP_TOKENS + each[0]))[0]


def in_order(pending: Pending, budget: int) -> list[int]:
    """Returns how many tokens of each prompt a step computes of a rank alone: at most `budget`, the oldest first."""
    taken = []
    for done, length in pending:
        taken.append(min(length - done, budget))
        budget -= taken[-1]
    return taken


def _whole_cost(pending: Pending, keys: float) -> float:
    """Returns the cost of all that is left of the prompts of a rank."""
    tokens = pairs = 0
    for done, length in pending:
        tokens += length - done
        pairs += (length - done) * (length + done)
    return tokens + pairs / (2 * keys)


def _near(pending: Pending, aim: int, level: float, keys: float) -> list[int]:
    """Returns up to `aim` tokens that cost about `level`: in order, or else the best mixture."""
    if len(pending) == 1:
        return [_of_one(*pending[0], aim, level, keys)]
    taken = in_order(pending, aim)
    cost = chunks_cost(pending, taken, keys)
    is_all = all(count == length - done for count, (done, length) in zip(taken, pending, strict=True))
    if abs(cost - level) <= TOLERANCE * level or (is_all and cost < level):
        return taken
    first = max(_LEAST_TOKENS, affordable(_HEAD_SHARE * level, pending[0][0], keys))
    head = [min(first, taken[0]), *[0] * (len(pending) - 1)]
    by_context = sorted(range(len(pending)), key=lambda i: pending[i][0] + head[i])
    few, many = 0, aim - head[0]
    found = _mixed(pending, head, by_context, few, aim)
    if chunks_cost(pending, found, keys) > level:
        return _within(pending, head, by_context, aim, level, keys)
    for _ in range(_HALVINGS):
        if few == many:
            break
        middle = (few + many + 1) // 2
        deeper = _mixed(pending, head, by_context, middle, aim)
        if chunks_cost(pending, deeper, keys) > level:
            many = middle
        else:
            few, found = middle, deeper
    return found


def _of_one(done: int, length: int, aim: int, level: float, keys: float) -> int:
    """Returns how many tokens of a prompt that is alone on its rank cost about `level`: what `_near` would find."""
    whole = min(length - done, aim)
    if whole * (1 + (2 * done + whole) / (2 * keys)) <= (1 + TOLERANCE) * level:
        return whole
    head = min(whole, max(_LEAST_TOKENS, affordable(_HEAD_SHARE * level, done, keys)))
    left = level - head * (1 + (2 * done + head) / (2 * keys))
    return head + min(whole - head, affordable(left, done + head, keys))


def _mixed(pending: Pending, head: list[int], by_context: list[int], deep: int, aim: int) -> list[int]:
    """Returns `aim` tokens, those of `head` among them: `deep` more that attend to the most, then to the least."""
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
    """Returns fewer tokens, which cost `level`: those that attend to the least."""
    taken = head.copy()
    for i in by_context:
        done = pending[i][0] + taken[i]
        most = affordable(level - chunks_cost(pending, taken, keys), done, keys)
        taken[i] += min(pending[i][1] - done, aim - sum(taken), most)
    return taken
