"""NCCL EP's calls as jax functions, inside `shard_map`, on the group of one micro-batch.

Shapes: t tokens of this rank, at most T of any, K ids per token, R ranks. A whole call returns finished arrays. With
`halves` the call only sends, its results are buffers that are still empty, and `complete` returns them filled.
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
    def origin_bytes(self) -> int:
        """Bytes of the buffer in which the library notes where rows came from (`ncclEpHandleMemSize`)."""
        key = self.key
        notes = _COUNT_BYTES * key.ranks * (1 + (key.top_k + 1) * key.tokens), _LAYOUT_BYTES * key.experts
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in notes)

    def dispatch(self, ids: jax.Array, weights: jax.Array, payload: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Sends each token once to every rank that owns one of its experts.

        ids `[t, K]` int32, -1 for none; weights `[t, K]` float32; payload: tokens `[t, W]`, and scales `[t, S]` if they
        have some. Returns ids `[R, T, K]`, -1 for those of other ranks; weights; origins; and the payload, `[R, T, W]`
        and so on: lines of one rank in any order, undefined where all ids are -1.
        """
        head = [self._received(ids), self._received(weights), jax.ShapeDtypeStruct((self.origin_bytes,), jnp.uint8)]
        results = [*head, *map(self._received, payload)]
        return tuple(self._call("Dispatch", results, (ids, weights, *payload), send_only=self.halves))

    def combine(self, sums: jax.Array, origins: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        """Sends each line of sums `[R, T, D]` back to its token and adds those of a token in the order of its ids.

        Adds in float32. Returns `[t, D]` in the dtype of the sums, alone in a tuple.
        """
        shape = jax.ShapeDtypeStruct((ids.shape[0], sums.shape[2]), sums.dtype)
        return tuple(self._call("Combine", [shape], (sums, origins, ids), send_only=self.halves))

    def complete(self, started: tuple[jax.Array, ...], *kept: jax.Array) -> tuple[jax.Array, ...]:
        """Waits for the call that `started` are the results of; `kept` are arrays that it still reads."""
        aliases = {i: i for i in range(len(started))}
        return tuple(self._call("Complete", list(map(_shape, started)), (*started, *kept), aliases))

    def _received(self, array: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.key.ranks, self.key.tokens, array.shape[1]), array.dtype)

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
