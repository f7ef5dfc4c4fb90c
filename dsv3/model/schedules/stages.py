"""The stages of an MoE layer, which a schedule interleaves with those of the other micro-batch.

The stages of a layer in order; those in brackets exist only with a second hop:

    project, core, output (and router), dispatch, [forward], gate_up, down, [start_reduce, finish_reduce],
    start_combine, finish_combine; and shared at any time after the router

`dispatch`, `forward`, `start_reduce` and `start_combine` start a transfer, and the next stage waits for it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple

import jax

from dsv3.model import decoder
from dsv3.model.decoder import LayerContext, Stack
from dsv3.model.layers import experts
from dsv3.model.layers.attention import LayerPlace
from dsv3.model.layers.expert_parallel import ExpertParallel, count
from dsv3.model.layers.experts import ExpertActivations, ExpertLayer, RouterStats
from dsv3.model.layers.hyper_connections import Block, Residual
from dsv3.model.layers.linear import Rows
from dsv3.model.layers.router import Routing
from sharding.collectives import Transfer
from sharding.experts.exchange import CombineHandle, PeerSums, start_return, total
from sharding.experts.hop import DispatchHandle, Hop, Queued
from sharding.experts.rows import TokenRows


class Routed(NamedTuple):
    """A micro-batch between its router and its combine."""

    normed: Rows  # [T, D], the shared expert's input
    ids: jax.Array  # [T, K], experts
    queued: Queued


class Halfway(NamedTuple):
    """A micro-batch between the two products of its experts.

    `queued` are its rows before their last hop; `origins` and `overflows` are `Received`'s after it.
    """

    activations: ExpertActivations
    queued: Queued
    origins: Any
    overflows: tuple[jax.Array, ...]


class Combining(NamedTuple):
    """A started combine: partial sums on their way to the devices that sent the rows."""

    transfer: Transfer
    overflows: tuple[jax.Array, ...]  # of everything behind the first hop


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

    def experts(self, place: LayerPlace) -> ExpertLayer:
        return self.stack.experts(place, self.context.numerics)

    @unit
    def choose(self, place: LayerPlace, x: Block) -> tuple[Rows, Routing]:
        """Runs norm and router: returns the experts' input, [T, D], and the routing."""
        normed = decoder.post_normed(self.stack, place, self.context, x)
        return normed, decoder.choose_experts(self.stack, place, self.context, normed)

    @unit
    def route(self, place: LayerPlace, x: Block) -> Routed:
        """Runs norm and router, and queues the rows to send."""
        normed, routing = self.choose(place, x)
        rows = self.parallel.address(normed, routing, self.experts(place))
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
    def gate_up(self, place: LayerPlace, sent: DispatchHandle) -> Halfway:
        """Finishes the last hop, and computes the first product of the experts."""
        rows, origins, overflows = self.hops[-1].receive(sent)
        return Halfway(self._gate_up(place, rows), sent.queued, origins, overflows)

    @unit
    def _gate_up(self, place: LayerPlace, rows: TokenRows) -> ExpertActivations:
        here = self.parallel.bounded(self.experts(place))
        return experts.gate_up(rows.payload, Routing(rows.ids, rows.weights), here)

    @named
    def down(self, place: LayerPlace, halfway: Halfway) -> tuple[PeerSums, Queued]:
        """Computes the second product: the sums of the rows of the last hop, and their queues."""
        sums, overflow = self._down(place, halfway.activations), halfway.activations.overflow
        return PeerSums.from_experts(sums, overflow, halfway.overflows, halfway.origins), halfway.queued

    @unit
    def _down(self, place: LayerPlace, activations: ExpertActivations) -> jax.Array:
        return experts.down(activations, self.experts(place))

    @named
    def start_reduce(self, computed: PeerSums, queued: Queued) -> CombineHandle | PeerSums:
        """Starts the reduction inside the node, if there was a second hop."""
        return computed if len(self.hops) == 1 else start_return(computed, queued, self.hops[1])

    @named
    def finish_reduce(self, reducing: CombineHandle | PeerSums) -> PeerSums:
        """Returns the partial sums of the rows of the first hop."""
        if isinstance(reducing, PeerSums):
            return reducing
        return PeerSums(self.hops[1].receive_back(reducing.transfer, reducing.queued), reducing.overflows)

    @named
    def start_combine(self, computed: PeerSums) -> Combining:
        """Starts the combine of the first hop."""
        return Combining(self.hops[0].send_back(computed.sums, computed.origins), computed.overflows)

    @named
    def finish_combine(
        self, place: LayerPlace, x: Block, routed: Routed, combining: Combining, shared: jax.Array | None
    ) -> tuple[Residual, RouterStats]:
        """Returns `x` after the MoE layer: the combined sums, and the shared expert."""
        y = self.hops[0].receive_back(combining.transfer, routed.queued)
        overflows = (routed.queued.overflows, *combining.overflows)
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
        return decoder.add_experts(self.stack, place, self.context, x, y, shared), router_stats

    def start_return(self, computed: PeerSums, queued: Queued) -> CombineHandle | Combining:
        """Starts the combine of the last hop."""
        reducing = self.start_reduce(computed, queued)
        return self.start_combine(reducing) if isinstance(reducing, PeerSums) else reducing

    def cross_back(self, returning: CombineHandle | Combining) -> Combining:
        """Starts the combine of the first hop, if that is not the last one."""
        if isinstance(returning, Combining):
            return returning
        return self.start_combine(self.finish_reduce(returning))

    def compute(self, place: LayerPlace, sent: DispatchHandle) -> Combining:
        """Computes the rows of a started first hop, and starts their combine."""
        halfway = self.gate_up(place, self.forward(sent))
        return self.cross_back(self.start_return(*self.down(place, halfway)))

    @unit
    def shared(self, place: LayerPlace, normed: Rows) -> jax.Array | None:
        """Returns the shared expert's part [T, D]."""
        return decoder.shared_expert(self.stack, place, self.context, normed)

    @unit
    def add(self, place: LayerPlace, x: Block, y: jax.Array, shared: jax.Array | None) -> Residual:
        """Returns the residual after the experts."""
        return decoder.add_experts(self.stack, place, self.context, x, y, shared)

    @unit
    def attention(self, place: LayerPlace, x: Residual, pages: Any) -> tuple[Block, Any]:
        """Runs the whole attention block: returns the residual and the pages."""
        return decoder.attention_block(self.stack, place, self.context, x, pages)

    @unit
    def project(self, place: LayerPlace, x: Residual) -> tuple[Block, Any]:
        """Runs the part of attention before its core."""
        return decoder.queries(self.stack, place, self.context, x)

    @unit
    def core(self, place: LayerPlace, tokens: Any, pages: Any) -> tuple[jax.Array, Any]:
        """Runs the attention core: returns outputs of all heads [T, H, V], and the pages."""
        return decoder.core(self.stack, place, self.context, tokens, pages)

    @unit
    def output(self, place: LayerPlace, x: Block, heads: jax.Array) -> tuple[Block, Routed]:
        """Runs the part of attention after its core, and the router."""
        x = decoder.output(self.stack, place, self.context, x, heads)
        return x, self.route(place, x)
