"""A hop by NVIDIA's library NCCL EP: each row is sent once to each device that needs it, without padding.

Low latency is for steps below `MIN_CHUNK` tokens whose buffers stay below `MAX_BUFFER_BYTES`. The library brings rows
into lines for the worst case, all rows of all devices: `[J * T]`. Its combine adds the partial sums of a row as `Hop`
does, in float32 and in the order of k, so results are equal bit for bit. Each bucket has a group of its own: the
library brings as many lines as its group's largest call could, and experts would write the sums of all of them.

High throughput is for larger steps. The rows of a device go in chunks of equal size, and those that arrive of a chunk
lie one after the other, on N lines near the expected load. Over several nodes a row crosses to a node once, and sums
are added there, in bfloat16, before they cross back. So results differ from those of other transports by rounding. The
library counts the rows that arrive, which reports overflow.

A whole call does both halves of a dispatch or combine; with HOOKS other work runs between them. Micro-batches have
slots of their own, because a slot has one call in flight.

Shapes: t token rows of this device, at most T of any, K replicas per row, J devices; L lines of received rows.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from sharding.collectives import Overlap, Transfer, finished
from sharding.experts.capacity import MIN_CAPACITY, expected_capacity, expected_rows
from sharding.experts.hop import DispatchHandle, Hop, Queued, Received, shapes_sent
from sharding.experts.rows import TokenRows, localize
from sharding.experts.traffic import LayerRows, Traffic
from sharding.mesh import Machine
from sharding.nccl_ep.library import Calls, GroupKey

MAX_BUFFER_BYTES = 1 << 30
"""Bound on the buffers of a group with low latency, of which a program with two micro-batches uses two."""
MAX_SHARED_BYTES = 3 << 30
"""Bound on those of a group with high throughput, which programs and micro-batches share."""
MIN_CHUNK = 2048
"""Least tokens of a call with high throughput, whose figures are published for 4,096; low latency's are for 128."""
_NODE_EXPERTS = 4  # a node has a multiple of these
_TOKENS_ALIGNMENT, _SCALED_ALIGNMENT = 512, 16  # bytes of a row, alone and with scales
_SUM_CHANNELS = 512  # a sum has a multiple of these


class Origins(NamedTuple):
    """What combine must know of a dispatch: `Calls.origins`, and the ids of this device's own rows [t, K]."""

    notes: jax.Array
    ids: jax.Array


