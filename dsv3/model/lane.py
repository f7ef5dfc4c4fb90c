"""One micro-batch's way through the MoE layers in stages, between which a schedule puts the work of another.

The stages of a layer in their order, those in brackets only where rows take a second hop:

    project, core, output (and router), dispatch, [forward], gate_up, down, [start_reduce, finish_reduce],
    start_combine, finish_combine; and shared at any time after the router

`dispatch`, `forward`, `start_reduce` and `start_combine` begin a transfer for which the next stage waits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple

import jax
import jax.numpy as jnp

from dsv3.model.attention import Projected
from dsv3.model.decoder import Step, attention_block, choose_experts, core, output, queries, shared_expert
from dsv3.model.expert_parallel import ExpertParallel, count, local_experts
from dsv3.model.experts import Gated, Tally, down, gate_up
from dsv3.model.linear import Index, at
from dsv3.model.norm import rms_norm
from dsv3.model.params import LayerParams, MoeParams
from sharding.exchange import (
    Computed,
    Experts,
    Hop,
    Queued,
    Rows,
    Sent,
    collect,
    enqueue,
    further_rounds,
    receive,
    send,
    send_back,
)
from sharding.transport import pad_rounds


class Routed(NamedTuple):
    """A micro-batch between its router and its combine."""

    normed: jax.Array  # [T, D], the shared expert's input
    ids: jax.Array  # [T, K], logical
    queued: Queued


class Spreading(NamedTuple):
    """Rows under way to their experts, by the first hop, or by the second, for which they were `queued`."""

    sent: Sent
    queued: Queued | None


class Halfway(NamedTuple):
    """Between the two products of the experts."""

    gated: Gated
    dtype: jnp.dtype  # of the rows, and so of their sums
    longest: jax.Array
    queued: Queued | None


class Reducing(NamedTuple):
    """Partial sums under way inside the node, to where the rows were `queued` for the second hop."""

    handle: Any
    computed: Computed
    queued: Queued


class Combining(NamedTuple):
    """Partial sums under way to the ranks whose rows they are of."""

    handle: Any
    computed: Computed


def _named[**P, T](stage: Callable[Concatenate["Lane", P], T]) -> Callable[Concatenate["Lane", P], T]:
    """Puts `micro_batch_0` or `_1` into the names of a stage's operations, for profiles and plans."""

    @functools.wraps(stage)
    def named(lane: "Lane", *args: P.args, **kwargs: P.kwargs) -> T:
        with jax.named_scope(f"micro_batch_{lane.number}"):
            return stage(lane, *args, **kwargs)

    return named


