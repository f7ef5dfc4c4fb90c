"""The all-to-all transports: token rows to the devices of their experts' replicas, and back, with static shapes.

Everything here runs inside `shard_map`, on one device. A *hop* moves rows along some mesh axes: each row goes once to
every peer that holds at least one of its replicas, the peer computes what it can, and the results are summed. One hop
over all axes is the flat all-to-all. A hop over nodes followed by one over the devices of a node is DeepEP's
node-limited form: a row crosses to a node once, is fanned out inside it, and is reduced there on the way back.

Buffers have `capacity` rows per pair of peers, near the expected load. At EP144 with 128 tokens per device the expected
load is 7 rows and the worst case 128, so worst-case buffers would carry 17 times the payload. Rows that do not fit go
in overflow rounds, for as long as the longest queue of any pair has rows left; nothing is ever dropped.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharding.experts.capacity import expected_capacity, overflow_capacity
from sharding.experts.hop import Arrived, Hop, Queued, enqueue, receive, receive_back, send, send_back
from sharding.experts.kind import Kind
from sharding.experts.rows import Experts, TokenRows
from sharding.experts.traffic import LayerRows, Traffic
from sharding.mesh import Machine
from sharding.wire.collectives import Overlap, Transfer
from sharding.wire.words import WORD_BYTES


class Computed(NamedTuple):
    """What a peer has computed for the rows that a hop brought: one partial sum per row, later hops included."""

    sums: jax.Array  # [J * C, D]
    rounds: jax.Array  # [hops] int32, of this hop and of the later ones
    longest: jax.Array  # [1 + h] int32, the maximum over all devices that meet in this hop or in a later one


class Returning(NamedTuple):
    """Partial sums on their way back by a hop, to the device where the rows are `queued`."""

    transfer: Transfer
    queued: Queued
    rounds: jax.Array  # [hops] int32, with one round of this hop
    longest: jax.Array  # [1 + h] int32, as in `Computed`


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The transport with one hop, to devices, or with two: to nodes, then inside a node."""

    machine: Machine
    replicas_per_device: int
    hops: tuple[Hop, ...]

    @classmethod
    def from_layer(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "Exchange":
        """Returns one hop over all devices, with buffers for `rows`; `replicas` live on each device."""
        T, K, devices = rows.tokens, rows.experts_per_token, machine.devices
        capacity = expected_capacity(T, devices, K, devices * devices)
        hop = Hop(machine.axes, devices, replicas, capacity, overflow_capacity(capacity), overlap)
        return cls(machine, replicas, (hop,))

    @classmethod
    def from_layer_by_node(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "Exchange":
        """Returns two hops, nodes first, with buffers for `rows`. Raises ValueError on a machine of one node."""
        if machine.nodes == 1:
            raise ValueError("the hierarchical transport needs 2 nodes or more, here is 1: use all_to_all or auto")
        T, K, devices = rows.tokens, rows.experts_per_token, machine.devices
        outer = expected_capacity(T, machine.nodes, K, devices * machine.nodes)
        # From each node come at most T rows, one per token, which take the second hop as if evenly over all devices.
        inner = expected_capacity(T * machine.nodes, devices, K, devices * machine.gpus)
        sizes = [
            (machine.axes[:1], machine.nodes, replicas * machine.gpus, outer),
            (machine.axes[1:], machine.gpus, replicas, inner),
        ]
        return cls(machine, replicas, tuple(Hop(*size, overflow_capacity(size[-1]), overlap) for size in sizes))

    @property
    def kind(self) -> Kind:
        return Kind.ALL_TO_ALL if len(self.hops) == 1 else Kind.HIERARCHICAL

    @property
    def overlap(self) -> Overlap:
        return self.hops[0].overlap

    def start(self, rows: TokenRows, experts: Experts) -> Returning:
        """Sends the rows by the first hop, computes, and starts the way back."""
        return start_exchange(rows, self.hops, experts)

    def finish(self, handle: Returning, experts: Experts) -> tuple[jax.Array, jax.Array]:
        """Waits for the sums, and runs the overflow rounds."""
        return finish_exchange(handle, self.hops, experts)[:2]

    def traffic(self, rows: LayerRows) -> Traffic:
        """Returns the bytes of one round of each hop."""
        return functools.reduce(operator.add, self._round(rows, [hop.capacity for hop in self.hops]))

    def overflow_traffic(self, rows: LayerRows) -> tuple[Traffic, ...]:
        """Returns the bytes of one overflow round, per hop."""
        return self._round(rows, [hop.overflow_capacity for hop in self.hops])

    def _round(self, rows: LayerRows, capacities: Sequence[int]) -> tuple[Traffic, ...]:
        """Returns the traffic of one round of each hop; a row brings one word of `Queued.longest` per hop."""
        K = rows.experts_per_token
        columns = [K, *(min(K, hop.replicas_per_peer) for hop in self.hops)]  # of ids, before each hop
        row_bytes = [rows.row_bytes(columns[h]) + WORD_BYTES * (h + 1) for h in range(len(self.hops))]
        return tuple(
            Traffic.from_peers(hop.peers - 1, self._outside(hop), capacity * row)
            for hop, capacity, row in zip(self.hops, capacities, row_bytes, strict=True)
        )

    def _outside(self, hop: Hop) -> int:
        """Returns the peers of a hop that are in other nodes."""
        axes = self.machine.axes
        return {axes: hop.peers - self.machine.gpus, axes[:1]: hop.peers - 1}.get(hop.axes, 0)


def start_exchange(rows: TokenRows, hops: Sequence[Hop], experts: Experts, outer: jax.Array | None = None) -> Returning:
    """Runs the first half of a layer: dispatch, experts, and the start of the combine, all of the first round.

    `outer` [h] is `longest` of the hops that brought the rows here, if any.
    """
    queued = enqueue(rows, hops[0], outer)
    computed = compute(receive(send(queued, 0, hops[0]), hops[0]), hops, experts)
    return start_return(computed, queued, hops[0])


def start_return(computed: Computed, queued: Queued, hop: Hop) -> Returning:
    """Starts the way back by `hop`."""
    return Returning(send_back(computed.sums, hop), queued, computed.rounds, computed.longest)


def finish_exchange(
    returning: Returning, hops: Sequence[Hop], experts: Experts
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the second half: waits for the combine, then runs the overflow rounds, if any.

    Returns the sums [T, D], the rounds [hops], and `longest` of the outer hops [h].
    """
    _, queued, rounds, longest = returning
    first = receive_back(returning.transfer, queued, 0, hops[0])
    rest = jax.jit(lambda *first: add_overflow_rounds(queued, longest, hops, experts, first))
    return *rest(first, rounds), longest[1:]


def compute(arrived: Arrived, hops: Sequence[Hop], experts: Experts) -> Computed:
    """Computes the partial sums of the rows that arrived by the first hop, by way of the later hops if there are any.

    This is one jitted unit; `hop.enqueue` says what that means.
    """

    def unit(arrived: Arrived) -> Computed:
        once = jnp.ones(1, jnp.int32)
        if len(hops) == 1:
            return Computed(experts(arrived.rows), once, arrived.longest)
        returning = start_exchange(arrived.rows, hops[1:], experts, arrived.longest)
        sums, rounds, longest = finish_exchange(returning, hops[1:], experts)
        return Computed(sums, jnp.concatenate([once, rounds]), longest)

    return jax.jit(unit)(arrived)


def add_overflow_rounds(
    queued: Queued, longest: jax.Array, hops: Sequence[Hop], experts: Experts, first: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Adds the overflow rounds, of which there are nearly always none, to the sums and rounds of the first round.

    `longest` is the maximum over all devices that meet in any of the hops. The later hops run inside each round of the
    first one, so a device that had no round left would be missing from their collectives.
    """
    begin = jnp.int32(hops[0].capacity)
    hops = [hop.overflowing for hop in hops]
    hop = hops[0]

    def one_round(carry: tuple) -> tuple:
        begin, total, rounds = carry
        computed = compute(receive(send(queued, begin, hop), hop), hops, experts)
        y = receive_back(send_back(computed.sums, hop), queued, begin, hop)
        return begin + hop.capacity, total + y, rounds + computed.rounds

    _, y, rounds = lax.while_loop(lambda carry: carry[0] < longest[0], one_round, (begin, *first))
    return y, rounds
