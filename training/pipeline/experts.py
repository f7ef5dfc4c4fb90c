"""Routed experts spread over a team of devices: an exchange of rows that drops none and has a gradient.

A device sends each of its rows once to each device with one of its experts, and gets partial sums back. Both transfers
are an all-to-all of buffers with a fixed number of lines for each pair of devices, and each is the other's transpose.

Routing is uneven, so a buffer may be too small for a micro-batch. Then the exchange takes more rounds, as many as the
fullest buffer of the team needs. The first round is part of the program, so an overlapped pair hides its transfers, and
its values are saved for the backward. Further rounds run in a loop, and the backward computes them again: memory does
not grow with the rounds. A GPU's host reads their number while it launches the program.

`lax.ragged_all_to_all` would need no lines that stay empty. XLA has it neither on CPUs nor in two halves, and its
buffers must hold the worst case all the same (`sharding.experts.ragged`).

Shapes: T rows of a device, K experts per row, J devices, L received lines.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.model.layers import experts
from dsv3.model.layers.expert_parallel import count
from dsv3.model.layers.experts import ExpertLayer, RouterStats
from dsv3.model.layers.linear import Numerics, layer_slice
from dsv3.model.layers.router import Routing
from dsv3.model.params import MoeParams
from dsv3.model.tensor_parallel import ONE_DEVICE, Shards
from pallas_kernels import grouped
from pallas_kernels.align import queue_rows
from sharding.experts.capacity import expected_capacity
from sharding.experts.rows import TokenRows, localize, sum_at
from sharding.mesh import OF_NODE

TEAM = OF_NODE
"""Axes of the devices that split the experts."""
Held = tuple[jax.Array, jax.Array]
"""The experts of a device: `gate_up` `[E, 2 * I, D]` and `down` `[E, D, I]`."""


@dataclasses.dataclass(frozen=True)
class TeamBuffers:
    """Sizes of one round: `pairs` of a row and an expert for each pair of `devices`, and lines for their rows.

    A device has `experts`, of which a row selects at most `most`. A round takes the rows whose first pair is among the
    next `pairs`, so it may have `most - 1` pairs more.
    """

    devices: int
    experts: int
    most: int
    pairs: int
    lines: int

    @classmethod
    def from_batch(cls, tokens: int, experts_per_token: int, num_experts: int, devices: int) -> "TeamBuffers":
        """Returns buffers that seldom need a second round, by the loads that serving expects (`capacity`)."""
        each = num_experts // devices
        most = min(experts_per_token, each)
        expected = expected_capacity(tokens * experts_per_token, devices, 1, devices * devices, each)
        pairs = min(expected, tokens * most)
        return cls(devices, each, most, pairs, min(pairs, tokens))

    @property
    def received(self) -> int:
        """The most pairs that a device receives in a round."""
        return self.devices * min(self.pairs + self.most - 1, self.lines * self.most)

    def rounds(self, ids: jax.Array) -> jax.Array:
        """Returns the round in which a row is sent for each of its `ids` `[T, K]`, int32, from 0 on."""
        peer = ids // self.experts
        pairs = (peer[:, :, None] == jnp.arange(self.devices)).sum(axis=1, dtype=jnp.int32)  # [T, J]
        before = jnp.cumsum(pairs, axis=0) - pairs
        return jnp.take_along_axis(before, jnp.maximum(peer, 0), axis=1) // self.pairs


@dataclasses.dataclass(frozen=True)
class AllToAllExperts:
    """`RoutedExperts` split over a team of `devices`: equal to local ones for any routing, up to rounding."""

    devices: int

    @property
    def shards(self) -> Shards:
        return ONE_DEVICE

    def __call__(self, x: jax.Array, routing: Routing, layer: ExpertLayer, /) -> tuple[jax.Array, RouterStats]:
        (T, K), num_experts = routing.ids.shape, layer.params.router.shape[1]
        buffers = TeamBuffers.from_batch(T, K, num_experts, self.devices)
        held = tuple(layer_slice(leaf, layer.index) for leaf in (layer.params.gate_up, layer.params.down))
        run = exchange if buffers.pairs == T * buffers.most else exchange_in_rounds
        y = run(buffers, layer.numerics, held, x, routing.weights, routing.ids)
        return y, RouterStats(count(routing.ids, num_experts), None)


# Jitted, so that layers and rounds share one trace.
@functools.partial(jax.jit, static_argnums=(0, 1))
def exchange(
    buffers: TeamBuffers, numerics: Numerics, held: Held, x: jax.Array, weights: jax.Array, ids: jax.Array
) -> jax.Array:
    """Returns the weighted sum of each row's experts, `[T, D]`: dispatch, this device's experts, combine.

    Args:
      held: this device's experts.
      x: `[T, D]`.
      weights, ids: `[T, K]`; -1 selects no expert. The rows must fit the buffers.
    """
    line, row, _ = queue_rows(ids, buffers.devices, buffers.experts, buffers.lines, backend=numerics.backend)
    queues, K = Places(row, line), ids.shape[1]
    with jax.named_scope("dispatch"):
        # One message for both; a line without a row arrives as zeros, which select no expert.
        choice = jnp.concatenate([weights, (ids + 1).astype(jnp.float32)], axis=1)
        arrived, choice = _all_to_all(_copies(x, queues)), _all_to_all(_copies(choice, queues))
        rows = TokenRows(arrived, choice[:, K:].astype(jnp.int32) - 1, choice[:, :K])
    mine = localize(rows, TEAM, buffers.experts)
    gate_up, down = (leaf[None] for leaf in held)
    layer = ExpertLayer(MoeParams(None, None, gate_up, down, None), 0, numerics, pairs=buffers.received)
    activations = experts.gate_up(mine.payload, Routing(mine.ids, mine.weights), layer)
    with jax.named_scope("experts"):
        order, columns = activations.order, mine.ids.shape[1]
        by_pair = mine.weights.reshape(-1).at[order.source_row].get(mode="fill", fill_value=0)
        out = _product(activations.inner, held[1], order, numerics)
        pairs = Places(order.source_row // columns, order.aligned_row.reshape(-1, columns))
        sums = _sums((out * by_pair[:, None]).astype(out.dtype), pairs)
    with jax.named_scope("combine"):
        return _sums(_all_to_all(sums), queues)


def _product(inner: jax.Array, down: jax.Array, order: grouped.GroupAlignment, numerics: Numerics) -> jax.Array:
    """Returns the down projections of aligned rows, `[A, D]`."""
    if numerics.fp8_products:
        return grouped.trained_gemm_contiguous(inner, down, order.tile_group, backend=numerics.backend)
    return grouped.grouped_gemm_contiguous(inner, down, order.tile_group, tile_m=order.tile_m, backend=numerics.backend)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchange_in_rounds(
    buffers: TeamBuffers, numerics: Numerics, held: Held, x: jax.Array, weights: jax.Array, ids: jax.Array
) -> jax.Array:
    """Returns what `exchange` returns, in as many rounds as the buffers of the team need."""
    return _forward(buffers, numerics, held, x, weights, ids)[0]


def _forward(
    buffers: TeamBuffers, numerics: Numerics, held: Held, x: jax.Array, weights: jax.Array, ids: jax.Array
) -> tuple[jax.Array, Any]:
    rounds = _Rounds.from_ids(ids, buffers)
    one = functools.partial(exchange, buffers, numerics)
    first = rounds.ids(0)
    y, pullback = jax.vjp(lambda *operands: one(*operands, first), held, x, weights)
    y = rounds.add(lambda y, now: y + one(held, x, weights, now), y)
    return y, (pullback, held, x, weights, rounds)


def _backward(buffers: TeamBuffers, numerics: Numerics, saved: Any, dy: jax.Array) -> Any:
    pullback, held, x, weights, rounds = saved
    one = functools.partial(exchange, buffers, numerics)

    # Two loops, as a pipeline may compute the gradient of `held` later than the others.
    def add_inputs(total: Any, now: jax.Array) -> Any:
        _, pullback = jax.vjp(lambda x, weights: one(held, x, weights, now), x, weights)
        return jax.tree.map(jnp.add, total, pullback(dy))

    def add_held(total: Any, now: jax.Array) -> Any:
        _, pullback = jax.vjp(lambda held: one(held, x, weights, now), held)
        return jax.tree.map(jnp.add, total, pullback(dy)[0])

    dheld, *inputs = pullback(dy)
    return rounds.add(add_held, dheld), *rounds.add(add_inputs, tuple(inputs)), None


exchange_in_rounds.defvjp(_forward, _backward)


class _Rounds(NamedTuple):
    """Ids of a device `[T, K]`, the round of each, and how many rounds the team needs, []."""

    all_ids: jax.Array
    number: jax.Array
    needed: jax.Array

    @classmethod
    def from_ids(cls, ids: jax.Array, buffers: TeamBuffers) -> "_Rounds":
        """Returns the rounds of this device's ids."""
        number = buffers.rounds(ids)
        return cls(ids, number, lax.pmax(jnp.max(jnp.where(ids >= 0, number, 0)) + 1, TEAM))

    def ids(self, number: jax.Array | int) -> jax.Array:
        """Returns the ids of one round, -1 for the others."""
        return jnp.where(self.number == number, self.all_ids, -1)

    def add(self, add: Callable[[Any, jax.Array], Any], total: Any) -> Any:
        """Adds the rounds after the first to `total`; `add` takes the ids of a round."""
        return lax.fori_loop(1, self.needed, lambda i, total: add(total, self.ids(i)), total)


class Places(NamedTuple):
    """Copies of rows: the row of each copy `[C]`, T for none; the copies of each row `[T, K]`, C or more for none."""

    row: jax.Array
    copy: jax.Array


def _take(x: jax.Array, places: Places) -> jax.Array:
    """Returns the copies of rows `[T, N]`: `[C, N]`, zeros for none."""
    return jnp.take(x, places.row, axis=0, mode="fill", fill_value=0)


def _sum(y: jax.Array, places: Places) -> jax.Array:
    """Returns the sum of each row's copies `[C, N]`: `[T, N]`."""
    return sum_at(y, places.copy)


# Each is the other's transpose. The gradients of jax would scatter, which on a GPU has no defined order.
_copies, _sums = jax.custom_vjp(_take), jax.custom_vjp(_sum)
_copies.defvjp(lambda x, places: (_take(x, places), places), lambda places, dy: (_sum(dy, places), None))
_sums.defvjp(lambda y, places: (_sum(y, places), places), lambda places, dy: (_take(dy, places), None))


def _all_to_all(x: jax.Array) -> jax.Array:
    return lax.all_to_all(x, TEAM, split_axis=0, concat_axis=0, tiled=True)