@dataclasses.dataclass(frozen=True)
class Lane:
    """One micro-batch's way through the MoE layers: its step, and the stages of a layer.

    A stage is one jitted unit. Program order is kept between units, not inside of them: enforced on single operations
    it would also keep XLA from fusing these.
    """

    layers: LayerParams
    step: Step
    parallel: ExpertParallel
    first_cache_layer: int
    number: int = 0

    @property
    def moe(self) -> MoeParams:
        assert self.layers.moe is not None  # only stacks with experts are overlapped
        return self.layers.moe

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self.parallel.transport.hops

    def local_experts(self, layer: Index) -> Experts:
        return local_experts(self.moe, layer, self.step.numerics)

    def choose(self, layer: Index, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Norm and router: `x` normed [T, D], ids and weights [T, K]."""

        def stage(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            normed = rms_norm(x, at(self.layers.post_norm, layer), self.step.cfg.rms_norm_eps)
            return normed, *choose_experts(self.moe, layer, self.step, normed)

        return jax.jit(stage)(x)

    @_named
    def route(self, layer: Index, x: jax.Array) -> Routed:
        """Norm, router, and the queues of what is to be sent."""

        def stage(x: jax.Array) -> Routed:
            normed, ids, weights = self.choose(layer, x)
            rows = self.parallel.address(normed, ids, weights, self.moe, layer, self.step.numerics)
            return Routed(normed, ids, enqueue(rows, self.hops[0]))

        return jax.jit(stage)(x)

    @_named
    def dispatch(self, routed: Routed) -> Spreading:
        """Starts the first hop."""
        return Spreading(send(routed.queued, 0, self.hops[0]), None)

    @_named
    def forward(self, spreading: Spreading) -> Spreading:
        """Finishes the first hop and starts the second, if there is one."""
        if len(self.hops) == 1:
            return spreading
        arrived = receive(spreading.sent, self.hops[0])
        queued = enqueue(arrived.rows, self.hops[1], arrived.longest)
        return Spreading(send(queued, 0, self.hops[1]), queued)

    @_named
    def gate_up(self, layer: Index, spreading: Spreading) -> Halfway:
        """Finishes the last hop, and makes the first product of the rows' experts."""

        def stage(rows: Rows) -> Gated:
            return gate_up(*rows, self.moe, layer, self.step.numerics)

        arrived = receive(spreading.sent, self.hops[-1])
        return Halfway(jax.jit(stage)(arrived.rows), arrived.rows.payload.dtype, arrived.longest, spreading.queued)

    @_named
    def down(self, layer: Index, halfway: Halfway) -> tuple[Computed, Queued | None]:
        """The second product, and the sums of the rows that arrived by the last hop."""

        def stage(gated: Gated) -> Computed:
            sums = down(gated, self.moe, layer, self.step.numerics, halfway.dtype)
            return Computed(sums, jnp.ones(1, jnp.int32), halfway.longest)

        return jax.jit(stage)(halfway.gated), halfway.queued

    @_named
    def start_reduce(self, computed: Computed, queued: Queued | None) -> Reducing | Computed:
        """Starts the way back inside the node, if there was a second hop."""
        return computed if queued is None else Reducing(send_back(computed.sums, self.hops[1]), computed, queued)

    @_named
    def finish_reduce(self, layer: Index, reducing: Reducing | Computed) -> Computed:
        """Partial sums of the rows that arrived by the first hop."""
        if isinstance(reducing, Computed):
            return reducing
        handle, computed, queued = reducing
        local = self.local_experts(layer)

        def stage(first: jax.Array, once: jax.Array, longest: jax.Array) -> Computed:
            sums, rounds = further_rounds(queued, longest, self.hops[1:], local, (first, once))
            return Computed(sums, jnp.concatenate([once, rounds]), longest[1:])

        return jax.jit(stage)(collect(handle, queued, 0, self.hops[1]), computed.rounds, computed.longest)

    @_named
    def start_combine(self, computed: Computed) -> Combining:
        """Starts the way back of the first hop."""
        return Combining(send_back(computed.sums, self.hops[0]), computed)

    @_named
    def finish_combine(
        self, layer: Index, x: jax.Array, routed: Routed, combining: Combining, shared: jax.Array | float
    ) -> tuple[jax.Array, Tally]:
        """`x` after the MoE layer: what comes back, what did not fit the first round, and the shared expert."""
        handle, computed = combining
        local = self.local_experts(layer)

        def stage(x: jax.Array, first: jax.Array, rounds: jax.Array) -> tuple[jax.Array, Tally]:
            y, rounds = further_rounds(routed.queued, computed.longest, self.hops, local, (first, rounds))
            y = self.parallel.shards.join(y, x.shape[0])
            return x + y + shared, Tally(count(routed.ids, self.moe.router.shape[1]), pad_rounds(rounds))

        return jax.jit(stage)(x, collect(handle, routed.queued, 0, self.hops[0]), computed.rounds)

    def start_return(self, computed: Computed, queued: Queued | None) -> Reducing | Combining:
        """Starts the way back by the last hop."""
        reducing = self.start_reduce(computed, queued)
        return self.start_combine(reducing) if isinstance(reducing, Computed) else reducing

    def cross_back(self, layer: Index, returning: Reducing | Combining) -> Combining:
        """Starts the way back by the first hop, if that is not the last one."""
        if isinstance(returning, Combining):
            return returning
        return self.start_combine(self.finish_reduce(layer, returning))

    def compute(self, layer: Index, spreading: Spreading) -> Combining:
        """From the rows under way by the first hop to their sums on their way back by it, in one go."""
        halfway = self.gate_up(layer, self.forward(spreading))
        return self.cross_back(layer, self.start_return(*self.down(layer, halfway)))

    @_named
    def shared(self, layer: Index, normed: jax.Array) -> jax.Array | float:
        return jax.jit(lambda normed: shared_expert(self.moe, layer, self.step, normed))(normed)

    @_named
    def attention(self, layer: Index, x: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The whole block."""
        cache_layer = self.first_cache_layer + layer
        return jax.jit(lambda x, pages: attention_block(self.layers, layer, self.step, x, pages, cache_layer))(x, pages)

    @_named
    def project(self, layer: Index, x: jax.Array) -> Projected:
        """The part of attention before its core."""
        return jax.jit(lambda x: queries(self.layers, layer, self.step, x))(x)

    @_named
    def core(self, layer: Index, tokens: Projected, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The attention core: outputs of all heads [T, H, V], and the pages."""
        cache_layer = self.first_cache_layer + layer
        stage = jax.jit(lambda tokens, pages: core(self.layers, layer, self.step, tokens, pages, cache_layer))
        return stage(tokens, pages)

    @_named
    def output(self, layer: Index, x: jax.Array, heads: jax.Array) -> tuple[jax.Array, Routed]:
        """The part of attention after its core, and the router."""

        def stage(x: jax.Array, heads: jax.Array) -> tuple[jax.Array, Routed]:
            x = output(self.layers, layer, self.step, x, heads)
            return x, self.route(layer, x)

        return jax.jit(stage)(x, heads)
