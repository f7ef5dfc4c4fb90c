"""Expert parallelism: the contract of `experts.moe` for experts on several devices, over a transport."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.model.layers import experts
from dsv3.model.layers.experts import ExpertLayer, RouterStats
from dsv3.model.layers.linear import Rows, fp8_rows, layer_slice, plain_rows
from dsv3.model.layers.router import Routing
from dsv3.model.params import E4m3Weight
from dsv3.model.tensor_parallel import ONE_DEVICE, Shards
from sharding.experts.placement import Placement, choose_replicas
from sharding.experts.rows import Experts, TokenRows
from sharding.experts.transport import Transport


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """Sends each row to the devices of its experts' replicas and sums what comes back, inside `shard_map`.

    The parameters of a layer hold the replicas of this device only, `[L, Ed, ...]`. Rows travel as FP8 with their
    scales when the experts are FP8 (they would be quantized on arrival), in their own dtype otherwise; sums come back
    in that dtype. All devices of a rank, `shards`, hold its tokens: each sends its part of them, and all receive all
    sums.
    """

    transport: Transport[Any]
    shards: Shards = ONE_DEVICE

    def __call__(self, x: Rows, routing: Routing, layer: ExpertLayer, /) -> tuple[jax.Array, RouterStats]:
        """Returns what `experts.moe` returns; `routing` and the counts are of experts, not of replicas."""
        y, router_stats = self.finish(self.start(x, routing, layer), routing, layer)
        return y, with_overflows(router_stats)

    def start(self, x: Rows, routing: Routing, layer: ExpertLayer) -> Any:
        """Runs the first half: dispatch, experts, and the start of the combine. Returns the transport's handle."""
        rows = jax.jit(functools.partial(self.address, layer=layer))(x, routing)
        here = local_experts(self.bounded(layer))
        return self.transport.start(rows, here, layer.numerics.backend)

    def finish(self, handle: Any, routing: Routing, layer: ExpertLayer) -> tuple[jax.Array, RouterStats]:
        """Finishes the combine; work between `start` and `finish` (the shared expert) hides it.

        The router statistics have no overflows (None) for a transport without hops.
        """
        y, overflows = self.transport.finish(handle)
        y = self.shards.join(y, routing.ids.shape[0])
        return y, RouterStats(count(routing.ids, placement_of(layer).copies.shape[1]), overflows)

    def bounded(self, layer: ExpertLayer) -> ExpertLayer:
        """Returns the experts of this device with capacity for the pairs that the transport may deliver."""
        return dataclasses.replace(layer, pairs=self.transport.pairs)

    def address(self, x: Rows, routing: Routing, layer: ExpertLayer) -> TokenRows:
        """Returns the rows that this device sends, with the replica of each of their experts."""
        placement, part = placement_of(layer), self.shards.part
        x = x if self.shards.size == 1 else part(plain_rows(x))
        ids, weights = part(routing.ids, -1), part(routing.weights)
        device = jax.lax.axis_index(self.transport.machine.axes)
        replicas, copies = layer_slice(placement.replicas, layer.index), layer_slice(placement.copies, layer.index)
        return TokenRows(pack(x, layer), choose_replicas(ids, replicas, copies, device), weights)


def with_overflows(router_stats: RouterStats, *leading: int) -> RouterStats:
    """Returns router statistics with overflows `[*leading]`: zeros if the transport has no hops."""
    return (
        router_stats
        if router_stats.overflows is not None
        else router_stats._replace(overflows=jnp.zeros(leading, jnp.int32))
    )


def placement_of(layer: ExpertLayer) -> Placement:
    """Returns the expert placement of the stack of `layer`. Raises ValueError if it has none."""
    if layer.placement is None:
        raise ValueError(
            "these layers' experts have no placement, so no device is known to hold them: spread this stack's experts "
            "and pass their placement, or run it with LOCAL_EXPERTS"
        )
    return layer.placement


def local_experts(layer: ExpertLayer) -> Experts:
    """Returns the experts of this device as the callable that a transport takes."""

    def run(rows: TokenRows) -> tuple[jax.Array, jax.Array | None]:
        y, router_stats = experts.moe(rows.payload, Routing(rows.ids, rows.weights), layer)
        return y, router_stats.overflows

    return run


@functools.partial(jax.jit, static_argnames="num_experts")
def count(ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns how often `ids` [T, K] name each expert, `[E]` int32."""
    return (ids[..., None] == jnp.arange(num_experts)).sum(axis=(0, 1), dtype=jnp.int32)


def pack(x: Rows, layer: ExpertLayer) -> jax.Array | experts.Quantized:
    """Returns the rows to send: quantized if the experts have e4m3 values."""
    if not isinstance(layer.params.gate_up, E4m3Weight):
        return plain_rows(x)
    values, scale = fp8_rows(x, layer.numerics)
    return experts.Quantized(values, scale.T, x.dtype)
