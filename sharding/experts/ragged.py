"""The ragged transport: exact sizes, no padding on the wire, and buffers for the worst case.

`lax.ragged_all_to_all` moves slices of any size between devices. It has no asynchronous form, so nothing is computed
during the transfer. XLA has it for GPUs, not for CPUs, in three ways; none has run here, so it is used only on request:

- A kernel that writes to up to 8 peers of a node, by default. It has one thread block for each slice, which reached
  2 % of NVLink's speed on eight B200 (openxla/xla#33386); in 32 slices per peer a step took two thirds of the time. It
  crashes above 32 devices (openxla/xla#47283).
- NCCL's sends and receives with more peers: the host reads the sizes from the device and waits.
- A kernel that starts transfers from the device, inside a node and between nodes, with NCCL 2.29 or newer and symmetric
  buffers. Without these the option does nothing. Processes of several devices needed a fix after jax 0.11
  (openxla/xla#47146).

`tools.doctor.exchange_paths` measures the first and the last.

Shapes: T token rows of this device, K replicas per row, J peers, U words per row.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.align import positions, rows_at
from pallas_kernels.backend import Backend
from sharding.collectives import Overlap
from sharding.experts.capacity import expected_rows
from sharding.experts.hop import Hop
from sharding.experts.rows import Experts, TokenRows, fill_lines, localize, sum_at
from sharding.experts.traffic import LayerRows, Traffic
from sharding.experts.transport_kind import TransportKind
from sharding.mesh import Machine
from sharding.words import from_words, shapes_of

MAX_BUFFER_BYTES = 2 << 30
"""Bound on the buffers of one device, for the worst case that all devices send all their rows to it."""


class Slices(NamedTuple):
    """The slices that this device exchanges with each peer, [J] int32 each; the rows for one peer are contiguous.

    `send_at`, `sent`: first row and number of the rows for peer j in this device's buffer. `recv_at`, `received`: the
    same for the rows from peer j. `their_recv_at`, `their_send_at`: first rows in the buffers of peer j;
    `ragged_all_to_all` counts its `output_offsets` in the receiver's output.
    """

    send_at: jax.Array
    sent: jax.Array
    recv_at: jax.Array
    received: jax.Array
    their_recv_at: jax.Array
    their_send_at: jax.Array


@dataclasses.dataclass(frozen=True)
class Ragged:
    """One hop over the devices of `machine` by `ragged_all_to_all`; `overlap` is that of the surrounding program."""

    machine: Machine
    replicas_per_device: int
    overlap: Overlap = Overlap.NONE
    kind: ClassVar[TransportKind] = TransportKind.RAGGED
    hops: ClassVar[tuple[Hop, ...]] = ()  # exact sizes cannot overflow
    pairs: ClassVar[int | None] = None

    @classmethod
    def from_layer(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "Ragged":
        """Returns the ragged transport over `machine`, with `replicas` on each device.

        Raises ValueError if buffers for `rows` would take more than `MAX_BUFFER_BYTES`.
        """
        worst = machine.devices * rows.tokens * rows.row_bytes(rows.experts_per_token)
        if worst > MAX_BUFFER_BYTES:
            raise ValueError(
                f"the ragged transport's buffers must hold {rows.tokens} tokens from each of {machine.devices} "
                f"devices, {worst / 2**30:.1f} GiB of at most {MAX_BUFFER_BYTES >> 30}: lower "
                "max_num_batched_tokens or max_num_seqs, or use another expert_transport"
            )
        return cls(machine, replicas, overlap)

    def start(self, rows: TokenRows, experts: Experts, backend: Backend | None = None) -> tuple[jax.Array, jax.Array]:
        """Dispatches, computes, and combines: only the sum is left to `finish`. Buffers hold T * J rows.

        Returns partial sums [T * min(K, J), D], back on the device of the rows, and the lines of each row, [T, K].
        """
        T, K = rows.ids.shape
        hop = self._hop(T)
        words, place, slices = _pack(rows, hop)
        with jax.named_scope("dispatch"):
            arrived = to_peers(words, slices, hop.axes, T * hop.peers)
        shapes = shapes_of(rows)
        unit = jax.jit(lambda words, received: experts(_unpack(words, received, shapes, hop))[0])
        sums = unit(arrived, slices.received)
        with jax.named_scope("combine"):
            return from_peers(sums, slices, hop.axes, T * min(K, hop.peers)), place

    def finish(self, handle: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        """Sums the partial sums of each row; exact sizes never overflow."""
        return jax.jit(sum_at)(*handle), None

    def traffic(self, rows: LayerRows) -> Traffic:
        """Returns the expected bytes under even routing."""
        row = rows.row_bytes(rows.experts_per_token)
        expected = expected_rows(rows.tokens, self.machine.devices, rows.experts_per_token)
        return Traffic.to_all(self.machine, row * expected)

    def _hop(self, tokens: int) -> Hop:
        return Hop(self.machine.axes, self.machine.devices, self.replicas_per_device, tokens)


@functools.partial(jax.jit, static_argnames="hop")
def _pack(rows: TokenRows, hop: Hop) -> tuple[jax.Array, jax.Array, Slices]:
    """Returns the rows as words sorted by peer, the line of each (row, k) [T, K], and the slices."""
    T, K = rows.ids.shape
    size = T * min(K, hop.peers)
    peer, position, length = positions(rows.ids, hop.peers, hop.replicas_per_peer)
    slices = slices_of(length, hop.axes)
    line = slices.send_at[jnp.minimum(peer, hop.peers - 1)] + position
    place = jnp.where(peer < hop.peers, line, size)
    return fill_lines(rows, rows_at(place, size)), place, slices


def _unpack(words: jax.Array, received: jax.Array, shapes: TokenRows, hop: Hop) -> TokenRows:
    """Returns the received rows, `received` [J] from each peer; the lines beyond them select no expert."""
    rows = from_words(words, shapes)
    is_there = jnp.arange(words.shape[0]) < received.sum()
    rows = rows._replace(ids=jnp.where(is_there[:, None], rows.ids, -1))
    return localize(rows, hop.axes, hop.replicas_per_peer)


def slices_of(length: jax.Array, axes: tuple[str, ...]) -> Slices:
    """Exchanges slice sizes with all peers, from the number of rows for each of them [J]; rows arrive in peer order."""

    def exchanged(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

    received = exchanged(length)
    send_at, recv_at = jnp.cumsum(length) - length, jnp.cumsum(received) - received
    theirs = exchanged(jnp.stack([recv_at, send_at], axis=1))
    return Slices(send_at, length, recv_at, received, theirs[:, 0], theirs[:, 1])


@functools.partial(jax.jit, static_argnames=("axes", "size"))
def to_peers(x: jax.Array, slices: Slices, axes: tuple[str, ...], size: int) -> jax.Array:
    """Sends the slices of `x`; returns what arrives, `[size, ...]`, with 0 from the sum of `received` on."""
    output = jnp.zeros((size, *x.shape[1:]), x.dtype)
    return lax.ragged_all_to_all(
        x, output, slices.send_at, slices.sent, slices.their_recv_at, slices.received, axis_name=axes
    )


@functools.partial(jax.jit, static_argnames=("axes", "size"))
def from_peers(y: jax.Array, slices: Slices, axes: tuple[str, ...], size: int) -> jax.Array:
    """Sends each row of `y` back to its line before `to_peers`: `[size, ...]`."""
    output = jnp.zeros((size, *y.shape[1:]), y.dtype)
    return lax.ragged_all_to_all(
        y, output, slices.recv_at, slices.received, slices.their_send_at, slices.sent, axis_name=axes
    )
