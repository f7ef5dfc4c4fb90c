"""NCCL EP's calls as jax functions, inside `shard_map`, on the group of one micro-batch.

Shapes: t tokens of this rank, at most T of any, K ids per token. Received rows are on lines `[R, T, ...]`, those of R
ranks, with low latency, and `[C, N, ...]`, those of C chunks, with high throughput. A whole call returns finished
arrays. With `halves` the call is started, its results are buffers that are still empty, and `complete` returns them
filled; until then other arrays that it reads must live.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sharding.nccl_ep.library import GroupKey, targets

_COUNT_BYTES, _LAYOUT_BYTES, _ALIGNMENT = 4, 8, 256


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls on the group `key`."""

    key: GroupKey
    halves: bool = False

    @property
    def lines(self) -> tuple[int, int]:
        """The leading sizes of received rows."""
        key = self.key
        return (key.chunks, key.received) if key.chunk else (key.ranks, key.tokens)

    @property
    def origins(self) -> jax.ShapeDtypeStruct:
        """The library's notes where rows came from, bytes (`ncclEpHandleMemSize`); with high throughput totals `[C]`.

        A total is the rows that a chunk brings. Where it exceeds N, those in excess are lost.
        """
        key = self.key
        if key.chunk:
            return jax.ShapeDtypeStruct((key.chunks,), jnp.int32)
        notes = _COUNT_BYTES * key.ranks * (1 + (key.top_k + 1) * key.tokens), _LAYOUT_BYTES * key.experts
        return jax.ShapeDtypeStruct((sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in notes),), jnp.uint8)

    def dispatch(self, ids: jax.Array, weights: jax.Array, payload: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Sends each token once to every rank that owns one of its experts.

        ids `[t, K]` int32, -1 for none; weights `[t, K]` float32; payload: tokens `[t, W]`, and scales `[t, S]` if they
        have some. Returns, on lines, ids, -1 for those of other ranks; weights; origins; and the payload, `W` and `S`
        wide. With low latency a line without a row has ids of -1. With high throughput ids are int64, two int32
        `[C, N, K, 2]`, in the order of experts, and rows are on the first lines of a chunk, as many as `origins` says.
        """
        got = self._received(ids)
        got = jax.ShapeDtypeStruct((*got.shape, 2), got.dtype) if self.key.chunk else got
        results = [got, self._received(weights), self.origins, *map(self._received, payload)]
        return tuple(self._call("Dispatch", results, (ids, weights, *payload), send_only=self.halves))

    def combine(self, sums: jax.Array, origins: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        """Sends the sums `[..., D]` on each line back to its token and adds those of a token.

        Adds in float32; with low latency in the order of its ids, otherwise in the order of ranks, first in a node and
        then, rounded, between nodes. Returns `[t, D]` in the dtype of the sums, alone in a tuple.
        """
        shape = jax.ShapeDtypeStruct((ids.shape[0], sums.shape[2]), sums.dtype)
        return tuple(self._call("Combine", [shape], (sums, origins, ids), send_only=self.halves))

    def complete(self, started: tuple[jax.Array, ...], *kept: jax.Array) -> tuple[jax.Array, ...]:
        """Waits for the call that `started` are the results of; `kept` are arrays that it still reads."""
        aliases = {i: i for i in range(len(started))}
        return tuple(self._call("Complete", list(map(_shape, started)), (*started, *kept), aliases))

    def _received(self, array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.lines, array.shape[1]), array.dtype)

    def _call(
        self,
        handler: str,
        results: Sequence[jax.ShapeDtypeStruct],
        operands: Sequence[jax.Array],
        aliases: dict[int, int] | None = None,
        **attributes: bool,
    ) -> Sequence[jax.Array]:
        # Without side effects for XLA: results order the calls of a group, and XLA repeats no custom call.
        call = jax.ffi.ffi_call(targets()[handler], results, input_output_aliases=aliases)
        return call(*operands, group=np.array(self.key, np.int64), **attributes)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
