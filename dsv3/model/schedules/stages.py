"""The stages of an MoE layer, which a schedule interleaves with those of the other micro-batch.

The stages of a layer in order; those in brackets exist only with a second hop:

    project, core, output (and router), dispatch, [forward], gate_up, down, [start_reduce, finish_reduce],
    start_combine, finish_combine; and shared at any time after the router

`dispatch`, `forward`, `start_reduce` and `start_combine` start a transfer, and the next stage waits for it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Concatenate, NamedTuple

import jax

from dsv3.model.decoder import DecoderLayer, LayerContext, Stack
from dsv3.model.layers import experts
from dsv3.model.layers.attention import LayerPlace
from dsv3.model.layers.expert_parallel import ExpertParallel, count
from dsv3.model.layers.experts import ExpertActivations, RouterStats
from dsv3.model.layers.hyper_connections import Block, Residual
from dsv3.model.layers.linear import Rows
from dsv3.model.layers.router import Routing
from sharding.experts.exchange import CombineHandle, PeerSums, finish_exchange, start_return, total
from sharding.experts.hop import DispatchHandle, Hop, Queued, Received
from sharding.experts.rows import TokenRows


class Routed(NamedTuple):
    """A micro-batch between its router and its combine."""

    normed: Rows  # [T, D], the shared expert's input
    ids: jax.Array  # [T, K], experts
    queued: Queued


def named[**P, R](stage: Callable[Concatenate["MicroBatch", P], R]) -> Callable[Concatenate["MicroBatch", P], R]:
    """Puts the operations of a stage into the scope `micro_batch_N`, for profiles and plans."""

    @functools.wraps(stage)
    def run(batch: "MicroBatch", *args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(f"micro_batch_{batch.number}"):
            return stage(batch, *args, **kwargs)

    return run


def unit[**P, R](
    stage: Callable[Concatenate["MicroBatch", LayerPlace, P], R],
) -> Callable[Concatenate["MicroBatch", LayerPlace, P], R]:
    """Runs a stage as one jitted unit, in the scope of `named`.

    Program order is enforced between units and not between single operations, so that XLA can still fuse these. A unit
    closes over the parameters and the layer's place; the arrays that it works on are its arguments.
    """

    @functools.wraps(stage)
    def run(batch: "MicroBatch", place: LayerPlace, *arrays: P.args, **named: P.kwargs) -> R:
        with jax.named_scope(f"micro_batch_{batch.number}"):
            return jax.jit(functools.partial(stage, batch, place))(*arrays, **named)

    return run


def layer_unit[**P, R](
    function: Callable[Concatenate[DecoderLayer, P], R],
) -> Callable[Concatenate["MicroBatch", LayerPlace, P], R]:
    """Returns a stage that calls a method of the decoder layer as one `unit`."""

    @functools.wraps(function)
    def stage(batch: "MicroBatch", place: LayerPlace, *arrays: P.args, **named: P.kwargs) -> R:
        return function(batch.layer(place), *arrays, **named)

    return unit(stage)


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One micro-batch in a stack of MoE layers: its layer context, and the stages."""

    stack: Stack
    context: LayerContext
    number: int = 0

    @property
    def parallel(self) -> ExpertParallel:
        """The experts and their transport. Raises ValueError for local experts, which have no transfers to overlap."""
        if not isinstance(self.context.routed, ExpertParallel):
            raise ValueError(
                f"only ExpertParallel experts can be overlapped, not {self.context.routed}; use schedule PLAIN"
            )
        return self.context.routed

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(hop.of_micro_batch(self.number) for hop in self.parallel.transport.hops)

    def layer(self, place: LayerPlace) -> DecoderLayer:
        return DecoderLayer(self.stack, place, self.context)

    choose = layer_unit(DecoderLayer.choose_experts)
    attention = layer_unit(DecoderLayer.attention)
    project = layer_unit(DecoderLayer.project)
    core = layer_unit(DecoderLayer.core)
    shared = layer_unit(DecoderLayer.shared_expert)
    add = layer_unit(DecoderLayer.add_experts)

    @unit
    def route(self, place: LayerPlace, x: Block) -> Routed:
        """Runs norm and router, and queues the rows to send."""
        normed, routing = self.choose(place, x)
        rows = self.parallel.address(normed, routing, self.layer(place).experts)
        return Routed(normed, routing.ids, self.hops[0].enqueue(rows, self.context.numerics.backend))

    @named
    def dispatch(self, routed: Routed) -> DispatchHandle:
        """Starts the first hop."""
        return self.hops[0].send(routed.queued)

    @named
    def forward(self, sent: DispatchHandle) -> DispatchHandle:
        """Finishes the first hop and starts the second, if there is one."""
        if len(self.hops) == 1:
            return sent
        arrived = self.hops[0].receive(sent)
        return self.hops[1].send(self.hops[1].enqueue(arrived.rows, self.context.numerics.backend))

    @named
    def gate_up(self, place: LayerPlace, sent: DispatchHandle) -> tuple[ExpertActivations, Received, Queued]:
        """Finishes the last hop, and computes the first product of the experts; also returns the hop's rows and queues.

        `down` takes all three.
        """
        received = self.hops[-1].receive(sent)
        return self._gate_up(place, received.rows), received, sent.queued

    @unit
    def _gate_up(self, place: LayerPlace, rows: TokenRows) -> ExpertActivations:
        here = self.parallel.bounded(self.layer(place).experts)
        return experts.gate_up(rows.payload, Routing(rows.ids, rows.weights), here)

    @named
    def down(
        self, place: LayerPlace, activations: ExpertActivations, received: Received, queued: Queued
    ) -> tuple[PeerSums, Queued]:
        """Computes the second product: the sums of the rows of the last hop, and their queues."""
        sums = self._down(place, activations)
        return PeerSums.from_experts(sums, activations.overflow, received.overflows, received.origins), queued

    @unit
    def _down(self, place: LayerPlace, activations: ExpertActivations) -> jax.Array:
        return experts.down(activations, self.layer(place).experts)

    @named
    def start_reduce(self, computed: PeerSums, queued: Queued) -> CombineHandle | PeerSums:
        """Starts the reduction inside the node, if there was a second hop."""
        return computed if len(self.hops) == 1 else start_return(computed, queued, self.hops[1])

    @named
    def finish_reduce(self, reducing: CombineHandle | PeerSums) -> PeerSums:
        """Returns the partial sums of the rows of the first hop."""
        if isinstance(reducing, PeerSums):
            return reducing
        return PeerSums(*finish_exchange(reducing, self.hops[1]))

    @named
    def start_combine(self, computed: PeerSums, routed: Routed) -> CombineHandle:
        """Starts the combine of the first hop: partial sums return to the devices that sent the rows."""
        return start_return(computed, routed.queued, self.hops[0])

    @named
    def finish_combine(
        self, place: LayerPlace, x: Block, routed: Routed, combining: CombineHandle, shared: jax.Array | None
    ) -> tuple[Residual, RouterStats]:
        """Returns `x` after the MoE layer: the combined sums, and the shared expert."""
        y, overflows = finish_exchange(combining, self.hops[0])
        return self._finish_combine(place, x, y, routed.ids, overflows, shared)

    @unit
    def _finish_combine(
        self,
        place: LayerPlace,
        x: Block,
        y: jax.Array,
        ids: jax.Array,
        overflows: tuple[jax.Array, ...],
        shared: jax.Array | None,
    ) -> tuple[Residual, RouterStats]:
        y = self.parallel.shards.join(y, ids.shape[0])
        router_stats = RouterStats(count(ids, self.stack.moe.router.shape[1]), total(overflows))
        router_stats = self.context.with_ids(router_stats, ids)
        return self.layer(place).add_experts(x, y, shared), router_stats

    @named
    def start_return(self, computed: PeerSums, queued: Queued) -> CombineHandle:
        """Starts the combine of the last hop."""
        return start_return(computed, queued, self.hops[-1])

    def cross_back(self, returning: CombineHandle, routed: Routed) -> CombineHandle:
        """Starts the combine of the first hop, if that is not the last one."""
        return returning if len(self.hops) == 1 else self.start_combine(self.finish_reduce(returning), routed)

    def compute(self, place: LayerPlace, sent: DispatchHandle, routed: Routed) -> CombineHandle:
        """Computes the rows of a started first hop, and starts their combine."""
        computed = self.down(place, *self.gate_up(place, self.forward(sent)))
        return self.cross_back(self.start_return(*computed), routed)

    @unit
    def output(self, place: LayerPlace, x: Block, heads: jax.Array) -> tuple[Block, Routed]:
        """Runs the part of attention after its core, and the router."""
        x = self.layer(place).output(x, heads)
        return x, self.route(place, x)
