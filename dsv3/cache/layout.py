"""How much memory the latent cache takes: bytes of a row and of a page, the pages of a budget, the arrays of a pool.

`cache_dtype` names how a row is stored: float32, bfloat16, float16, or fp8, which are the bytes of
`pallas_kernels.mla.layout` (e4m3 latents with their scales and bfloat16 rotated keys).
"""

import jax
import jax.numpy as jnp

from dsv3.cache.page import PAGE_SIZE
from dsv3.config import ModelConfig
from pallas_kernels import mla

FP8 = "fp8"


def row_bytes(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns the bytes of one token in one layer: for DeepSeek-V3 1,152 in bfloat16 and 656 in fp8."""
    width, dtype = _row(cfg, cache_dtype)
    return width * dtype.itemsize


def token_bytes(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns the bytes of one token over all cache layers: 70,272 for DeepSeek-V3 in bfloat16 (61 layers, no MTP)."""
    return cfg.num_cache_layers * row_bytes(cfg, cache_dtype)


def page_bytes(cfg: ModelConfig, cache_dtype: str) -> int:
    """Returns the bytes of one page over all cache layers."""
    return PAGE_SIZE * token_bytes(cfg, cache_dtype)


def pages_within(cfg: ModelConfig, cache_dtype: str, budget: int) -> int:
    """Returns how many pages `budget` bytes hold, each counted over all cache layers."""
    return max(0, budget) // page_bytes(cfg, cache_dtype)


def pool(cfg: ModelConfig, cache_dtype: str, num_pages: int) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of one rank's pool: page `p` of layer `l` is row `l * num_pages + p`."""
    width, dtype = _row(cfg, cache_dtype)
    return jax.ShapeDtypeStruct((cfg.num_cache_layers * num_pages, PAGE_SIZE, width), dtype)


def _row(cfg: ModelConfig, cache_dtype: str) -> tuple[int, jnp.dtype]:
    if cache_dtype == FP8:
        return mla.fp8_row_bytes(cfg.kv_lora_rank, cfg.qk_rope_head_dim), mla.FP8_PAGES_DTYPE
    return cfg.latent_dim, jnp.dtype(cache_dtype)
