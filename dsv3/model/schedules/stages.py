"""The stages of an MoE layer, between which a schedule puts the work of the other micro-batch.

The stages of a layer in their order, those in brackets only where rows take a second hop:

    project, core, output (and router), dispatch, [forward], gate_up, down, [start_reduce, finish_reduce],
    start_combine, finish_combine; and shared at any time after the router

`dispatch`, `forward`, `start_reduce` and `start_combine` begin a transfer for which the next stage waits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Concatenate, NamedTuple

import jax

from dsv3.model import decoder
from dsv3.model.decoder import LayerContext, Residual, Stack
from dsv3.model.layers import experts
from dsv3.model.layers.attention import Projected
from dsv3.model.layers.expert_parallel import ExpertParallel, count
from dsv3.model.layers.experts import ExpertActivations, ExpertLayer, RouterStats
from dsv3.model.layers.linear import Index
from dsv3.model.layers.router import Routing
from sharding.experts.exchange import CombineHandle, PeerSums, start_return, total
from sharding.experts.hop import DispatchHandle, Hop, Queued, enqueue, receive, receive_back, send, send_back
from sharding.experts.rows import TokenRows
from sharding.wire.collectives import Transfer


class Routed(NamedTuple):
    """A micro-batch between its router and its combine."""

    normed: jax.Array  # [T, D], the shared expert's input
    ids: jax.Array  # [T, K], experts
    queued: Queued


class Halfway(NamedTuple):
    """A micro-batch between the two products of its experts; `queued` before the last hop that its rows took."""

    activations: ExpertActivations
    queued: Queued


class Combining(NamedTuple):
    """Partial sums under way to the devices that sent the rows."""

    transfer: Transfer
    overflows: tuple[jax.Array, ...]  # of all behind the first hop


def named[**P, R](stage: Callable[Concatenate["MicroBatch", P], R]) -> Callable[Concatenate["MicroBatch", P], R]:
    """Names the operations of a stage `micro_batch_N`, by which profiles and plans tell whose they are."""

    @functools.wraps(stage)
    def run(batch: "MicroBatch", *args: P.args, **kwargs: P.kwargs) -> R:
        with jax.named_scope(f"micro_batch_{batch.number}"):
            return stage(batch, *args, **kwargs)

    return run


def unit[**P, R](
    stage: Callable[Concatenate["MicroBatch", Index, P], R],
) -> Callable[Concatenate["MicroBatch", Index, P], R]:
    """Runs a stage as one jitted unit, and names its operations as `named` does.

    Program order is enforced between units, not inside of them: enforced on single operations it would also keep XLA
    from fusing these. A unit closes over the parameters and the layer's index, and takes the arrays that it works on.
    """

    @functools.wraps(stage)
    def run(batch: "MicroBatch", layer: Index, *arrays: P.args, **named: P.kwargs) -> R:
        with jax.named_scope(f"micro_batch_{batch.number}"):
            return jax.jit(functools.partial(stage, batch, layer))(*arrays, **named)

    return run


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on its way through a stack of MoE layers: what its layers have in common, and their stages."""

    stack: Stack
    context: LayerContext
    number: int = 0

    @property
    def parallel(self) -> ExpertParallel:
        """The experts behind their transport. Raises ValueError where they are local: nothing could be hidden."""
        if not isinstance(self.context.routed, ExpertParallel):
            raise ValueError(f"only ExpertParallel experts can be overlapped, not {self.context.routed}")
        return self.context.routed

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self.parallel.transport.hops

    def experts(self, layer: Index) -> ExpertLayer:
        return self.stack.experts(layer, self.context.numerics)

    @unit
    def choose(self, layer: Index, x: Residual) -> tuple[jax.Array, Routing]:
        """Runs norm and router: returns what the experts work on, [T, D], and which ones of each row."""
        normed = decoder.post_normed(self.stack, layer, self.context, x)
        return normed, decoder.choose_experts(self.stack, layer, self.context, normed)

    @unit
    def route(self, layer: Index, x: Residual) -> Routed:
        """Runs norm and router, and queues the rows to send."""
        normed, routing = self.choose(layer, x)
        rows = self.parallel.address(normed, routing, self.experts(layer))
        return Routed(normed, routing.ids, enqueue(rows, self.hops[0]))

    @named
    def dispatch(self, routed: Routed) -> DispatchHandle:
        """Starts the first hop."""
        return send(routed.queued, self.hops[0])

    @named
    def forward(self, sent: DispatchHandle) -> DispatchHandle:
        """Finishes the first hop and starts the second, if there is one."""
        if len(self.hops) == 1:
            return sent
        return send(enqueue(receive(sent, self.hops[0]), self.hops[1]), self.hops[1])

    @named
    def gate_up(self, layer: Index, sent: DispatchHandle) -> Halfway:
        """Finishes the last hop, and makes the first product of the rows' experts."""
        return Halfway(self._gate_up(layer, receive(sent, self.hops[-1])), sent.queued)

    @unit
    def _gate_up(self, layer: Index, rows: TokenRows) -> ExpertActivations:
        here = self.parallel.bounded(self.experts(layer))
        return experts.gate_up(rows.payload, Routing(rows.ids, rows.weights), here)

    @named
    def down(self, layer: Index, halfway: Halfway) -> tuple[PeerSums, Queued]:
        """Makes the second product: the sums of the rows that the last hop brought, and where those are queued."""
        return PeerSums.from_experts(
            self._down(layer, halfway.activations), halfway.activations.overflow
        ), halfway.queued

    @unit
    def _down(self, layer: Index, activations: ExpertActivations) -> jax.Array:
        return experts.down(activations, self.experts(layer))

    @named
    def start_reduce(self, computed: PeerSums, queued: Queued) -> CombineHandle | PeerSums:
        """Starts the way back inside the node, if there was a second hop."""
        return computed if len(self.hops) == 1 else start_return(computed, queued, self.hops[1])

    @named
    def finish_reduce(self, reducing: CombineHandle | PeerSums) -> PeerSums:
        """Returns the partial sums of the rows that the first hop brought."""
        if isinstance(reducing, PeerSums):
            return reducing
        return PeerSums(receive_back(reducing.transfer, reducing.queued, self.hops[1]), reducing.overflows)

    @named
    def start_combine(self, computed: PeerSums) -> Combining:
        """Starts the way back of the first hop."""
        return Combining(send_back(computed.sums, self.hops[0]), computed.overflows)

    @named
    def finish_combine(
        self, layer: Index, x: Residual, routed: Routed, combining: Combining, shared: jax.Array | None
    ) -> tuple[Residual, RouterStats]:
        """Returns `x` after the MoE layer: what comes back, and the shared expert."""
        y = receive_back(combining.transfer, routed.queued, self.hops[0])
        overflows = (routed.queued.overflows, *combining.overflows)
        return self._finish_combine(layer, x, y, routed.ids, overflows, shared)

    @unit
    def _finish_combine(
        self,
        layer: Index,
        x: Residual,
        y: jax.Array,
        ids: jax.Array,
        overflows: tuple[jax.Array, ...],
        shared: jax.Array | None,
    ) -> tuple[Residual, RouterStats]:
        y = self.parallel.shards.join(y, ids.shape[0])
        router_stats = RouterStats(count(ids, self.stack.moe.router.shape[1]), total(overflows))
        return decoder.add_experts(self.stack, layer, self.context, x, y, shared), router_stats

    def start_return(self, computed: PeerSums, queued: Queued) -> CombineHandle | Combining:
        """Starts the way back by the last hop."""
        reducing = self.start_reduce(computed, queued)
        return self.start_combine(reducing) if isinstance(reducing, PeerSums) else reducing

    def cross_back(self, returning: CombineHandle | Combining) -> Combining:
        """Starts the way back by the first hop, if that is not the last one."""
        if isinstance(returning, Combining):
            return returning
        return self.start_combine(self.finish_reduce(returning))

    def compute(self, layer: Index, sent: DispatchHandle) -> Combining:
        """Computes the rows under way by the first hop, and starts their sums' way back by it, in one go."""
        halfway = self.gate_up(layer, self.forward(sent))
        return self.cross_back(self.start_return(*self.down(layer, halfway)))

    @unit
    def shared(self, layer: Index, normed: jax.Array) -> jax.Array | None:
        """Returns the shared expert's part [T, D]."""
        return decoder.shared_expert(self.stack, layer, self.context, normed)

    @unit
    def add(self, layer: Index, x: Residual, y: jax.Array, shared: jax.Array | None) -> Residual:
        """Returns the residual after the experts."""
        return decoder.add_experts(self.stack, layer, self.context, x, y, shared)

    @unit
    def attention(self, layer: Index, x: Residual, pages: jax.Array) -> tuple[Residual, jax.Array]:
        """Runs the whole attention block: returns the residual and the pages."""
        return decoder.attention_block(self.stack, layer, self.context, x, pages)

    @unit
    def project(self, layer: Index, x: Residual) -> Projected:
        """Runs the part of attention before its core."""
        return decoder.queries(self.stack, layer, self.context, x)

    @unit
    def core(self, layer: Index, tokens: Projected, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs the attention core: returns outputs of all heads [T, H, V], and the pages."""
        return decoder.core(self.stack, layer, self.context, tokens, pages)

    @unit
    def output(self, layer: Index, x: Residual, heads: jax.Array) -> tuple[Residual, Routed]:
        """Runs the part of attention after its core, and the router."""
        x = decoder.output(self.stack, layer, self.context, x, heads)
        return x, self.route(layer, x)
