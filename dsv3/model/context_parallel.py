"""Decode context parallelism: the devices of a rank divide the tokens of each page of the cache.

Tensor parallelism alone replicates the latents, which all heads share. Here a page covers D times as many tokens, and
device d of a group of D holds tokens `[d * P, (d + 1) * P)` of every page, P being the page size of the kernels. So
scheduler, prefix keys, tiers and transfer only have larger pages, and kernels read whole pages of their own size.

To attend in absorbed form, the devices gather each other's queries, each attends with the heads of the group to its own
tokens, and the parts are merged by log-sum-exp on the device that has the head. In materialized form they gather the
latents of a layer instead, and each attends with its own heads to all tokens. Both give every device the same work, so
causality needs no balance: a request's tokens lie on the devices in turns of P. In sparse attention each device scores
its own index keys, and the best of all devices are found among its best.

Where entries stand for several tokens (DeepSeek-V4), devices divide the entries of a page likewise. Latents of the
window, which every device has, they divide as they attend. The sink is counted once, in the merged result.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import ModelConfig
from pallas_kernels import dsa, mla
from pallas_kernels.backend import Backend
from pallas_kernels.compressed import RowList
from sharding.mesh import CONTEXT

NOWHERE = 2**30
"""The position of no token: behind all others."""


@dataclasses.dataclass(frozen=True)
class ContextShards:
    """The `size` devices of a group, inside `shard_map`; each holds `tokens` tokens, or entries, of a page."""

    size: int
    tokens: int

    @classmethod
    def of(cls, cfg: ModelConfig, ratio: int = 1) -> "ContextShards":
        """Returns the devices that divide the pages of a model, whose entries stand for `ratio` tokens each."""
        return cls(cfg.context_shards, cfg.page_size // cfg.context_shards // ratio)

    def own_offsets(self, offsets: jax.Array) -> jax.Array:
        """Returns rows of pages as rows of this device's part; out of `[0, tokens)` where another device has them."""
        return offsets if self.size == 1 else offsets - lax.axis_index(CONTEXT) * self.tokens

    def own_lengths(self, lengths: jax.Array) -> jax.Array:
        """Returns how many of the first `lengths` tokens of requests this device holds, its first ones."""
        if self.size == 1:
            return lengths
        pages, rest = jnp.divmod(lengths, self.size * self.tokens)
        return pages * self.tokens + jnp.clip(self.own_offsets(rest), 0, self.tokens)

    def own_tokens(self, positions: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Selects what this device holds of the `valid` tokens `[T, n]` at `positions` `[T, n]` of their requests.

        Returns their places among the tokens that it holds of the request, `[T, n]`, in rising order and from the first
        column on, and how many they are, `[T]`.
        """
        pages, rest = jnp.divmod(positions, self.size * self.tokens)
        offsets = self.own_offsets(rest)
        own = valid & (offsets >= 0) & (offsets < self.tokens)
        places = jnp.sort(jnp.where(own, pages * self.tokens + offsets, NOWHERE), axis=1)
        return places, own.sum(axis=1, dtype=jnp.int32)

    def own_parts(self, page_table: jax.Array) -> jax.Array:
        """Returns the parts of pages `[B, Mp]`, `[B, D * Mp]`: the page where this device holds the part, else -1."""
        if self.size == 1:
            return page_table
        own = jnp.arange(self.size) == lax.axis_index(CONTEXT)
        return jnp.where(own, page_table[..., None], -1).reshape(len(page_table), -1)

    def own_share(self, rows: RowList) -> RowList:
        """Returns every D-th of the listed rows, which all devices hold: those that this device attends to."""
        if self.size == 1:
            return rows
        count, listed = rows.numbers.shape
        turns = jnp.pad(rows.numbers, ((0, 0), (0, -listed % self.size))).reshape(count, -1, self.size)
        device = lax.axis_index(CONTEXT)
        numbers = lax.dynamic_index_in_dim(turns, device, axis=2, keepdims=False)
        return dataclasses.replace(rows, numbers=numbers, counts=(rows.counts + self.size - 1 - device) // self.size)

    def topk_indices(
        self,
        q: jax.Array,
        weights: jax.Array,
        pool: jax.Array,
        page_table: jax.Array,
        visible: jax.Array,
        *,
        first_page: jax.Array | int,
        topk: int,
        backend: Backend | None,
    ) -> jax.Array:
        """Returns what `dsa.topk_indices` does, of the index keys of all devices; `NOWHERE` ends a row of fewer."""
        if self.size == 1:
            return dsa.topk_indices(
                q, weights, pool, page_table, visible, first_page=first_page, topk=topk, backend=backend
            )
        seen = self.own_lengths(visible)
        places, scores = dsa.topk_scores(
            q, weights, pool, page_table, seen, first_page=first_page, topk=topk, backend=backend
        )
        return self.best_tokens(jnp.where(places < seen[:, None], places, NOWHERE), scores, topk)

    def best_tokens(self, places: jax.Array, scores: jax.Array, topk: int) -> jax.Array:
        """Returns the positions `[T, topk]`, in rising order, of the highest scores of all devices of the group.

        This device's best tokens are at `places` `[T, n]` among those that it holds, where `NOWHERE` has the score
        -inf. Of equal scores the first win; `NOWHERE` ends a row of fewer tokens.
        """
        pages, offsets = jnp.divmod(places, self.tokens)
        positions = (pages * self.size + lax.axis_index(CONTEXT)) * self.tokens + offsets
        positions = jnp.where(places == NOWHERE, NOWHERE, positions)
        every = (lax.all_gather(x, CONTEXT, axis=1, tiled=True) for x in (-scores, positions))
        return jnp.sort(lax.sort(tuple(every), num_keys=2)[1][:, :topk], axis=1)

    def join_heads(self, queries: jax.Array) -> jax.Array:
        """Joins the heads of all devices of the group: from `[T, H, W]` to `[T, D * H, W]`."""
        return queries if self.size == 1 else lax.all_gather(queries, CONTEXT, axis=1, tiled=True)

    def merge(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Merges attention to the tokens of each device: from `[T, D * H, V]`, `[T, D * H]` to the own H heads' whole.

        A query that sees no token of a device has lse +inf there, as in `mla_decode`. Sums are float32; one exchange
        carries both arrays.
        """
        if self.size == 1:
            return out, lse
        (T, heads, _), word = out.shape, jnp.dtype(f"uint{8 * out.dtype.itemsize}")
        sent = jnp.concatenate(
            [lax.bitcast_convert_type(out, word), lax.bitcast_convert_type(lse, word).reshape(T, heads, -1)], axis=-1
        )
        sent = sent.reshape(T, self.size, heads // self.size, -1).swapaxes(0, 1)
        got = lax.all_to_all(sent, CONTEXT, 0, 0, tiled=True)
        return mla.merge_parts(*_split(got, out.shape[-1], out.dtype))

    def join_tokens(self, rows: jax.Array) -> jax.Array:
        """Joins the rows `[n * tokens, W]` of this device's part of n pages with those of the others, in order."""
        if self.size == 1:
            return rows
        parts = lax.all_gather(rows.reshape(-1, self.tokens, rows.shape[-1]), CONTEXT, axis=1, tiled=True)
        return parts.reshape(-1, rows.shape[-1])


def _split(words: jax.Array, width: int, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and log-sum-exps from the words of `ContextShards.merge`."""
    lse = words[..., width:]
    out = lax.bitcast_convert_type(words[..., :width], dtype)
    return out, lax.bitcast_convert_type(lse if lse.shape[-1] > 1 else lse[..., 0], jnp.float32)
