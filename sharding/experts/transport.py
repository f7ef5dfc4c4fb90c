"""The transport interface (dispatch and combine), and the selection of a transport.

Each transport is a frozen, hashable dataclass: `Ring` here, `exchange` (all_to_all, hierarchical and nccl_ep) and
`ragged` in their own files. Jitted steps close over it. `choose` uses the cost model of `sharding.experts.traffic`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import jax
from jax import lax

from pallas_kernels.backend import Backend
from sharding.collectives import Overlap, Transfer, start_reduce_scatter
from sharding.experts.exchange import Exchange
from sharding.experts.hop import Hop
from sharding.experts.ragged import Ragged
from sharding.experts.rows import Experts, TokenRows, localize
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine
from sharding.words import from_words, shapes_of, to_words


class Transport[Handle](Protocol):
    """Carries token rows to the devices of their replicas and the partial sums back. Runs inside `shard_map`.

    The two halves work like DeepEP's hook: `finish(start(rows, experts))`, with any work in between. That work hides
    the combine if `overlap` is HOOKS and the halves are called in program order.
    """

    @property
    def kind(self) -> TransportKind: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def replicas_per_device(self) -> int:
        """`Ed`."""
        ...

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Hops, whose buffers can overflow; the overlapped schedule interleaves their stages. May be empty."""
        ...

    @property
    def pairs(self) -> int | None:
        """(row, replica) pair capacity of `experts`; None: all pairs of the received rows."""
        ...

    @property
    def overlap(self) -> Overlap: ...

    def start(self, rows: TokenRows, experts: Experts, backend: Backend | None = None) -> Handle:
        """Dispatches the rows, computes their experts, and starts the combine; returns a handle for `finish`.

        `backend` is that of kernels that queue rows; None selects by device.
        """
        ...

    def finish(self, handle: Handle) -> tuple[jax.Array, jax.Array | None]:
        """Returns the weighted sums [T, D] of this device's rows, and how many of its buffers overflowed, [] int32.

        If a buffer has overflowed on any device, the sums of all devices are undefined. Without hops the count is None
        instead of 0: a constant under enforced program order crashes XLA (jax 0.12.0.1).
        """
        ...

    def traffic(self, rows: LayerRows) -> Traffic:
        """Returns what a device sends in a layer."""
        ...


@dataclasses.dataclass(frozen=True)
class Ring:
    """All-gather of all rows over the devices of `machine`, local experts, and a reduce-scatter of the sums.

    It sends each row to all devices, so it suits small batches on few devices. It is the reference for the other
    transports.
    """

    machine: Machine
    replicas_per_device: int
    overlap: Overlap = Overlap.NONE
    kind: ClassVar[TransportKind] = TransportKind.RING
    hops: ClassVar[tuple[Hop, ...]] = ()
    pairs: ClassVar[int | None] = None

    @classmethod
    def from_layer(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "Ring":
        """Returns the ring over `machine`, with `replicas` on each device; no buffer depends on `rows`."""
        return cls(machine, replicas, overlap)

    def start(self, rows: TokenRows, experts: Experts, backend: Backend | None = None) -> Transfer:
        """Gathers all rows, computes the local experts, and starts the reduce-scatter."""
        axes, replicas = self.machine.axes, self.replicas_per_device
        with jax.named_scope("dispatch"):
            words = lax.all_gather(jax.jit(to_words)(rows), axes, axis=0, tiled=True)
        shapes = shapes_of(rows)
        y = jax.jit(lambda words: experts(localize(from_words(words, shapes), axes, replicas))[0])(words)
        with jax.named_scope("combine"):
            return start_reduce_scatter(y, axes, self.overlap)

    def finish(self, handle: Transfer) -> tuple[jax.Array, None]:
        """Finishes the reduce-scatter; a ring has no buffers that could overflow."""
        return handle.finish(), None

    def traffic(self, rows: LayerRows) -> Traffic:
        """Returns the bytes of an all-gather and a reduce-scatter."""
        return Traffic.to_all(self.machine, rows.tokens * rows.row_bytes(rows.experts_per_token))


_BUILDERS: Mapping[TransportKind, Callable[[Machine, int, LayerRows, Overlap], Transport[Any]]] = {
    TransportKind.RING: Ring.from_layer,
    TransportKind.ALL_TO_ALL: Exchange.from_layer,
    TransportKind.HIERARCHICAL: Exchange.from_layer_by_node,
    TransportKind.RAGGED: Ragged.from_layer,
    TransportKind.NCCL_EP: Exchange.from_library,
}


def build(
    kind: TransportKind, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap = Overlap.NONE
) -> Transport[Any]:
    """Returns a transport of `kind` for `replicas` expert replicas on all devices together, with buffers for `rows`.

    Raises ValueError if the devices do not divide the replicas, for `HIERARCHICAL` on one node, and if the buffers of
    `RAGGED` or `NCCL_EP` would be too large.
    """
    if replicas % machine.devices:
        raise ValueError(
            f"{replicas} expert replicas do not divide over {machine.devices} devices: "
            f"add redundant experts to reach {-(-replicas // machine.devices) * machine.devices}"
        )
    return _BUILDERS[kind](machine, replicas // machine.devices, rows, overlap)


def choose(machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap = Overlap.NONE) -> Transport[Any]:
    """Returns the cheapest transport for `rows` by the cost model; never `RAGGED` or `NCCL_EP`, which it lacks."""
    kinds = [TransportKind.RING, TransportKind.ALL_TO_ALL, *([TransportKind.HIERARCHICAL] if machine.nodes > 1 else [])]
    candidates = [build(kind, machine, replicas, rows, overlap) for kind in kinds]
    return min(candidates, key=lambda t: t.traffic(rows).seconds)
