"""A hop by NVIDIA's library NCCL EP (low latency): each row is sent once to each device that needs it, without padding.

The library brings rows into lines for the worst case, all rows of all devices: `[J * T]`. Its combine adds the partial
sums of a row as `Hop` does, in float32 and in the order of k, so results are equal bit for bit. A whole call does both
halves of a dispatch or combine; with HOOKS the first half sends, and kernels of other work run before the second.
Micro-batches have groups of their own, because a group has one call in flight.

Shapes: t token rows of this device, at most T of any, K replicas per row, J devices.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from sharding.experts.capacity import expected_rows
from sharding.experts.hop import DispatchHandle, Hop, Queued, Received, shapes_sent
from sharding.experts.rows import TokenRows, localize
from sharding.experts.traffic import LayerRows
from sharding.mesh import Machine
from sharding.nccl_ep.library import GroupKey
from sharding.nccl_ep.ops import Calls
from sharding.wire.collectives import Overlap, Transfer

MAX_BUFFER_BYTES = 1 << 30
"""Bound on the buffers of a group, of which a program with two micro-batches uses two."""
_TOKENS_ALIGNMENT, _SCALED_ALIGNMENT = 512, 16  # bytes of a row, alone and with scales
_SUM_CHANNELS = 512  # a sum has a multiple of these


class Origins(NamedTuple):
    """The library's notes where received rows came from, bytes, and the ids of this device's own rows [t, K]."""

    notes: jax.Array
    ids: jax.Array


class PendingCall(NamedTuple):
    """A call whose second half is missing, and the arrays that it still reads."""

    calls: Calls
    started: tuple[jax.Array, ...]
    kept: tuple[jax.Array, ...] = ()

    def done(self) -> tuple[jax.Array, ...]:
        """Finishes the call, as a collective's future does."""
        return self.calls.complete(self.started, *self.kept)


