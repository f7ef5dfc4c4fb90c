"""The all-to-all transports: token rows to the devices of their experts' replicas, and back, with static shapes.

Everything here runs inside `shard_map`, on one device. A *hop* moves rows along some mesh axes: each row goes once to
every peer that holds at least one of its replicas, the peer computes what it can, and the results are summed. One hop
over all axes is the flat all-to-all. A hop over nodes followed by one over the devices of a node is DeepEP's
node-limited form: a row crosses to a node once, is fanned out inside it, and is reduced there on the way back.

Buffers have `capacity` rows per pair of peers, near the expected load. At EP144 with 128 tokens per device the expected
load is 7 rows and the worst case 128, so worst-case buffers would carry 17 times the payload. The experts behind the
last hop have room for `pairs` of a row and one of its replicas. Where a queue is longer, or there are more pairs, the
results are wrong and say so (`finish` counts the overflows): the engine computes that step again with more room per
row. No device asks during a step whether there is more to send, so none waits for the host.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax

from sharding.experts.capacity import LEAST_ROOM, expected_capacity, pair_room
from sharding.experts.hop import Hop, Queued, enqueue, receive, receive_back, send, send_back
from sharding.experts.kind import Kind
from sharding.experts.rows import Experts, TokenRows
from sharding.experts.traffic import LayerRows, Traffic
from sharding.mesh import Machine
from sharding.wire.collectives import Overlap, Transfer


class PeerSums(NamedTuple):
    """What a peer has computed for the rows that a hop brought: one partial sum per row, later hops included."""

    sums: jax.Array  # [J * C, D]
    overflows: tuple[jax.Array, ...]  # `Queued.overflows` of each later hop, and the experts', where they may have some

    @classmethod
    def from_experts(cls, sums: jax.Array, overflow: jax.Array | None) -> "PeerSums":
        """Returns what the experts behind the last hop have answered."""
        return cls(sums, () if overflow is None else (overflow,))


class CombineHandle(NamedTuple):
    """Partial sums on their way back by a hop, to the device where the rows are `queued`."""

    transfer: Transfer
    queued: Queued
    overflows: tuple[jax.Array, ...]  # of this hop and of all behind it


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The transport with one hop, to devices, or with two: to nodes, then inside a node.

    The experts behind them have room for `pairs` of a row and a replica, None for all that may arrive.
    """

    machine: Machine
    replicas_per_device: int
    hops: tuple[Hop, ...]
    pairs: int | None = None

    @classmethod
    def from_layer(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "Exchange":
        """Returns one hop over all devices, with buffers for `rows`; `replicas` live on each device."""
        T, K, devices = rows.tokens, rows.experts_per_token, machine.devices
        capacity = expected_capacity(T, devices, K, devices * devices, replicas)
        pairs = pair_room(T, devices, K, replicas, capacity, least=max(LEAST_ROOM, devices))
        return cls(machine, replicas, (Hop(machine.axes, devices, replicas, capacity, overlap, rows.int8_sums),), pairs)

    @classmethod
    def from_layer_by_node(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "Exchange":
        """Returns two hops, nodes first, with buffers for `rows`. Raises ValueError on a machine of one node."""
        if machine.nodes == 1:
            raise ValueError("the hierarchical transport needs 2 nodes or more, here is 1: use all_to_all or auto")
        T, K, devices = rows.tokens, rows.experts_per_token, machine.devices
        outer = expected_capacity(T, machine.nodes, K, devices * machine.nodes, replicas * machine.gpus)
        # From each node come at most T rows, one per token, which take the second hop as if evenly over all devices.
        # One token of each device always fits, so that a step in small enough portions ends.
        least = max(LEAST_ROOM, machine.nodes)
        inner = expected_capacity(T * machine.nodes, devices, K, devices * machine.gpus, replicas, least=least)
        sizes = [
            (machine.axes[:1], machine.nodes, replicas * machine.gpus, outer),
            (machine.axes[1:], machine.gpus, replicas, inner),
        ]
        pairs = pair_room(T * machine.nodes, machine.gpus, K, replicas, inner, least=max(LEAST_ROOM, devices))
        return cls(machine, replicas, tuple(Hop(*size, overlap, rows.int8_sums) for size in sizes), pairs)

    @property
    def kind(self) -> Kind:
        return Kind.ALL_TO_ALL if len(self.hops) == 1 else Kind.HIERARCHICAL

    @property
    def overlap(self) -> Overlap:
        return self.hops[0].overlap

    def start(self, rows: TokenRows, experts: Experts) -> CombineHandle:
        """Sends the rows by the first hop, computes, and starts the way back."""
        return start_exchange(rows, self.hops, experts)

    def finish(self, handle: CombineHandle) -> tuple[jax.Array, jax.Array]:
        """Waits for the sums."""
        y, overflows = finish_exchange(handle, self.hops[0])
        return y, total(overflows)

    def traffic(self, rows: LayerRows) -> Traffic:
        """Returns the bytes of all hops."""
        K = rows.experts_per_token
        columns = [K, *(min(K, hop.replicas_per_peer) for hop in self.hops)]  # of ids, before each hop
        sizes = [rows.row_bytes(each, by_hop=True) for each in columns]
        parts = [
            Traffic.from_peers(hop.peers - 1, self._outside(hop), hop.capacity * size)
            for hop, size in zip(self.hops, sizes, strict=False)
        ]
        return functools.reduce(operator.add, parts)

    def _outside(self, hop: Hop) -> int:
        """Returns the peers of a hop that are in other nodes."""
        axes = self.machine.axes
        return {axes: hop.peers - self.machine.gpus, axes[:1]: hop.peers - 1}.get(hop.axes, 0)


def start_exchange(rows: TokenRows, hops: Sequence[Hop], experts: Experts) -> CombineHandle:
    """Runs the first half of a layer: dispatch, experts, and the start of the combine."""
    queued = enqueue(rows, hops[0])
    return start_return(compute(receive(send(queued, hops[0]), hops[0]), hops, experts), queued, hops[0])


def start_return(computed: PeerSums, queued: Queued, hop: Hop) -> CombineHandle:
    """Starts the way back by `hop`."""
    return CombineHandle(send_back(computed.sums, hop), queued, (queued.overflows, *computed.overflows))


def finish_exchange(returning: CombineHandle, hop: Hop) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Runs the second half of a layer: waits for the combine by `hop`.

    Returns the sums [T, D], and the overflows of this hop and of all behind it.
    """
    return receive_back(returning.transfer, returning.queued, hop), returning.overflows


def compute(arrived: TokenRows, hops: Sequence[Hop], experts: Experts) -> PeerSums:
    """Computes the partial sums of the rows that arrived by the first hop, by way of the later hops if there are any.

    This is one jitted unit; `hop.enqueue` says what that means.
    """

    def unit(arrived: TokenRows) -> PeerSums:
        if len(hops) == 1:
            return PeerSums.from_experts(*experts(arrived))
        return PeerSums(*finish_exchange(start_exchange(arrived, hops[1:], experts), hops[1]))

    return jax.jit(unit)(arrived)


@jax.jit
def total(overflows: tuple[jax.Array, ...]) -> jax.Array:
    """Returns how many buffers overflowed, [] int32."""
    return functools.reduce(operator.add, overflows)
