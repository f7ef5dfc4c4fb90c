"""Routed experts that live on several ranks: the same contract as `experts.moe`, with a transport in between."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dsv3.model import experts
from dsv3.model.linear import Index, Numerics, at
from dsv3.model.params import Fp8Weight, MoeParams
from dsv3.model.tensor_parallel import ONE_DEVICE, Shards
from pallas_kernels import fp8
from sharding.exchange import Experts, Rows
from sharding.placement import Placement, choose_replicas
from sharding.transport import Transport, pad_rounds


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """Sends each row to the ranks that hold its experts and sums what comes back; to be called inside `shard_map`.

    `placement` says where the copies of each logical expert are; it is data, so a running server can change it. The
    parameters hold this rank's physical experts only, `[L, span, ...]`. Rows travel as FP8 with their scales when the
    experts are FP8 (they would be quantised on arrival), in their own dtype otherwise; sums come back in that dtype.
    The devices of a rank, `shards`, all have its tokens: each sends its part of them, and all get all sums.
    """

    transport: Transport
    placement: Placement
    shards: Shards = ONE_DEVICE

    def __call__(
        self,
        x: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array,
        params: MoeParams,
        layer: Index,
        numerics: Numerics,
        /,
    ) -> tuple[jax.Array, experts.Tally]:
        """As `experts.moe`; `topk_ids` are logical, and so are the counts, which are of this rank's rows."""
        handle = self.start(x, topk_ids, topk_weights, params, layer, numerics)
        y, tally = self.finish(handle, params, layer, numerics)
        return y, tally._replace(rounds=pad_rounds(tally.rounds))

    def start(
        self,
        x: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array,
        params: MoeParams,
        layer: Index,
        numerics: Numerics,
    ) -> "InFlight":
        """The first half: rows sent, their experts computed, sums on their way back. Arguments as of the whole."""

        def address(x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array) -> Rows:
            return self.address(x, topk_ids, topk_weights, params, layer, numerics)

        rows = jax.jit(address)(x, topk_ids, topk_weights)
        return InFlight(topk_ids, self.transport.start(rows, local_experts(params, layer, numerics)))

    def finish(
        self, flight: "InFlight", params: MoeParams, layer: Index, numerics: Numerics
    ) -> tuple[jax.Array, experts.Tally]:
        """The second half; what is computed between the two hides the way back (the shared expert does).

        The tally's rounds are [hops], None for a transport without hops.
        """
        y, rounds = self.transport.finish(flight.handle, local_experts(params, layer, numerics))
        y = self.shards.join(y, flight.topk_ids.shape[0])
        return y, experts.Tally(count(flight.topk_ids, self.placement.copies.shape[1]), rounds)

    def address(
        self,
        x: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array,
        params: MoeParams,
        layer: Index,
        numerics: Numerics,
    ) -> Rows:
        """The rows that this device sends, with a copy chosen for each of their experts."""
        part = self.shards.part
        x, topk_ids, topk_weights = part(x), part(topk_ids, -1), part(topk_weights)
        rank = jax.lax.axis_index(self.transport.machine.axes)
        slots, copies = at(self.placement.slots, layer), at(self.placement.copies, layer)
        physical = choose_replicas(topk_ids, slots, copies, rank)
        return Rows(pack(x, params, numerics), physical, topk_weights)


class InFlight(NamedTuple):
    """A layer between the halves of `ExpertParallel`."""

    topk_ids: jax.Array
    handle: Any


def local_experts(params: MoeParams, layer: Index, numerics: Numerics) -> Experts:
    """The experts of this rank as a transport calls them."""
    return lambda rows: experts.moe(rows.payload, rows.ids, rows.weights, params, layer, numerics)[0]


@functools.partial(jax.jit, static_argnames="num_experts")
def count(topk_ids: jax.Array, num_experts: int) -> jax.Array:
    """How often each expert was chosen, `[E]` int32."""
    return (topk_ids[..., None] == jnp.arange(num_experts)).sum(axis=(0, 1), dtype=jnp.int32)


def pack(x: jax.Array, params: MoeParams, numerics: Numerics) -> jax.Array | experts.Quantized:
    """Rows as they are sent: quantised where the experts are FP8."""
    if not isinstance(params.gate_up, Fp8Weight):
        return x
    values, scale = fp8.quantize_1x128(x, ue8m0=numerics.ue8m0, backend=numerics.backend)
    return experts.Quantized(values, scale.T, x.dtype)
