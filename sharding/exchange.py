"""Tokens to the devices that hold their experts, and back: dispatch and combine as static-shape collectives.

Everything here runs inside `shard_map`, on one rank. A *hop* moves rows along some mesh axes: every token goes once to
each peer that holds at least one of its experts, the peer computes what it can, and what comes back is summed. One hop
over all axes is the flat all-to-all; a hop over nodes followed by one over the GPUs of a node is DeepEP's node-limited
form: a token crosses to a node once, is fanned out inside it, and is reduced there on the way back.

Buffers have `capacity` rows for each pair of peers, near the expected load: at EP144 with 128 tokens a device the
expected load is 7 rows and the worst case 128, so worst-case buffers would carry 17 times the payload. What does not
fit goes in further rounds of `more` rows, for as long as the longest queue of any pair, agreed by an all-reduce, has
rows left; nothing is ever dropped.

Both crossings come in two halves, DeepEP's hook: `send` starts a dispatch and `receive` finishes it, `send_back` starts
a combine and `collect` finishes it. `start_exchange` and `finish_exchange` are the same at the level of a layer: the
first ends with the start of the combine, so that a caller computes something else (the shared expert) in between.

Expert ids are physical ids relative to the range that the current peers share: peer p of a hop owns ids
`[p * span, (p + 1) * span)`. -1 selects nothing. Shapes: T tokens of this rank, K experts a token, C capacity.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives import Overlap, finish, start_all_to_all, start_reduce_scatter


@dataclasses.dataclass(frozen=True)
class Hop:
    """One crossing: `peers` devices along `axes`, `span` expert ids a peer.

    For a pair of peers the first round has `capacity` rows, a further one `more`.
    """

    axes: tuple[str, ...]
    peers: int
    span: int
    capacity: int
    more: int
    overlap: Overlap = Overlap.NONE


class Rows(NamedTuple):
    """Tokens on their way: `payload` is any tree of [T, ...] arrays (activations, or FP8 values and their scales)."""

    payload: Any
    ids: jax.Array  # [T, K] int32, -1 selects nothing; the others of a row differ from each other
    weights: jax.Array  # [T, K] float32


class Plan(NamedTuple):
    """Where the rows of one hop go: row t stands `slot[t, k]`-th in the queue for `peer[t, k]`."""

    peer: jax.Array  # [T, K] int32, `peers` where nothing is sent (no expert, or an earlier k has the same peer)
    slot: jax.Array  # [T, K] int32
    longest: jax.Array  # int32, length of the longest queue of any pair, the same on every peer


class Sent(NamedTuple):
    """Rows under way: one handle for each array of a `Rows`."""

    handles: list[Any]
    tree: Any


class InFlight(NamedTuple):
    """A layer between the halves of an exchange: computed where the experts live, its sums on their way back."""

    rows: Rows
    plan: Plan
    combine: Any  # handle for `collect`
    rounds: jax.Array  # [hops] int32, those of the first round of the first hop


Experts = Callable[[Rows], jax.Array]
"""Computes the weighted sum of the selected local experts for each row, [T, D]; rows without a selection give zeros."""


ROUND_BOUND = 2.5
"""A first round carries at most this many times the payload, where 8 rows a pair do not exceed it already."""
OVERFLOW_CHANCE = 0.01
"""Share of the layers that may need a second round, where the bound allows it."""


@functools.cache
def expected_capacity(tokens: int, peers: int, experts_per_token: int, pairs: int) -> int:
    """Rows for a pair of peers in the first round: a multiple of 8, or all `tokens` if they are fewer.

    It holds the longest of the queues of all `pairs`, in 99 of 100 layers with even routing, or 2.5 times the payload
    if that is less. The longest of so many is far above the mean: at 144 peers and 128 tokens 7 rows on average, and
    18 to 21 in the longest of 20,736 queues, so that the flat exchange of such a mesh has 16 and takes further rounds.
    """
    payload = tokens * experts_per_token / peers
    bound = max(8, 8 * math.floor(ROUND_BOUND * payload / 8))
    needed = 8 * math.ceil(_longest_queue(tokens, expected_rows(tokens, peers, experts_per_token), pairs) / 8)
    return min(tokens, bound, needed)


def _longest_queue(tokens: int, mean: float, pairs: int) -> int:
    """What a binomial queue of `tokens` with this mean exceeds in `OVERFLOW_CHANCE` / `pairs` of the cases."""
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


def further_capacity(capacity: int) -> int:
    """Rows for a pair in a further round: about a quarter of the first, a multiple of 4."""
    return min(capacity, 4 * math.ceil(capacity / 16))


def expected_rows(tokens: int, peers: int, experts_per_token: int) -> float:
    """Mean number of rows for a pair of peers when experts are chosen evenly and independently."""
    return tokens * (1 - (1 - 1 / peers) ** experts_per_token)


def exchange(rows: Rows, hops: Sequence[Hop], experts: Experts) -> tuple[jax.Array, jax.Array]:
    """Computes routed experts wherever they live; returns ([T, D] sums for this rank's rows, rounds of each hop).

    Without hops every expert is local. Later hops run inside the rounds of earlier ones.
    """
    if not hops:
        return experts(rows), jnp.zeros((0,), jnp.int32)
    return finish_exchange(start_exchange(rows, hops, experts), hops, experts)


def start_exchange(rows: Rows, hops: Sequence[Hop], experts: Experts) -> InFlight:
    """The first half: dispatch, experts, and the start of the combine, of the first round."""
    plan = make_plan(rows.ids, tuple(hops))
    sums, rounds = compute(receive(send(rows, plan, 0, hops[0]), hops[0]), hops, experts)
    return InFlight(rows, plan, send_back(sums, hops[0]), rounds)


def finish_exchange(flight: InFlight, hops: Sequence[Hop], experts: Experts) -> tuple[jax.Array, jax.Array]:
    """The second half: waits for the combine, and runs what further rounds it takes; result as of `exchange`."""
    first = collect(flight.combine, flight.plan, 0, hops[0])
    rest = jax.jit(lambda *result: further_rounds(flight.rows, flight.plan, hops, experts, result))
    return rest(first, flight.rounds)


def compute(arrived: Rows, hops: Sequence[Hop], experts: Experts) -> tuple[jax.Array, jax.Array]:
    """At a peer of the first hop: partial sums of the rows that arrived, and the rounds of each hop until then.

    One jitted unit, for what that means see `_fill`.
    """

    def unit(arrived: Rows) -> tuple[jax.Array, jax.Array]:
        sums, inner = exchange(arrived, hops[1:], experts)
        return sums, jnp.concatenate([jnp.ones(1, jnp.int32), inner])

    return jax.jit(unit)(arrived)


def further_rounds(
    rows: Rows, plan: Plan, hops: Sequence[Hop], experts: Experts, first: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Adds the rounds after the first, of which there are nearly always none, to the result of the first."""
    begin = jnp.int32(hops[0].capacity)
    hops = [dataclasses.replace(hop, capacity=hop.more, overlap=Overlap.NONE) for hop in hops]
    hop = hops[0]

    def more(carry: tuple) -> tuple:
        begin, total, rounds = carry
        sums, taken = compute(receive(send(rows, plan, begin, hop), hop), hops, experts)
        y = collect(send_back(sums, hop), plan, begin, hop)
        return begin + hop.capacity, total + y, rounds + taken

    _, y, rounds = lax.while_loop(lambda carry: carry[0] < plan.longest, more, (begin, *first))
    return y, rounds


@functools.partial(jax.jit, static_argnames="hops")
def make_plan(ids: jax.Array, hops: tuple[Hop, ...]) -> Plan:
    """Queues each token once for each peer of the first hop it needs, in token order, and agrees on the longest queue.

    All ranks that meet in any of the hops agree, since the later hops run inside each round of the first: a rank that
    had no round left would be missing from their collectives.
    """
    hop = hops[0]
    peer, slot, length = queue(ids, hop)
    longest = lax.pmax(length.max(), tuple({axis: None for hop in hops for axis in hop.axes}))
    return Plan(peer, slot, longest)


def queue(ids: jax.Array, hop: Hop) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`peer` and `slot` as in `Plan`, and the length of the queue for each peer [peers], int32."""
    peer = jnp.where(ids >= 0, ids // hop.span, hop.peers)  # [T, K]
    earlier = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool), -1)
    repeated = ((peer[:, :, None] == peer[:, None, :]) & earlier).any(axis=2)
    peer = jnp.where(repeated, hop.peers, peer)
    needs = (peer[:, :, None] == jnp.arange(hop.peers)).any(axis=1)  # [T, peers]
    place = jnp.cumsum(needs, axis=0, dtype=jnp.int32)
    slot = jnp.take_along_axis(place, jnp.minimum(peer, hop.peers - 1), axis=1) - 1
    return peer, slot, place[-1]


@jax.named_scope("dispatch")
def send(rows: Rows, plan: Plan, begin: jax.Array | int, hop: Hop) -> Sent:
    """Starts sending the C rows of each queue from place `begin` on: [peers * C, ...], peer p's from p * C on."""
    leaves, tree = jax.tree.flatten(_fill(rows, plan, begin, hop))
    return Sent([start_all_to_all(x, hop.axes, hop.overlap) for x in leaves], tree)


@jax.named_scope("dispatch")
def receive(sent: Sent, hop: Hop) -> Rows:
    """Waits for the rows of `send`, [peers * C, ...], and keeps the ids of this peer's experts, made local."""
    leaves = [finish(handle, hop.overlap) for handle in sent.handles]
    return localise(jax.tree.unflatten(sent.tree, leaves), hop)


@jax.named_scope("combine")
def send_back(y: jax.Array, hop: Hop) -> Any:
    """Starts returning each row's partial sum to the peer it came from; a handle for `collect`."""
    return start_all_to_all(y, hop.axes, hop.overlap)


@jax.named_scope("combine")
def collect(sent: Any, plan: Plan, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Sums what comes back of such a round, in the order of k and in float32: [T, D] in the dtype of the rows."""
    return _sum(finish(sent, hop.overlap), plan, begin, hop)


def start_gather(rows: Rows, axes: tuple[str, ...], span: int, experts: Experts, overlap: Overlap) -> Any:
    """The ring transport: every rank sees every token and computes its share, and the sums start on their way back.

    Sends each token to all ranks, so it suits small batches and few ranks, and is the reference for the others. Returns
    a handle; `finish` gives [T, D].
    """
    with jax.named_scope("dispatch"):
        everywhere = jax.tree.map(lambda x: lax.all_gather(x, axes, axis=0, tiled=True), rows)
    y = jax.jit(experts)(localise(everywhere, Hop(axes, 1, span, 1, 1)))
    with jax.named_scope("combine"):
        return start_reduce_scatter(y, axes, overlap)


# Each of these is one jitted unit: enforced program order keeps the order of units, and inside of them XLA is free.
@functools.partial(jax.jit, static_argnames="hop")
def _fill(rows: Rows, plan: Plan, begin: jax.Array | int, hop: Hop) -> Rows:
    """The buffers of a round, [peers * C, ...]."""
    return fill_buffers(rows, _place(plan, begin, hop), hop.peers * hop.capacity)


def fill_buffers(rows: Rows, place: jax.Array, size: int) -> Rows:
    """Buffers [size, ...] with row t at each of `place[t]` [T, K] that is below `size`; other rows select nothing."""
    T, K = rows.ids.shape
    source = jnp.full((size,), T, jnp.int32)
    source = source.at[place.ravel()].set(jnp.repeat(jnp.arange(T, dtype=jnp.int32), K), mode="drop")

    def fill(x: jax.Array, empty: int = 0) -> jax.Array:
        return jnp.take(x, source, axis=0, mode="fill", fill_value=empty)

    return Rows(jax.tree.map(fill, rows.payload), fill(rows.ids, -1), fill(rows.weights))


@functools.partial(jax.jit, static_argnames="hop")
def localise(rows: Rows, hop: Hop) -> Rows:
    """Keeps the experts of this peer, relative to its range: [rows, min(K, span)], in the order of k, then -1.

    A row has no more than `span` of them, so that what follows has `span` columns where few experts live on a peer: 2
    instead of 8 at EP144.
    """
    ids = rows.ids - lax.axis_index(hop.axes) * hop.span
    mine = (rows.ids >= 0) & (ids >= 0) & (ids < hop.span)
    column = jnp.where(mine, jnp.cumsum(mine, axis=1) - 1, -1)
    goes = column[:, :, None] == jnp.arange(min(ids.shape[1], hop.span))  # [rows, K, columns]
    weights = jnp.where(goes, rows.weights[:, :, None], 0).sum(axis=1)
    return Rows(rows.payload, jnp.where(goes, ids[:, :, None], -1).max(axis=1), weights)


@functools.partial(jax.jit, static_argnames="hop")
def _sum(returned: jax.Array, plan: Plan, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Each row's partial sums of a round."""
    return sum_at(returned, _place(plan, begin, hop))


def sum_at(returned: jax.Array, place: jax.Array) -> jax.Array:
    """For each row of `place` [T, K] the sum of `returned` [size, D] there, but for places from `size` on; float32.

    It gathers: the order of a scatter-add is not defined on a GPU.
    """
    total = jnp.zeros((place.shape[0], returned.shape[1]), jnp.float32)
    for k in range(place.shape[1]):
        total += jnp.take(returned, place[:, k], axis=0, mode="fill", fill_value=0).astype(jnp.float32)
    return total.astype(returned.dtype)


def _place(plan: Plan, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Index of each (token, k) in a round's buffer [T, K]; out of range when it is not sent in this round."""
    column = plan.slot - begin
    sent = (plan.peer < hop.peers) & (column >= 0) & (column < hop.capacity)
    return jnp.where(sent, plan.peer * hop.capacity + column, hop.peers * hop.capacity)
