"""How much memory the latent cache takes: bytes of a row and of a page, the pages of a budget, the arrays of a pool.

`cache_dtype` names how a row is stored: float32, bfloat16, float16, or fp8, which are the bytes of
`pallas_kernels.mla.layout` (e4m3 latents with their scales and bfloat16 rotated keys). A model with sparse attention
has index keys beside the latents, in the same type: 132 bytes per token in fp8. Both are one page: whoever takes, moves
or keeps a page has both.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dsv3.config.model import IndexerConfig, ModelConfig
from pallas_kernels import dsa, mla

FP8 = "fp8"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexedPages:
    """A pool of pages with index keys: page `p` of layer `l` is row `l * num_pages + p` of both arrays.

    The layers of `keys` are those with an indexer (`ModelConfig.index_layers`).
    """

    latents: Any  # [num_cache_layers * num_pages, 64, R + P], or FP8 rows
    keys: Any  # [len(index_layers) * num_pages, 64, Y], or FP8 rows


def row_bytes(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns the bytes of one token's latents in one layer: for DeepSeek-V3 1,152 in bfloat16 and 656 in fp8."""
    width, dtype = _row(cfg, cache_dtype)
    return width * dtype.itemsize


def key_bytes(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns the bytes of one token's index key in one layer: for DeepSeek-V3.2 256 in bfloat16 and 132 in fp8."""
    if cfg.indexer is None:
        return 0
    width, dtype = _key_row(cfg.indexer, cache_dtype)
    return width * dtype.itemsize


def token_bytes(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns the bytes of one token over all cache layers: 70,272 for DeepSeek-V3 in bfloat16 (61 layers, no MTP)."""
    return cfg.num_cache_layers * row_bytes(cfg, cache_dtype) + len(cfg.index_layers) * key_bytes(cfg, cache_dtype)


def page_bytes(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns the bytes of one page over all cache layers."""
    return cfg.page_size * token_bytes(cfg, cache_dtype)


def pages_within(cfg: ModelConfig, cache_dtype: str, budget: int) -> int:
    """Returns how many pages `budget` bytes hold, each counted over all cache layers."""
    return max(0, budget) // page_bytes(cfg, cache_dtype)


def pool(cfg: ModelConfig, cache_dtype: str, num_pages: int) -> Any:
    """Returns shape and dtype of one rank's pool: page `p` of layer `l` is row `l * num_pages + p`.

    It is a `jax.ShapeDtypeStruct`, or `IndexedPages` of two.
    """

    def rows(layers: int, row: tuple[int, jnp.dtype]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layers * num_pages, cfg.page_size, row[0]), row[1])

    latents = rows(cfg.num_cache_layers, _row(cfg, cache_dtype))
    if cfg.indexer is None:
        return latents
    return IndexedPages(latents, rows(len(cfg.index_layers), _key_row(cfg.indexer, cache_dtype)))


def latents_of(pool: Any) -> Any:
    """Returns the part of a pool, or of its shapes, that holds latents."""
    return pool.latents if isinstance(pool, IndexedPages) else pool


def _row(cfg: ModelConfig, cache_dtype: str) -> tuple[int, jnp.dtype]:
    if cache_dtype == FP8:
        return mla.fp8_row_bytes(cfg.kv_lora_rank, cfg.qk_rope_head_dim), mla.FP8_PAGES_DTYPE
    return cfg.latent_dim, jnp.dtype(cache_dtype)


def _key_row(indexer: IndexerConfig, cache_dtype: str) -> tuple[int, jnp.dtype]:
    return dsa.key_row(indexer.head_dim, None if cache_dtype == FP8 else jnp.dtype(cache_dtype))