@dataclasses.dataclass(frozen=True)
class LibraryHop(Hop):
    """One hop over all devices by the library, of rows up to `row_bytes`; `capacity` is T, `slot` the micro-batch.

    With high throughput a call takes `chunk` tokens and brings up to `received` rows; with low latency both are 0.
    """

    row_bytes: int = 0
    slot: int = 0
    chunk: int = 0
    received: int = 0

    @classmethod
    def from_layer(cls, machine: Machine, replicas: int, rows: LayerRows, overlap: Overlap) -> "LibraryHop":
        """Returns the hop for `rows`, with `replicas` on each device.

        Raises ValueError if the library takes `rows` in neither mode (`chunk_of`), and for int8 sums, which it cannot
        add.
        """
        if rows.int8_sums:
            raise ValueError("NCCL EP adds sums on their way: use expert_combine auto, or another expert_transport")
        chunk = chunk_of(machine, replicas, rows)
        if chunk is None:
            raise ValueError(
                f"NCCL EP's buffers for {rows.tokens} tokens from each of {machine.devices} devices take "
                f"{low_latency_bytes(machine.devices, rows) / 2**30:.1f} GiB with low latency, more than "
                f"{MAX_BUFFER_BYTES >> 30}; high throughput needs {MIN_CHUNK} tokens that fit in "
                f"{MAX_SHARED_BYTES >> 30} GiB, and a multiple of {_NODE_EXPERTS} experts in a node: use fewer tokens, "
                "or another expert_transport"
            )
        hop = cls(machine.axes, machine.devices, replicas, rows.tokens, overlap, row_bytes=row_bytes(rows))
        if not chunk:
            return hop
        return dataclasses.replace(hop, chunk=chunk, received=_received(machine, replicas, rows, chunk))

    def buffer_bytes(self, machine: Machine, rows: LayerRows) -> int:
        """Returns the bytes of the library's buffers for `rows` on each device of `machine`."""
        if self.chunk:
            return high_throughput_bytes(machine, self.replicas_per_peer, rows, self.chunk)
        return low_latency_bytes(self.peers, rows)

    def of_micro_batch(self, number: int) -> "LibraryHop":
        return dataclasses.replace(self, slot=number)

    @property
    def lines(self) -> int:
        return math.prod(Calls(self.key(1)).lines)

    @property
    def reports_on_arrival(self) -> bool:
        return self.chunk > 0

    def traffic(self, machine: Machine, rows: LayerRows, row: int) -> Traffic:
        def sent(peers: int) -> float:
            return row * expected_rows(rows.tokens, peers, rows.experts_per_token)

        if not self.chunk or machine.nodes == 1:
            return Traffic.to_all(machine, sent(machine.devices))
        others = Traffic.from_peers(machine.nodes - 1, machine.nodes - 1, sent(machine.nodes))
        return others + Traffic.from_peers(machine.gpus - 1, 0, machine.nodes * sent(machine.devices))

    def no_origins(self, queued: Queued) -> Origins:
        ids, like = queued.rows.ids, self._calls(queued.rows.ids).origins
        return Origins(jnp.zeros(like.shape, like.dtype), jnp.full_like(ids, -1))

    def key(self, experts_per_token: int) -> GroupKey:
        """Returns the group of this hop, which must exist before a program with it runs."""
        replicas = self.peers * self.replicas_per_peer
        sizes = self.row_bytes, self.slot, self.chunk, self.received
        return GroupKey(self.peers, self.capacity, experts_per_token, replicas, *sizes)

    @functools.partial(jax.jit, static_argnames=("self", "backend"))
    def enqueue(self, rows: TokenRows, backend: Backend | None = None) -> Queued:
        """Drops ids that no device owns, which the library would follow out of its buffers, and reports them."""
        foreign = rows.ids >= self.peers * self.replicas_per_peer
        rows = rows._replace(ids=jnp.where(foreign, -1, rows.ids))
        return Queued(rows, None, None, foreign.any().astype(jnp.int32))

    @jax.named_scope("dispatch")
    def send(self, queued: Queued) -> DispatchHandle:
        """Starts sending the rows. Raises ValueError for a payload other than one or two arrays `[t, W]`."""
        ids, weights, payload = queued.rows.ids, queued.rows.weights, _aligned(queued.rows.payload)
        started = self._calls(ids).dispatch(ids, weights, payload)
        read = (ids, weights, *payload) if self.chunk else ()
        return DispatchHandle(self._transfer(ids, started, *read), queued)

    @jax.named_scope("dispatch")
    def receive(self, sent: DispatchHandle) -> Received:
        """Finishes `send`."""
        ids, weights, notes, *payload = sent.transfer.finish()

        def unpack(
            ids: jax.Array, weights: jax.Array, notes: jax.Array, payload: list[jax.Array]
        ) -> tuple[TokenRows, tuple[jax.Array, ...]]:
            overflows: tuple[jax.Array, ...] = ()
            if self.chunk:
                there = jnp.arange(self.received) < notes[:, None]
                ids = jnp.where(there[:, :, None], ids[..., 0], -1)
                overflows = ((notes > self.received).any().astype(jnp.int32),)
            lines = TokenRows(_restored(payload, shapes_sent(sent.queued).payload), _lines(ids), _lines(weights))
            return localize(lines, self.axes, self.replicas_per_peer), overflows

        rows, overflows = jax.jit(unpack)(ids, weights, notes, payload)
        return Received(rows, Origins(notes, sent.queued.rows.ids), overflows)

    @jax.named_scope("combine")
    def send_back(self, sums: jax.Array, origins: Origins) -> Transfer:
        calls = self._calls(origins.ids)
        lines = _widened(sums, _SUM_CHANNELS).reshape(*calls.lines, -1)
        started = calls.combine(lines, origins.notes, origins.ids)
        like = jax.ShapeDtypeStruct((len(origins.ids), sums.shape[1]), sums.dtype)
        read = (origins.ids, origins.notes, *((lines,) if self.chunk else ()))
        return dataclasses.replace(self._transfer(origins.ids, started, *read), like=like)

    @jax.named_scope("combine")
    def receive_back(self, transfer: Transfer, queued: Queued) -> jax.Array:
        (sums,) = transfer.finish()
        return sums[:, : transfer.like.shape[1]]

    def _calls(self, ids: jax.Array) -> Calls:
        return Calls(self.key(ids.shape[1]), self.overlap is Overlap.HOOKS)

    def _transfer(self, ids: jax.Array, started: tuple[jax.Array, ...], *kept: jax.Array) -> Transfer:
        """Returns a started call; `kept` are arrays that it still reads."""
        calls = self._calls(ids)
        return Transfer(functools.partial(calls.complete, started, *kept)) if calls.halves else finished(started)


