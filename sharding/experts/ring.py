"""The ring transport: all-gather of all rows, local experts, and a reduce-scatter of the sums.

It sends each row to all devices, so it suits small batches on few devices. It is the reference for the other
transports.
"""

import dataclasses
from typing import ClassVar

import jax
from jax import lax

from pallas_kernels.backend import Backend
from sharding.collectives import Overlap, Transfer, start_reduce_scatter
from sharding.experts.hop import Hop
from sharding.experts.rows import Experts, TokenRows, localize
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine
from sharding.words import from_words, shapes_of, to_words


@dataclasses.dataclass(frozen=True)
class Ring:
    """All-gather and reduce-scatter over the devices of `machine`."""

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
