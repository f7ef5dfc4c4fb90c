"""Tokens to the devices that hold their experts, and back: dispatch and combine as static-shape collectives.

Everything here runs inside `shard_map`, on one rank. A *hop* moves rows along some mesh axes: every token goes once to
each peer that holds at least one of its experts, the peer computes what it can, and what comes back is summed. One hop
over all axes is the flat all-to-all; a hop over nodes followed by one over the GPUs of a node is DeepEP's node-limited
form: a token crosses to a node once, is fanned out inside it, and is reduced there on the way back.

Buffers have `capacity` rows for each pair of peers, near the expected load: at EP144 with 128 tokens a device the
expected load is 7 rows and the worst case 128, so worst-case buffers would carry 17 times the payload. What does not
fit goes in further rounds of `more` rows, for as long as the longest queue of any pair has rows left; nothing is ever
dropped. A row crosses as one line of words, whatever it consists of, and brings along how long its sender's queues
are: a dispatch is one message to each peer, and all know of further rounds by the time the first has arrived.

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
from sharding.words import from_words, shapes_of, to_words


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


class Queued(NamedTuple):
    """Rows before a hop: row t stands `slot[t, k]`-th in the queue for `peer[t, k]`."""

    rows: Rows
    peer: jax.Array  # [T, K] int32, `peers` where nothing is sent (no expert, or an earlier k has the same peer)
    slot: jax.Array  # [T, K] int32
    longest: jax.Array  # [1 + h] int32, of this rank's queues, and of those of the h outer hops as far as it has heard


class Sent(NamedTuple):
    """Rows under way as words, and the shapes of what these are: rows, and `longest` beside each."""

    handle: Any
    shapes: tuple[Rows, jax.ShapeDtypeStruct]


class Arrived(NamedTuple):
    """Rows after a hop, with the ids of this peer's experts, made local; and `longest` of all that meet in the hop."""

    rows: Rows
    longest: jax.Array  # [1 + h] int32


class Computed(NamedTuple):
    """Partial sums of the rows that arrived by a hop, where their experts live or are reached from by later hops."""

    sums: jax.Array  # [peers * C, D]
    rounds: jax.Array  # [hops] int32, of this hop and of the later ones
    longest: jax.Array  # [1 + h] int32, of all ranks that meet in this hop or a later one


class InFlight(NamedTuple):
    """A layer between the halves of an exchange: computed where the experts live, its sums on their way back."""

    queued: Queued
    combine: Any  # handle for `collect`
    rounds: jax.Array  # [hops] int32, those of the first round of the first hop
    longest: jax.Array  # [1 + h] int32


Experts = Callable[[Rows], jax.Array]
"""Computes the weighted sum of the selected local experts for each row, [T, D]; rows without a selection give zeros."""


ROUND_BOUND = 2.5
"""A first round carries at most this many times the payload, where 8 rows a pair do not exceed it already."""
OVERFLOW_CHANCE = 0.01
"""Share of the layers that may need a second round, where the bound allows it."""