def chunk_of(machine: Machine, replicas: int, rows: LayerRows) -> int | None:
    """Returns the mode for `rows`, with `replicas` on each device: tokens of a call with high throughput, or 0.

    0 is low latency; None is neither, because buffers would be too large.
    """
    chunk = _chunk_tokens(machine, replicas, rows)
    if chunk >= MIN_CHUNK:
        return chunk
    return 0 if low_latency_bytes(machine.devices, rows) <= MAX_BUFFER_BYTES else None


def low_latency_bytes(devices: int, rows: LayerRows) -> int:
    """Returns the bytes of a group's buffers: two banks, for dispatch or combine, of lines to send and to receive."""
    row, top_k = row_bytes(rows), rows.experts_per_token
    lines = (1 + devices) * (row + 16 + 8 * top_k), (devices + top_k) * row
    return 2 * rows.tokens * max(lines)


def _chunk_tokens(machine: Machine, replicas: int, rows: LayerRows) -> int:
    """Returns the tokens of a high-throughput call: `rows.tokens`, or the largest power of 2 whose buffers fit
    `MAX_SHARED_BYTES`. Returns 0 where a node has a number of experts that the library does not take.
    """
    if machine.gpus * replicas % _NODE_EXPERTS:
        return 0
    most = MAX_SHARED_BYTES // (2 * machine.devices * row_bytes(rows))  # by the largest part
    tokens = min(rows.tokens + rows.tokens % 2, 1 << most.bit_length() - 1)  # the library wants an even number
    while tokens and high_throughput_bytes(machine, replicas, rows, tokens) > MAX_SHARED_BYTES:
        tokens = 1 << (tokens - 1).bit_length() - 1
    return tokens


def high_throughput_bytes(machine: Machine, replicas: int, rows: LayerRows, chunk: int) -> int:
    """Returns the bytes of a group's buffers: rows and sums inside the node, and what goes between nodes.

    Source: `init_ht_intranode` and `init_ht_internode` of nccl_ep.cc, NVIDIA/nccl-extensions, release 0.2; a node is
    the GPUs that NVLink joins. A handle takes less than a hundredth of it, which does not count.
    """
    row, weights = row_bytes(rows), 4 * machine.gpus * replicas
    inside = 2 * chunk * machine.devices * row
    inside += _received(machine, replicas, rows, chunk) * (row + 2 * weights)
    if machine.nodes == 1:
        return inside
    between = 4 * (machine.nodes - 1) * chunk * (row + weights)
    return inside + between + chunk * (row + machine.nodes * weights)


def _received(machine: Machine, replicas: int, rows: LayerRows, chunk: int) -> int:
    """Returns the rows of a chunk that a device receives at most: as `expected_capacity`, from all devices together.

    At least those of one device, as the library demands, and `MIN_CAPACITY` of each.
    """
    J, tokens = machine.devices, chunk * machine.devices
    least = max(chunk, MIN_CAPACITY * J)
    return expected_capacity(tokens, J, rows.experts_per_token, J, replicas, least=least)


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
    """Merges the leading axes, device or chunk, and line."""
    return array.reshape(-1, array.shape[2])