@dataclasses.dataclass(frozen=True)
class LibraryHop(Hop):
    """One hop over all devices by the library, of rows up to `row_bytes`; `capacity` is T, `slot` the micro-batch."""

    row_bytes: int = 0
    slot: int = 0

    @classmethod
    def from_layer(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "LibraryHop":
        """Returns the hop for `rows`, with `replicas` on each device.

        Raises ValueError if buffers for `rows` would take more than `MAX_BUFFER_BYTES`, and for int8 sums, which the
        library cannot add.
        """
        if rows.int8_sums:
            raise ValueError("NCCL EP adds sums on their way: use expert_combine auto, or another expert_transport")
        if not takes(machine.devices, rows):
            raise ValueError(
                f"NCCL EP's buffers for {rows.tokens} tokens from each of {machine.devices} devices take "
                f"{buffer_bytes(machine.devices, rows) / 2**30:.1f} GiB, more than {MAX_BUFFER_BYTES >> 30}: use fewer "
                "tokens, or another expert_transport"
            )
        return cls(machine.axes, machine.devices, replicas, rows.tokens, overlap, row_bytes=row_bytes(rows))

    def of_micro_batch(self, number: int) -> "LibraryHop":
        return dataclasses.replace(self, slot=number)

    def rows_per_peer(self, tokens: int, experts_per_token: int) -> float:
        return expected_rows(tokens, self.peers, experts_per_token)

    def no_origins(self, queued: Queued) -> Origins:
        ids = queued.rows.ids
        return Origins(jnp.zeros(self._calls(ids).origin_bytes, jnp.uint8), jnp.full_like(ids, -1))

    def key(self, experts_per_token: int) -> GroupKey:
        """Returns the group of this hop, which must exist before a program with it runs."""
        replicas = self.peers * self.replicas_per_peer
        return GroupKey(self.peers, self.capacity, experts_per_token, replicas, self.row_bytes, self.slot)

    @functools.partial(jax.jit, static_argnames=("self", "backend"))
    def enqueue(self, rows: TokenRows, backend: Backend | None = None) -> Queued:
        """Drops ids that no device owns, which the library would follow out of its buffers, and reports them."""
        foreign = rows.ids >= self.peers * self.replicas_per_peer
        rows = rows._replace(ids=jnp.where(foreign, -1, rows.ids))
        return Queued(rows, None, None, foreign.any().astype(jnp.int32))

    @jax.named_scope("dispatch")
    def send(self, queued: Queued) -> DispatchHandle:
        """Starts sending the rows. Raises ValueError for a payload other than one or two arrays `[t, W]`."""
        rows = queued.rows
        started = self._calls(rows.ids).dispatch(rows.ids, rows.weights, _aligned(rows.payload))
        return DispatchHandle(self._transfer(rows.ids, started), shapes_sent(queued), queued)

    @jax.named_scope("dispatch")
    def receive(self, sent: DispatchHandle) -> Received:
        """Finishes `send`."""
        ids, weights, notes, *payload = sent.transfer.finish()

        def unpack(ids: jax.Array, weights: jax.Array, payload: list[jax.Array]) -> TokenRows:
            lines = TokenRows(_restored(payload, sent.shapes.payload), _lines(ids), _lines(weights))
            return localize(lines, self.axes, self.replicas_per_peer)

        return Received(jax.jit(unpack)(ids, weights, payload), Origins(notes, sent.queued.rows.ids))

    @jax.named_scope("combine")
    def send_back(self, sums: jax.Array, origins: Origins) -> Transfer:
        lines = _widened(sums, _SUM_CHANNELS).reshape(self.peers, self.capacity, -1)
        started = self._calls(origins.ids).combine(lines, origins.notes, origins.ids)
        like = jax.ShapeDtypeStruct((len(origins.ids), sums.shape[1]), sums.dtype)
        return dataclasses.replace(self._transfer(origins.ids, started, origins.ids, origins.notes), like=like)

    @jax.named_scope("combine")
    def receive_back(self, transfer: Transfer, queued: Queued) -> jax.Array:
        (sums,) = transfer.finish()
        return sums[:, : transfer.like.shape[1]]

    def _calls(self, ids: jax.Array) -> Calls:
        return Calls(self.key(ids.shape[1]), self.overlap is Overlap.HOOKS)

    def _transfer(self, ids: jax.Array, started: tuple[jax.Array, ...], *kept: jax.Array) -> Transfer:
        calls = self._calls(ids)
        return Transfer(PendingCall(calls, started, kept), True) if calls.halves else Transfer(started, False)


def takes(devices: int, rows: LayerRows) -> bool:
    """Returns whether the buffers for `rows` stay below `MAX_BUFFER_BYTES`."""
    return buffer_bytes(devices, rows) <= MAX_BUFFER_BYTES


def buffer_bytes(devices: int, rows: LayerRows) -> int:
    """Returns the bytes of a group's buffers: two banks, for dispatch or combine, of lines to send and to receive."""
    row, top_k = row_bytes(rows), rows.experts_per_token
    lines = (1 + devices) * (row + 16 + 8 * top_k), (devices + top_k) * row
    return 2 * rows.tokens * max(lines)


def row_bytes(rows: LayerRows) -> int:
    """Returns the most bytes of a row, with padding and without ids, dispatched or combined."""
    activations = rows.dispatch_bytes - 8 * rows.experts_per_token
    dispatched = activations + 2 * _SCALED_ALIGNMENT + -activations % _TOKENS_ALIGNMENT
    return max(dispatched, rows.combine_bytes + -rows.combine_bytes % (4 * _SUM_CHANNELS))


@functools.partial(jax.jit, static_argnums=1)
def _widened(x: jax.Array, multiple: int) -> jax.Array:
    """Returns rows `[N, W]` with zeros up to a multiple of `multiple` items."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple)))


def _aligned(payload: Any) -> list[jax.Array]:
    """Returns the arrays of a payload as the library takes them: tokens first, then scales; padded with zeros."""
    arrays = jax.tree.leaves(payload)
    if len(arrays) > 2:
        raise ValueError(f"NCCL EP takes tokens and scales, not {len(arrays)} arrays per row")
    alignment = _SCALED_ALIGNMENT if len(arrays) > 1 else _TOKENS_ALIGNMENT
    return [_widened(arrays[i], alignment // arrays[i].dtype.itemsize) for i in _order(arrays)]


def _restored(received: list[jax.Array], like: Any) -> Any:
    """Undoes `_aligned`: returns the tree `like` of lines `[J * T, ...]`."""
    leaves, tree = jax.tree.flatten(like)
    parts = {i: _lines(array)[:, : leaves[i].shape[1]] for i, array in zip(_order(leaves), received, strict=True)}
    return jax.tree.unflatten(tree, [parts[i] for i in range(len(leaves))])


def _order(arrays: Sequence[Any]) -> list[int]:
    """Returns the arrays' numbers, that with the widest rows, which are the tokens, first."""
    return sorted(range(len(arrays)), key=lambda i: -arrays[i].shape[1] * arrays[i].dtype.itemsize)


def _lines(array: jax.Array) -> jax.Array:
    """Merges the leading axes, device and line."""
    return array.reshape(-1, array.shape[2])