@functools.cache
def expected_capacity(tokens: int, peers: int, experts_per_token: int, pairs: int) -> int:
    """Rows for a pair of peers in the first round.

    It holds the longest of the queues of all `pairs`, in 99 of 100 layers with even routing, or 2.5 times the payload
    if that is less. The longest of so many is far above the mean: at 144 peers and 128 tokens 7 rows on average, and
    18 to 21 in the longest of 20,736 queues, so that the flat exchange of such a mesh has 17 and takes further rounds.
    """
    payload = tokens * experts_per_token / peers
    bound = max(8, math.floor(ROUND_BOUND * payload))
    return min(tokens, bound, _longest_queue(tokens, expected_rows(tokens, peers, experts_per_token), pairs))


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
    """Rows for a pair in a further round: a quarter of the first."""
    return max(1, capacity // 4)


def expected_rows(tokens: int, peers: int, experts_per_token: int) -> float:
    """Mean number of rows for a pair of peers when experts are chosen evenly and independently."""
    return tokens * (1 - (1 - 1 / peers) ** experts_per_token)


def exchange(rows: Rows, hops: Sequence[Hop], experts: Experts) -> tuple[jax.Array, jax.Array]:
    """Computes routed experts wherever they live; returns ([T, D] sums for this rank's rows, rounds of each hop)."""
    return finish_exchange(start_exchange(rows, hops, experts), hops, experts)[:2]


def start_exchange(rows: Rows, hops: Sequence[Hop], experts: Experts, outer: jax.Array | None = None) -> InFlight:
    """The first half: dispatch, experts, and the start of the combine, of the first round.

    `outer` is `longest` of the hops by which the rows came, if any.
    """
    queued = enqueue(rows, hops[0], outer)
    computed = compute(receive(send(queued, 0, hops[0]), hops[0]), hops, experts)
    return InFlight(queued, send_back(computed.sums, hops[0]), computed.rounds, computed.longest)


def finish_exchange(flight: InFlight, hops: Sequence[Hop], experts: Experts) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The second half: waits for the combine, and runs what further rounds it takes.

    Returns the sums [T, D], the rounds [hops], and `longest` of the outer hops [h].
    """
    first = collect(flight.combine, flight.queued, 0, hops[0])
    rest = jax.jit(lambda *first: further_rounds(flight.queued, flight.longest, hops, experts, first))
    return *rest(first, flight.rounds), flight.longest[1:]


def compute(arrived: Arrived, hops: Sequence[Hop], experts: Experts) -> Computed:
    """At a peer of the first hop: partial sums of the rows that arrived, by way of the later hops if there are any.

    One jitted unit, for what that means see `enqueue`.
    """

    def unit(arrived: Arrived) -> Computed:
        once = jnp.ones(1, jnp.int32)
        if len(hops) == 1:
            return Computed(experts(arrived.rows), once, arrived.longest)
        flight = start_exchange(arrived.rows, hops[1:], experts, arrived.longest)
        sums, rounds, longest = finish_exchange(flight, hops[1:], experts)
        return Computed(sums, jnp.concatenate([once, rounds]), longest)

    return jax.jit(unit)(arrived)


def further_rounds(
    queued: Queued, longest: jax.Array, hops: Sequence[Hop], experts: Experts, first: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Adds the rounds after the first, of which there are nearly always none, to the result of the first.

    `longest` is that of all ranks that meet in any of the hops, since the later hops run inside each round of the
    first: a rank that had no round left would be missing from their collectives.
    """
    begin = jnp.int32(hops[0].capacity)
    hops = [dataclasses.replace(hop, capacity=hop.more, overlap=Overlap.NONE) for hop in hops]
    hop = hops[0]

    def more(carry: tuple) -> tuple:
        begin, total, rounds = carry
        computed = compute(receive(send(queued, begin, hop), hop), hops, experts)
        y = collect(send_back(computed.sums, hop), queued, begin, hop)
        return begin + hop.capacity, total + y, rounds + computed.rounds

    _, y, rounds = lax.while_loop(lambda carry: carry[0] < longest[0], more, (begin, *first))
    return y, rounds


# Each function jitted here is one unit: enforced program order keeps the order of units, and inside XLA is free.
@functools.partial(jax.jit, static_argnames="hop")
def enqueue(rows: Rows, hop: Hop, outer: jax.Array | None = None) -> Queued:
    """Queues each token once for each peer of the hop it needs, in token order; `outer` as of `start_exchange`."""
    peer, slot, length = queue(rows.ids, hop)
    own = length.max()[None]
    return Queued(rows, peer, slot, own if outer is None else jnp.concatenate([own, outer]))


def queue(ids: jax.Array, hop: Hop) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`peer` and `slot` as in `Queued`, and the length of the queue for each peer [peers], int32."""
    peer = jnp.where(ids >= 0, ids // hop.span, hop.peers)  # [T, K]
    earlier = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool), -1)
    repeated = ((peer[:, :, None] == peer[:, None, :]) & earlier).any(axis=2)
    peer = jnp.where(repeated, hop.peers, peer)
    needs = (peer[:, :, None] == jnp.arange(hop.peers)).any(axis=1)  # [T, peers]
    place = jnp.cumsum(needs, axis=0, dtype=jnp.int32)
    slot = jnp.take_along_axis(place, jnp.minimum(peer, hop.peers - 1), axis=1) - 1
    return peer, slot, place[-1]


@jax.named_scope("dispatch")
def send(queued: Queued, begin: jax.Array | int, hop: Hop) -> Sent:
    """Starts sending the C rows of each queue from place `begin` on: [peers * C, W], peer p's from p * C on."""
    shapes = shapes_of((queued.rows, queued.longest[None]))
    return Sent(start_all_to_all(_fill(queued, begin, hop), hop.axes, hop.overlap), shapes)


@jax.named_scope("dispatch")
def receive(sent: Sent, hop: Hop) -> Arrived:
    """Waits for the rows of `send`, peers * C of them."""

    def unpack(words: jax.Array) -> Arrived:
        rows, longest = from_words(words, sent.shapes)
        return Arrived(localise(rows, hop.axes, hop.span), longest.max(axis=0))

    return jax.jit(unpack)(finish(sent.handle, hop.overlap))


@jax.named_scope("combine")
def send_back(y: jax.Array, hop: Hop) -> Any:
    """Starts returning each row's partial sum to the peer it came from; a handle for `collect`."""
    return start_all_to_all(y, hop.axes, hop.overlap)


@jax.named_scope("combine")
def collect(handle: Any, queued: Queued, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Sums what comes back of such a round, in the order of k and in float32: [T, D] in the dtype of the rows."""
    return _sum(finish(handle, hop.overlap), queued, begin, hop)


def start_gather(rows: Rows, axes: tuple[str, ...], span: int, experts: Experts, overlap: Overlap) -> Any:
    """The ring transport: every rank sees every token and computes its share, and the sums start on their way back.

    Sends each token to all ranks, so it suits small batches and few ranks, and is the reference for the others. Returns
    a handle; `finish` gives [T, D].
    """
    with jax.named_scope("dispatch"):
        words = lax.all_gather(jax.jit(to_words)(rows), axes, axis=0, tiled=True)
    shapes = shapes_of(rows)
    y = jax.jit(lambda words: experts(localise(from_words(words, shapes), axes, span)))(words)
    with jax.named_scope("combine"):
        return start_reduce_scatter(y, axes, overlap)


@functools.partial(jax.jit, static_argnames="hop")
def _fill(queued: Queued, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """The buffer of a round, [peers * C, W]: rows as words, and `longest` at the end of each."""
    rows = fill_buffers(queued.rows, _place(queued, begin, hop), hop.peers * hop.capacity)
    longest = jnp.broadcast_to(queued.longest, (rows.ids.shape[0], *queued.longest.shape))
    return to_words((rows, longest))


def fill_buffers(rows: Rows, place: jax.Array, size: int) -> Rows:
    """Buffers [size, ...] with row t at each of `place[t]` [T, K] that is below `size`; other rows select nothing."""
    T, K = rows.ids.shape
    source = jnp.full((size,), T, jnp.int32)
    source = source.at[place.ravel()].set(jnp.repeat(jnp.arange(T, dtype=jnp.int32), K), mode="drop")

    def fill(x: jax.Array, empty: int = 0) -> jax.Array:
        return jnp.take(x, source, axis=0, mode="fill", fill_value=empty)

    return Rows(jax.tree.map(fill, rows.payload), fill(rows.ids, -1), fill(rows.weights))


@functools.partial(jax.jit, static_argnames=("axes", "span"))
def localise(rows: Rows, axes: tuple[str, ...], span: int) -> Rows:
    """Keeps the experts of this peer along `axes`, relative to its range: [rows, min(K, span)], by k, then -1.

    A row has no more than `span` of them, so that what follows has `span` columns where few experts live on a peer: 2
    instead of 8 at EP144.
    """
    ids = rows.ids - lax.axis_index(axes) * span
    mine = (rows.ids >= 0) & (ids >= 0) & (ids < span)
    column = jnp.where(mine, jnp.cumsum(mine, axis=1) - 1, -1)
    goes = column[:, :, None] == jnp.arange(min(ids.shape[1], span))  # [rows, K, columns]
    weights = jnp.where(goes, rows.weights[:, :, None], 0).sum(axis=1)
    return Rows(rows.payload, jnp.where(goes, ids[:, :, None], -1).max(axis=1), weights)


@functools.partial(jax.jit, static_argnames="hop")
def _sum(returned: jax.Array, queued: Queued, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Each row's partial sums of a round."""
    return sum_at(returned, _place(queued, begin, hop))


def sum_at(returned: jax.Array, place: jax.Array) -> jax.Array:
    """For each row of `place` [T, K] the sum of `returned` [size, D] there, but for places from `size` on; float32.

    It gathers: the order of a scatter-add is not defined on a GPU.
    """
    total = jnp.zeros((place.shape[0], returned.shape[1]), jnp.float32)
    for k in range(place.shape[1]):
        total += jnp.take(returned, place[:, k], axis=0, mode="fill", fill_value=0).astype(jnp.float32)
    return total.astype(returned.dtype)


def _place(queued: Queued, begin: jax.Array | int, hop: Hop) -> jax.Array:
    """Index of each (token, k) in a round's buffer [T, K]; out of range when it is not sent in this round."""
    column = queued.slot - begin
    sent = (queued.peer < hop.peers) & (column >= 0) & (column < hop.capacity)
    return jnp.where(sent, queued.peer * hop.capacity + column, hop.peers * hop.capacity)
