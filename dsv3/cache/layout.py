"""How much memory the latent cache takes: bytes of a page, and the pages that a budget holds."""

from typing import Any

import jax.numpy as jnp

from dsv3.cache.page import PAGE_SIZE
from dsv3.config import ModelConfig


def token_bytes(cfg: ModelConfig, dtype: Any) -> int:
    """Bytes one token takes over all cache layers: 70,272 for DeepSeek-V3 in bf16 (61 layers of 1,152 B, no MTP)."""
    return cfg.num_cache_layers * cfg.latent_dim * jnp.dtype(dtype).itemsize


def page_bytes(cfg: ModelConfig, dtype: Any) -> int:
    """Bytes one page takes over all cache layers."""
    return PAGE_SIZE * token_bytes(cfg, dtype)


def pages_within(cfg: ModelConfig, dtype: Any, budget: int) -> int:
    """Pages that `budget` bytes hold, each counted over all cache layers."""
    return max(0, budget) // page_bytes(cfg, dtype)


def pool_shape(cfg: ModelConfig, num_pages: int) -> tuple[int, int, int]:
    """Shape of one rank's pool: page `p` of layer `l` is row `l * num_pages + p`."""
    return (cfg.num_cache_layers * num_pages, PAGE_SIZE, cfg.latent_dim)
