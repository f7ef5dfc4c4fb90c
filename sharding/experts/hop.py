"""One hop of an exchange: queues of rows per peer, dispatch and combine, each in two halves.

`send` starts a dispatch and `receive` finishes it; `send_back` starts a combine and `receive_back` finishes it. Other
work may run between the two halves, as with DeepEP's hook. Everything runs inside `shard_map`, on one device. `Hop`
does it by XLA's collectives, `sharding.experts.library_hop` by a library.

A row is sent as one line of words, all its parts together, so a dispatch is one message per peer. A queue that is
longer than a peer's part of the buffer loses its last rows; `Queued.overflows` reports it, and the engine retries the
step.

Shapes: T token rows of this device, K replicas per row, J peers, C rows per pair of peers, U words per row.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from pallas_kernels.align import queue_rows
from pallas_kernels.backend import Backend
from sharding.collectives import Overlap, Transfer, start_all_to_all
from sharding.experts.rows import Lines, TokenRows, fill_lines, localize, sum_at
from sharding.experts.traffic import LayerRows, Traffic
from sharding.mesh import Machine
from sharding.words import from_words, pack_sums, shapes_of, unpack_sums, width_of


class Queued(NamedTuple):
    """Rows before a hop, and where they are in the buffer to send, as in `RowQueues`.

    A hop by a library has neither lines nor their rows: the library queues.
    """

    rows: TokenRows
    line: jax.Array | None  # [T, K] int32
    row: jax.Array | None  # [J * C] int32
    overflows: jax.Array  # int32 of any shape, above 0 if rows are lost, as those of a queue beyond the hop's capacity


class DispatchHandle(NamedTuple):
    """A started dispatch, and the queues that it sends."""

    transfer: Transfer
    queued: Queued


class Received(NamedTuple):
    """Rows of a finished dispatch, `[L, ...]`, with local ids of this peer's replicas.

    `origins` is what the hop must know of each row's sender to return its sum: a tree of arrays, None for collectives.
    `overflows` has one number, as `Queued.overflows`, if the hop `reports_on_arrival`, which then counts beside it.
    """

    rows: TokenRows
    origins: Any
    overflows: tuple[jax.Array, ...] = ()


# Each jitted function here is one unit: program order is enforced between units, and XLA is free inside them.
@dataclasses.dataclass(frozen=True)
class Hop:
    """One hop: `peers` devices along `axes`, each of which holds or leads to `replicas_per_peer` replicas.

    Each pair of peers has `capacity` rows. With `int8_sums` the combine carries int8 and scales (`sharding.words`).
    """

    axes: tuple[str, ...]
    peers: int
    replicas_per_peer: int
    capacity: int
    overlap: Overlap = Overlap.NONE
    int8_sums: bool = False

    def of_micro_batch(self, number: int) -> "Hop":
        """Returns the hop of one of the micro-batches that are in flight at once."""
        return self

    @property
    def lines(self) -> int:
        """The lines of received rows, `L`: J * C."""
        return self.peers * self.capacity

    @property
    def reports_on_arrival(self) -> bool:
        """Whether rows can be lost where they arrive, too."""
        return False

    def traffic(self, machine: Machine, rows: LayerRows, row: int) -> Traffic:
        """Returns the traffic of `rows`, `row` bytes each there and back, of a device of `machine`; padding counts."""
        outside = {machine.axes: self.peers - machine.gpus, machine.axes[:1]: self.peers - 1}.get(self.axes, 0)
        return Traffic.from_peers(self.peers - 1, outside, self.capacity * row)

    def no_origins(self, queued: Queued) -> Any:
        """Returns `Received.origins` of a dispatch of `queued` if all of its rows select nothing."""
        return None

    @functools.partial(jax.jit, static_argnames=("self", "backend"))
    def enqueue(self, rows: TokenRows, backend: Backend | None = None) -> Queued:
        """Queues each row once for each peer that it needs, in row order; `backend` is the kernel's, as elsewhere."""
        queues = queue_rows(rows.ids, self.peers, self.replicas_per_peer, self.capacity, backend=backend)
        return Queued(rows, *queues)

    @jax.named_scope("dispatch")
    def send(self, queued: Queued) -> DispatchHandle:
        """Starts sending the first C rows of each queue: `[J * C, U]`, those for peer j from `j * C` on."""
        assert queued.row is not None
        transfer = start_all_to_all(fill_lines(queued.rows, queued.row), self.axes, self.overlap)
        return DispatchHandle(transfer, queued)

    @jax.named_scope("dispatch")
    def receive(self, sent: DispatchHandle) -> Received:
        """Finishes `send`; payloads stay `Lines`."""
        payload, *rest = shapes_sent(sent.queued)

        def unpack(words: jax.Array) -> TokenRows:
            ids, weights = from_words(words[:, width_of(payload) :], rest)
            rows = TokenRows(Lines.from_words(words, payload), ids, weights)
            return localize(rows, self.axes, self.replicas_per_peer)

        return Received(jax.jit(unpack)(sent.transfer.finish()), None)

    @jax.named_scope("combine")
    def send_back(self, sums: jax.Array, origins: Any) -> Transfer:
        """Starts returning the partial sum of each received row, `[J * C, D]`, to the peer that the row came from."""
        if not self.int8_sums:
            return start_all_to_all(sums, self.axes, self.overlap)
        started = start_all_to_all(pack_sums(sums), self.axes, self.overlap)
        return dataclasses.replace(started, like=shapes_of(sums))

    @jax.named_scope("combine")
    def receive_back(self, transfer: Transfer, queued: Queued) -> jax.Array:
        """Finishes `send_back` and sums the partial sums of each row: `[T, D]`.

        Sums in the order of k, in float32; the result has the dtype of the partial sums.
        """
        assert queued.line is not None
        return _sum(transfer.finish(), queued.line, transfer.like)


def shapes_sent(queued: Queued) -> TokenRows:
    """Returns shapes and dtypes of the rows, those of their payload unpacked."""
    payload, *rest = queued.rows
    return TokenRows(payload.like if isinstance(payload, Lines) else shapes_of(payload), *shapes_of(rest))


@functools.partial(jax.jit, static_argnames="like")
def _sum(returned: jax.Array, line: jax.Array, like: jax.ShapeDtypeStruct | None) -> jax.Array:
    """Returns the sum of each row's partial sums; `like` is the shape of packed ones."""
    return sum_at(returned if like is None else unpack_sums(returned, like), line)
