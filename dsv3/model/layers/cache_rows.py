"""Rows of a paged cache by their numbers in a request: entries of the context, rings in pages of the window, in slots.

Rows are numbered from a request's first one on: entries in their order, or tokens by their positions. A ring holds the
last rows of its page alone. Rows that a rejected draft has written are written again before anything sees them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from dsv3.config.model import ModelConfig
from dsv3.kv_cache.layout import Pool, pages_per_layer
from dsv3.model.batch import StepRows
from dsv3.model.layers.linear import Index
from pallas_kernels.compressed import RowList
from pallas_kernels.mla.write import DROPPED, write_rows

_SLOT = 2**30  # tokens that one slot serves: those of any request


@dataclasses.dataclass(frozen=True)
class CacheRows:
    """The rows of one cache group in one layer, for a step: row n of request b is in page `table[b, n // per_page]`.

    There it is row `n % per_page % R`; R is less than `per_page` where pages are rings. Of pages that devices divide, n
    counts the rows that this device holds.
    """

    step: StepRows
    array: jax.Array  # [layers * pages, R, W]
    table: jax.Array  # [B, Mp] int32
    layer: Index
    pages: int  # of each layer
    per_page: int

    @classmethod
    def of(cls, cfg: ModelConfig, name: str, pool: Pool, rows: StepRows, layer: Index) -> "CacheRows":
        """Returns the rows of the group of this name, in its layer number `layer`."""
        (group,) = (group for group in cfg.cache_groups("float32") if group.name == name)  # of any dtype
        match group.lifetime:
            case "context":
                table, per_page = rows.page_table, pool[name].shape[1]
            case "window":
                table, per_page = rows.window_table, cfg.page_size
            case "request":
                table, per_page = rows.slots[:, None], _SLOT
        pages = pages_per_layer(cfg, pool, group.lifetime)
        return cls(rows, pool[group.name], table, layer, pages, per_page)

    @property
    def first(self) -> Index:
        """The layer's first page."""
        return self.layer * self.pages

    @property
    def capacity(self) -> int:
        """Rows that the pages of a request have."""
        return self.table.shape[1] * self.per_page

    def locate(self, requests: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns pages of the layer and rows in them, `[...]` each, of `numbers` `[...]` of `requests` `[...]`."""
        column = jnp.clip(numbers // self.per_page, 0, self.table.shape[1] - 1)
        return self.table[requests, column], numbers % self.per_page % self.array.shape[1]

    def read(self, requests: jax.Array, numbers: jax.Array) -> jax.Array:
        """Returns rows `[N, K, W]`: `numbers` `[N, K]` of `requests` `[N]`, and any row for what is not there."""
        pages, rows = self.locate(requests[:, None], numbers)
        return self.array.at[self.first + pages, rows].get(mode="clip")

    def read_tokens(self, requests: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
        """Returns rows `[N, K, W]` of tokens at `positions` `[N, K]` of `requests` `[N]`, none behind the step's last.

        Those of the step come from `new` `[T, W]`, earlier ones from the cache. Where there is no token, or none that
        the cache still has, it is any row.
        """
        back = positions - self.step.contexts[requests][:, None]
        own = new.at[self.step.firsts[requests][:, None] + back].get(mode="clip")
        return jnp.where((back >= 0)[..., None], own, self.read(requests, positions))

    def list_last(self, requests: jax.Array, positions: jax.Array, seen: jax.Array, window: int) -> RowList:
        """Lists the last `window` tokens up to `positions` `[N]` of `requests` `[N]`, none for a row with `seen` 0.

        Those of the step are its own rows, in the order of its tokens; earlier ones are in the cache. Of two
        micro-batches the later one has the last rows of the earlier one in front of its own, `window` or as many as
        the micro-batch has: the cache need not have them.
        """
        step = self.step
        tokens = jnp.maximum(positions - (window - 1), 0)[:, None] + jnp.arange(window, dtype=jnp.int32)
        back = tokens - step.contexts[requests][:, None]
        own = -1 - (step.firsts[requests][:, None] + back)
        if step.rows_before is not None:
            count = min(window, len(step.positions))
            own, back = own - count, back + jnp.minimum(step.rows_before, count)[requests][:, None]
        counts = jnp.where(seen > 0, jnp.minimum(positions + 1, window), 0)
        listed = self.list_rows(requests, tokens, counts)
        return dataclasses.replace(listed, numbers=jnp.where(back >= 0, own, listed.numbers))

    def list_rows(self, requests: jax.Array, numbers: jax.Array, counts: jax.Array) -> RowList:
        """Lists the first `counts` `[N]` of the rows `numbers` `[N, K]` of `requests` `[N]`."""
        pages, rows = self.locate(requests[:, None], numbers)
        return self.of_layer(RowList(self.array, pages * self.array.shape[1] + rows, counts))

    def of_layer(self, listed: RowList) -> RowList:
        """Returns a list of rows of another layer of the group as one of this layer."""
        return dataclasses.replace(
            listed, array=self.array, layer=self.layer, layer_rows=self.pages * self.array.shape[1]
        )

    def write(self, values: jax.Array, requests: jax.Array, numbers: jax.Array, where: jax.Array) -> jax.Array:
        """Returns the array with `values` `[N, W]` as rows `numbers` `[N]` of `requests` `[N]`, those of `where` `[N]`.

        Rows of pages below 0 are dropped. No two rows may have one place.
        """
        pages, rows = self.locate(requests, numbers)
        targets = jnp.where(where & (pages >= 0), self.first + pages, DROPPED)
        return write_rows(self.array, values.astype(self.array.dtype), targets, rows)

    def write_new(self, new: jax.Array) -> jax.Array:
        """Returns the array with the rows `new` `[T, W]` of the step's tokens that its last ones leave."""
        step = self.step
        lasting = step.valid & self.is_last_write(step.positions, step.ends[step.requests])
        return self.write(new, step.requests, step.positions, lasting)

    def write_after(self, read: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Does what `write_new` does behind the computation of `read`; returns both.

        `read` is what was made of the array before: the compiler must not copy the array to keep what it was.
        """
        read, array = lax.optimization_barrier((read, self.array))
        return read, dataclasses.replace(self, array=array).write_new(new)

    def is_last_write(self, numbers: jax.Array, ends: jax.Array) -> jax.Array:
        """Returns which rows `numbers` `[N]` no later one of the same step replaces, all before `ends` `[N]`."""
        again = numbers + self.array.shape[1]
        return (again // self.per_page > numbers // self.per_page) | (again >= ends)
