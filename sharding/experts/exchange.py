"""The all-to-all transports: dispatch of token rows to the devices of their experts' replicas, and combine.

Everything here runs inside `shard_map`, on one device, with static shapes. A *hop* moves rows along some mesh axes:
each row goes once to every peer that holds at least one of its replicas, the peer computes its experts, and the results
are summed. One hop over all axes is the flat all-to-all. A hop over nodes followed by one over the devices of a node is
DeepEP's node-limited dispatch: a row crosses to a node once, is fanned out inside it, and is reduced there on the way
back. One hop may be made by a library instead of collectives (`sharding.experts.library_hop`).

Buffers have `capacity` rows per pair of peers, near the expected load. At EP144 with 128 tokens per device the expected
load is 7 rows and the worst case 128, so worst-case buffers would carry 17 times the payload. The experts behind the
last hop have a capacity of `pairs` (row, replica) pairs. On overflow of either, the results are undefined and `finish`
counts it; the engine retries the step with a larger capacity per row. No device tests during a step whether there is
more to send, so none waits for the host.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from sharding.collectives import Overlap, Transfer
from sharding.experts.capacity import MIN_CAPACITY, expected_capacity, pair_capacity
from sharding.experts.hop import Hop, Queued, Received
from sharding.experts.library_hop import LibraryHop
from sharding.experts.rows import Experts, TokenRows
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine


class PeerSums(NamedTuple):
    """A peer's results for the rows of a hop: one partial sum per row, later hops included."""

    sums: jax.Array  # [J * C, D]
    overflows: tuple[jax.Array, ...]
    """`Received.overflows`, `Queued.overflows` of each later hop, and the experts' if they can overflow."""
    origins: Any = None  # `Received.origins` of the rows

    @classmethod
    def from_experts(
        cls, sums: jax.Array, overflow: jax.Array | None, on_arrival: tuple[jax.Array, ...] = (), origins: Any = None
    ) -> "PeerSums":
        """Returns the results of the experts behind the last hop; `on_arrival` is `Received.overflows` of the rows."""
        return cls(sums, on_arrival if overflow is None else (*on_arrival, overflow), origins)


class CombineHandle(NamedTuple):
    """A started combine of a hop: partial sums on their way to the device where the rows are `queued`."""

    transfer: Transfer
    queued: Queued
    overflows: tuple[jax.Array, ...]  # of this hop and of all behind it


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The transport with one hop, to devices, or with two: to nodes, then inside a node.

    The experts behind the last hop have a capacity of `pairs` (row, replica) pairs; None: all that may arrive.
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
        pairs = pair_capacity(T, devices, K, replicas, capacity, least=max(MIN_CAPACITY, devices))
        return cls(machine, replicas, (Hop(machine.axes, devices, replicas, capacity, overlap, rows.int8_sums),), pairs)

    @classmethod
    def from_layer_by_node(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "Exchange":
        """Returns two hops, nodes first, with buffers for `rows`. Raises ValueError on a machine of one node."""
        if machine.nodes == 1:
            raise ValueError("the hierarchical transport needs 2 or more nodes, got 1: use all_to_all or auto")
        T, K, devices = rows.tokens, rows.experts_per_token, machine.devices
        outer = expected_capacity(T, machine.nodes, K, devices * machine.nodes, replicas * machine.gpus)
        # Each node sends at most T rows, one per token; the second hop assumes that they are spread over all devices.
        # One token of each device always fits, so that a retry with small enough micro-steps succeeds.
        least = max(MIN_CAPACITY, machine.nodes)
        inner = expected_capacity(T * machine.nodes, devices, K, devices * machine.gpus, replicas, least=least)
        sizes = [
            (machine.axes[:1], machine.nodes, replicas * machine.gpus, outer),
            (machine.axes[1:], machine.gpus, replicas, inner),
        ]
        pairs = pair_capacity(T * machine.nodes, machine.gpus, K, replicas, inner, least=max(MIN_CAPACITY, devices))
        return cls(machine, replicas, tuple(Hop(*size, overlap, rows.int8_sums) for size in sizes), pairs)

    @classmethod
    def from_library(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "Exchange":
        """Returns one hop over all devices by NCCL EP. Raises ValueError as `LibraryHop.from_layer`."""
        like = cls.from_layer(machine, replicas, rows, overlap)
        return cls(machine, replicas, (LibraryHop.from_layer(machine, replicas, rows, overlap),), like.pairs)

    @property
    def kind(self) -> TransportKind:
        if isinstance(self.hops[0], LibraryHop):
            return TransportKind.NCCL_EP
        return TransportKind.ALL_TO_ALL if len(self.hops) == 1 else TransportKind.HIERARCHICAL

    @property
    def overlap(self) -> Overlap:
        return self.hops[0].overlap

    def start(self, rows: TokenRows, experts: Experts, backend: Backend | None = None) -> CombineHandle:
        """Dispatches by the first hop, computes, and starts the combine."""
        return start_exchange(rows, self.hops, experts, backend)

    def finish(self, handle: CombineHandle) -> tuple[jax.Array, jax.Array]:
        """Finishes the combine."""
        y, overflows = finish_exchange(handle, self.hops[0])
        return y, total(overflows)

    def traffic(self, rows: LayerRows) -> Traffic:
        """Returns the bytes of all hops."""
        K = rows.experts_per_token
        columns = [K, *(min(K, hop.replicas_per_peer) for hop in self.hops)]  # of ids, before each hop
        sizes = [rows.row_bytes(each, by_hop=True) for each in columns]
        return functools.reduce(
            operator.add,
            [hop.traffic(self.machine, rows, size) for hop, size in zip(self.hops, sizes, strict=False)],
        )


def start_exchange(rows: TokenRows, hops: Sequence[Hop], experts: Experts, backend: Backend | None) -> CombineHandle:
    """Runs the first half of a layer: dispatch, experts, and the start of the combine."""
    queued = hops[0].enqueue(rows, backend)
    return start_return(compute(hops[0].receive(hops[0].send(queued)), hops, experts, backend), queued, hops[0])


def start_return(computed: PeerSums, queued: Queued, hop: Hop) -> CombineHandle:
    """Starts the combine of `hop`."""
    transfer = hop.send_back(computed.sums, computed.origins)
    return CombineHandle(transfer, queued, (queued.overflows, *computed.overflows))


def finish_exchange(handle: CombineHandle, hop: Hop) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Finishes the combine of `hop`: returns the sums [T, D], and the overflows of this hop and of all behind it."""
    return hop.receive_back(handle.transfer, handle.queued), handle.overflows


def compute(arrived: Received, hops: Sequence[Hop], experts: Experts, backend: Backend | None) -> PeerSums:
    """Computes the partial sums of the rows of the first hop, through the later hops if there are any.

    This is one jitted unit (see `sharding.experts.hop`).
    """

    def unit(rows: TokenRows) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        if len(hops) == 1:
            return PeerSums.from_experts(*experts(rows))[:2]
        return finish_exchange(start_exchange(rows, hops[1:], experts, backend), hops[1])

    sums, overflows = jax.jit(unit)(arrived.rows)
    return PeerSums(sums, (*arrived.overflows, *overflows), arrived.origins)


@jax.jit
def total(overflows: tuple[jax.Array, ...]) -> jax.Array:
    """Returns how many buffers overflowed, [] int32; each peer's part of a hop's buffer counts."""
    return jnp.minimum(jnp.concatenate([each.reshape(-1) for each in overflows]), 1).sum(dtype=jnp.int32)
